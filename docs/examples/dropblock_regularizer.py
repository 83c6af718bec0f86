"""DropBlock before the last layer without sampling: its mean effect on the loss, added to it.

Run it by ``python dropblock_regularizer.py``.
"""

import timm
import torch
from torch.nn.functional import cross_entropy, interpolate

from solver_plugins import StructuredDropoutRegularizer
from solver_plugins.train import load_digits

torch.manual_seed(0)
images, labels = load_digits()
images = interpolate(images[:, None] / 8 - 1, size=32).expand(-1, 3, -1, -1)

model = timm.create_model("test_resnet", num_classes=10)
# For cross-entropy it is the second-order term of the expected loss; loss="squared" is exact.
regularizer = StructuredDropoutRegularizer(
    model, "dropblock", theta=0.8, block_size=8, loss="cross_entropy_second_order"
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(25):
    rows = torch.randint(0, 1400, (64,))
    loss = cross_entropy(model(images[rows]), labels[rows])
    penalty = regularizer()  # of the batch that has just gone through the model
    optimizer.zero_grad()
    (loss + penalty).backward()
    optimizer.step()
    if step % 12 == 0:
        added = f"what DropBlock would add on average {penalty.item():.2f}"
        print(f"step {step}: loss {loss.item():.2f}, {added}")
regularizer.remove()

model.eval()
with torch.no_grad():
    accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
print(f"accuracy {100 * accuracy:.1f}%")
