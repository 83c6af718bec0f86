"""How a new classifier on pretrained weights should be drawn: ``model.head_init`` compared, by short finetunes.

    python -m tests.benchmarks.head_init FOLDER [--images 1000] [--epochs 2] [--rates 5e-4 2e-3]

EfficientNet-Lite0 with its ImageNet weights on images of CIFAR-10 at 64 pixels, three seeds, three ways to draw the
classifier at each learning rate; weights and images are fetched into FOLDER, and finished runs there are kept. Prints
the accuracy with its standard deviation over the seeds, and the differences to ``library`` with their standard errors,
paired by seed.
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from solver_plugins.train import FinetuneConfig
from solver_plugins.train.seeds import finetune_seeds
from tests.train.downloads import cifar10, efficientnet_lite0

WAYS = ("library", "reset", "zero")
SEEDS = [0, 1, 2]


def config_of(folder: Path, images: int, epochs: int, rate: float, way: str) -> FinetuneConfig:
    """Returns the runs of one cell of the table."""
    data = cifar10(folder, 10_000, 10_000)
    return FinetuneConfig.parse(
        {
            "model": {
                "spec": "timm/tf_efficientnet_lite0", "weights": str(efficientnet_lite0(folder)), "in_order": True,
                "head_init": way,
            },
            "solver": None,
            "data": {"name": str(data), "train": f"train[:{images}]", "eval": "test[:1000]", "image_size": 64},
            "optimizer": {"lr": rate, "clip": 1.0},
            "schedule": {"sched": "cosine"},
            "augmentation": {"hflip": 0.5},
            "epochs": epochs,
            "batch_size": 32,
            "seeds": SEEDS,
            "output": str(folder / "head_init" / f"{images}-{epochs}-{rate:g}-{way}"),
        }
    )  # fmt: skip


def table(found: dict[float, dict[str, list[float]]]) -> str:
    """Returns the table in Markdown, from the accuracies of each rate and way."""
    lines = ["| learning rate | " + " | ".join((*WAYS, "reset - library", "zero - library")) + " |", "|---:" * 6 + "|"]
    for rate, ways in found.items():
        cells = [f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" for values in ways.values()]
        for way in WAYS[1:]:
            pairs = [one - other for one, other in zip(ways[way], ways["library"], strict=True)]
            error = statistics.stdev(pairs) / math.sqrt(len(pairs))
            cells.append(f"{statistics.fmean(pairs):+.1f} ± {error:.1f}")
        lines.append(f"| {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Runs the comparison and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 2e-3])
    given = parser.parse_args()
    found: dict[float, dict[str, list[float]]] = {}
    for rate in given.rates:
        for way in WAYS:
            config = config_of(given.folder.resolve(), given.images, given.epochs, rate, way)
            runs: dict[str, Any] = finetune_seeds(config, resume=True)["seeds"]
            found.setdefault(rate, {})[way] = [runs[str(seed)]["plain"]["accuracy"] for seed in SEEDS]
    print(f"{given.images} images, {given.epochs} epochs, accuracy (%) on 1000 others, {len(SEEDS)} seeds\n")
    print(table(found))


if __name__ == "__main__":
    main()
