"""Finetunes a timm ResNet with solver blocks on a folder of images, in a plain torch loop.

    python finetune_folder.py photos --epochs 5

It trains on photos/train/CLASS/*.jpg and evaluates on photos/test/CLASS/*.jpg. The same from a
config, with a baseline, checkpoints and a report, is ``solver-plugins finetune``; see
docs/finetuning.md.
"""

import argparse
from itertools import islice
from pathlib import Path

import timm
import torch
from timm.data import ImageDataset, create_transform, resolve_data_config
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from tqdm import tqdm

from solver_plugins import calibrate, convert_model, inspect_model, refresh_steps, save

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("folder", type=Path)
parser.add_argument("--model", default="resnet18")
parser.add_argument("--no-pretrained", dest="pretrained", action="store_false")
parser.add_argument(
    "--targets", default=r"layer4\..*", help="a regular expression for the layers to convert"
)
parser.add_argument("--iters", type=int, default=5)
parser.add_argument(
    "--blend", type=float, default=0.1, help="0 is the original network, 1 the solver"
)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--output", type=Path, default=Path("finetuned"))
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

numbers = ImageDataset(
    args.folder / "train"
).reader.class_to_idx  # by name; the same for both splits
classes = sorted(numbers, key=numbers.get)
model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=len(classes)).to(
    device
)
data = resolve_data_config(model=model)
train = ImageDataset(
    args.folder / "train", class_map=numbers, transform=create_transform(**data, is_training=True)
)
test = ImageDataset(args.folder / "test", class_map=numbers, transform=create_transform(**data))
if len(train) < args.batch_size:
    parser.error(
        f"{len(train)} images to train on are less than one batch: expected a smaller --batch-size"
    )
batches = DataLoader(train, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers)

print(
    inspect_model(model, "proxgd", args.iters, pattern="all", targets=args.targets, lipschitz=False)
)
convert_model(model, "proxgd", args.iters, pattern="all", targets=args.targets, blend=args.blend)
# More than one iteration changes pretrained features: give them the mean and variance they had,
# and blend a little in.
calibrate(model, [images.to(device) for images, _ in islice(batches, 2)])

optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for epoch in range(args.epochs):
    model.train()
    for images, labels in tqdm(batches, f"epoch {epoch + 1}", disable=None):
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    refresh_steps(
        model
    )  # certified step sizes, once per epoch; in between each forward follows the weights

model.eval()
right = 0
with torch.inference_mode():
    for images, labels in DataLoader(test, args.batch_size, num_workers=args.workers):
        right += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
print(f"accuracy {100 * right / len(test):.1f}% on {len(test)} images of {', '.join(classes)}")

model.pretrained_cfg = {**model.pretrained_cfg, "label_names": classes}  # saved with the model
save(model, args.output)  # for solver_plugins.load; the weights also load into a plain timm model
print(f"saved in {args.output}")
