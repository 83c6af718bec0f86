"""An equilibrium in place of a backbone's last layer, trained with implicit gradients.

Run it by ``python opteq_head.py``.
"""

import timm
import torch
from torch.nn.functional import cross_entropy, interpolate

from solver_plugins import attach_opteq_head
from solver_plugins.train import load_digits

torch.manual_seed(0)
images, labels = load_digits()
images = interpolate(images[:, None] / 8 - 1, size=32).expand(-1, 3, -1, -1)

model = timm.create_model("test_resnet", num_classes=10)  # pretrained=True for a real backbone
attach_opteq_head(model, hidden=32, layers=2, alpha=0.8, gradient="implicit")
head = model.get_classifier()
print(head)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(25):
    rows = torch.randint(0, 1400, (64,))
    loss = cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    features = model.forward_head(model.forward_features(images[1400:]), pre_logits=True)
    solution = head.equilibrium.solve(features)
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
print(f"accuracy {100 * accuracy:.1f}%; largest residual {float(solution.residual.max()):.1e}")
