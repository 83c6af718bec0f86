"""Looks at a model, converts it, gives it its scale back, saves and loads it, and reverts it.

Run it by ``python inspect_calibrate_save.py [--model resnet18] [--size 224]``.
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch

from solver_plugins import (
    calibrate,
    convert_model,
    inspect_model,
    load,
    revert_model,
    save,
    solver_report,
)

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--model", default="test_resnet")
parser.add_argument("--size", type=int, default=64)
args = parser.parse_args()


def change(new: torch.Tensor, old: torch.Tensor) -> float:
    """Returns how much logits have changed, in units of their norm."""
    return ((new - old).norm() / old.norm()).item()


torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=10).eval()  # pretrained=True for real weights
images = torch.randn(16, 3, args.size, args.size)  # in real life: a few batches of training images
plain = model(images)

print(inspect_model(model, "fista", pattern="all"))
convert_model(model, "fista", iters=8, pattern="all")
print(f"raw: logits changed by {change(model(images), plain):.2f} of their norm")
calibrate(model, [images])
converted = model(images)
print(f"calibrated: changed by {change(converted, plain):.2f}")
print(solver_report(model, images))

with tempfile.TemporaryDirectory() as folder:
    save(model, Path(folder) / "converted")
    again = load(Path(folder) / "converted").eval()
print(f"loaded: changed by {change(again(images), converted):.1e}")

revert_model(model)
print(f"reverted: differs from the plain model by {change(model(images), plain):.1e}")
