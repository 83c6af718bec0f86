"""ProxProp in a plain torch loop: one line, and step sizes that plain gradients do not survive.

Run it by ``python proxprop_loop.py``.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from solver_plugins import ProxProp
from solver_plugins.train import load_digits

images, y = load_digits()
x = images.flatten(1).float()  # from 0 to 16, not centred: badly conditioned on purpose
train, test = slice(0, 1400), slice(1400, None)


def accuracy_after(steps: int, lr: float, proxprop: bool) -> float:
    """Returns the test accuracy of a small network, trained on batches of 200."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if proxprop:
        ProxProp(model, mode="cg3", gram="mean").attach(optimizer)  # before every optimizer.step()
    for step in range(steps):
        rows = torch.arange(step * 200, (step + 1) * 200) % 1400
        optimizer.zero_grad()
        cross_entropy(model(x[train][rows]), y[train][rows]).backward()
        optimizer.step()
    return float((model(x[test]).argmax(1) == y[test]).float().mean())


for lr in (0.01, 1.0):
    plain, implicit = (100 * accuracy_after(70, lr, proxprop) for proxprop in (False, True))
    print(f"lr {lr:g}: plain gradients {plain:.1f}%, ProxProp {implicit:.1f}%")
