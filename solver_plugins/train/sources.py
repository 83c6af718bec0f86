"""Loads examples through ``datasets``: the embedded digits, folders, files and the hub."""

import difflib
import functools
import glob
from pathlib import Path
from typing import Any

from solver_plugins.errors import did_you_mean
from solver_plugins.train.config import DataSection
from solver_plugins.train.digits import load_digits
from solver_plugins.train.errors import DataError, summary_of
from solver_plugins.train.images import SUFFIXES

_TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Splits of a folder of images, and the folders that hold them."""
DIGITS_TEST = 360
"""How many of the 1797 digits, the last ones, are the test split: other writers than those before."""


def load_split(config: DataSection, split: str) -> Any:
    """Returns one split as a ``datasets.Dataset``."""
    try:
        found = _load(config, split)
    except DataError:
        raise
    except Exception as error:
        raise _explained(config, split, error) from error
    if len(found) == 0:
        raise DataError(f"Expected examples in the split {split!r} of {config.name!r}; found none.")
    return found


def _load(config: DataSection, split: str) -> Any:
    import datasets

    # We show our own progress bars.
    datasets.disable_progress_bars()
    if config.name == "digits":
        return _sliced(_digits(), split, "digits")
    place = Path(config.name).expanduser()
    if place.is_file():
        kind = _TABLES.get(place.suffix.lower())
        if kind is None:
            raise DataError(f"Expected a file ending in {', '.join(_TABLES)}; found {str(place)!r}.")
        return datasets.load_dataset(kind, data_files=str(place), split=split)
    if place.is_dir():
        return _from_folder(place, split, config)
    if place.is_absolute() or config.name.startswith((".", "~")):
        raise DataError(f"There is no data set at {str(place)!r}. {_options()}")
    return datasets.load_dataset(config.name, config.config, split=split)


def _from_folder(place: Path, split: str, config: DataSection) -> Any:
    import datasets

    if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
        saved = datasets.load_from_disk(str(place))
        if not isinstance(saved, datasets.DatasetDict):
            # A single split keeps its name; slices of it can serve as both splits.
            saved = datasets.DatasetDict({str(saved.split or "train"): saved})
        return _sliced(saved, split, str(place))
    files = [path for path in place.rglob("*") if path.is_file() and not path.name.startswith(".")]
    suffixes = {path.suffix.lower() for path in files}
    if suffixes & set(SUFFIXES):
        if any(path.stem == "metadata" for path in files):
            return datasets.load_dataset("imagefolder", data_dir=str(place), split=split)
        return _from_images(place, split)
    if suffixes & set(_TABLES):
        return datasets.load_dataset(str(place), config.config, split=split)
    raise DataError(
        f"{str(place)!r} holds no data set: expected one of save_to_disk, a folder of images for each class, or files "
        f"ending in {', '.join(_TABLES)}."
    )


def _from_images(place: Path, split: str) -> Any:
    """Reads SPLIT/CLASS/IMAGE, or CLASS/IMAGE as the split ``train``.

    The folders of the splits are given explicitly: ``datasets`` would also take a class called ``train_station`` for
    a split.
    """
    import datasets

    base = split.partition("[")[0]
    below = {path.name: path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")}
    nested = {name for name, path in below.items() if any(one.is_dir() for one in path.iterdir())}
    found = {
        key: below[name] for key, names in {**_SPLITS, base: (base, *_SPLITS.get(base, ()))}.items()
        for name in names if name in nested
    } if nested else {"train": place}  # fmt: skip
    if base not in found:
        held = f"it has {', '.join(sorted(found))}" if nested else "its folders are classes, all of the split 'train'"
        raise DataError(
            f"{str(place)!r} has no split {base!r}: {held}. Expected {base}/CLASS/IMAGE in it, beside the other "
            "splits; or name the splits with data.train= and data.eval=."
        )
    empty = sorted(
        path.name
        for path in found[base].iterdir()
        if path.is_dir() and not any(one.suffix.lower() in SUFFIXES for one in path.rglob("*"))
    )
    if empty:
        raise DataError(
            f"Expected images in every folder of {str(found[base])!r}; found none in {', '.join(empty[:5])}. Add some, "
            "or remove the folder."
        )
    data_files = {key: f"{glob.escape(str(path.absolute()))}/**" for key, path in found.items()}
    return datasets.load_dataset("imagefolder", data_files=data_files, split=split, drop_labels=False)


@functools.cache
def _digits() -> Any:
    """Returns both splits of the digits; a data set is never changed in place."""
    import datasets
    import numpy
    from PIL import Image

    images, labels = load_digits()
    pixels = numpy.round(images.numpy() * (255 / 16)).astype(numpy.uint8)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)])}
    )
    columns = {"image": [Image.fromarray(image) for image in pixels], "label": labels.tolist()}
    everything = datasets.Dataset.from_dict(columns, features=features)
    border = len(everything) - DIGITS_TEST
    return datasets.DatasetDict(
        train=everything.select(range(border)), test=everything.select(range(border, len(everything)))
    )


def _sliced(splits: Any, split: str, name: str) -> Any:
    """Reads ``train[:80%]``, as ``load_dataset`` does for other sources."""
    import datasets

    base = split.partition("[")[0]
    if base not in splits:
        raise DataError(f"{name!r} has no split {base!r}.{did_you_mean(base, splits)}")
    if base == split:
        return splits[split]
    lengths = {key: len(value) for key, value in splits.items()}
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    return splits[part.splitname].select(range(part.from_ or 0, lengths[base] if part.to is None else part.to))


def _explained(config: DataSection, split: str, error: Exception) -> DataError:
    advice = "Expected the name of a split that is there, or a slice of one such as 'train[:80%]'."
    if not (Path(config.name).expanduser().exists() or config.name == "digits"):
        advice = "Looked for a folder or file of that name, in the cache of Hugging Face, and on its hub."
        advice += f"{_folders_like(config.name)} {_options()}"
    # datasets wraps what went wrong in a sentence that says only that something did.
    told = summary_of(error.__cause__ if isinstance(error.__cause__, Exception) else error).rstrip(".")
    return DataError(f"Cannot load the split {split!r} of {config.name!r}: {told}. {advice}")


def _folders_like(name: str) -> str:
    folder = Path(name).expanduser().parent
    there = [str(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    near = difflib.get_close_matches(name, there, n=1)
    return f" Did you mean the folder {near[0]!r}?" if near else ""


def _options() -> str:
    return (
        "Options without a network: data.name=digits (embedded); a folder written elsewhere by "
        "dataset.save_to_disk(FOLDER); a folder of images for each class; or HF_HOME set to a filled cache, with "
        "HF_HUB_OFFLINE=1."
    )
