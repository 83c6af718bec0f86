"""Folders and files that are written as a whole or not at all."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solver_plugins.integrations.errors import LoadingError, SavingError

VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "tekken.json"),
)
"""Files that hold the words of a tokenizer."""
PREPROCESSING = (
    *VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)
"""Files of tokenizers and processors of transformers."""
NOTICE = "LOAD_WITH_solver_plugins.txt"
"""A file whose name says what a library that reads the weights alone does not."""
_WRITTEN = re.compile(
    r"config\.json|generation_config\.json|solver_plugins\.json|(model|solver_plugins)\.safetensors|README\.md"
    r"|model\.safetensors\.index\.json|model-\d{5}-of-\d{5}\.safetensors"
)
"""Names of the other files in the folder of a saved model."""


@contextmanager
def new_folder(folder: str | os.PathLike[str], overwrite: bool) -> Iterator[Path]:
    """Gives a temporary folder to write into, which becomes ``folder`` once everything is written and on the disk.

    SavingError if that cannot be made, is not empty without ``overwrite``, or holds something else than a saved model.
    """
    place = Path(os.path.abspath(folder))
    _check(place, overwrite)
    made = _temporary(place, "new", "folder")
    try:
        yield made
        for file in (path for path in made.rglob("*") if path.is_file()):
            _flush(file)
        _flush(made)
        made.chmod(0o777 & ~_umask())
        _replace(place, made)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _flush(place.parent)


@contextmanager
def new_file(place: Path) -> Iterator[Path]:
    """Gives a temporary path with the name of ``place``, beside which other files may be written, too.

    All of them move to the folder of ``place`` once they are written and on the disk, ``place`` itself at last. After
    an error there is what was there before; SavingError if no file can be made there.
    """
    made = _temporary(place, "new", "file")
    try:
        yield made / place.name
        for file in sorted(made.iterdir(), key=lambda file: file.name == place.name):
            _flush(file)
            os.replace(file, place.parent / file.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _flush(place.parent)


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns the path of an existing folder; otherwise LoadingError, with what an interrupted save has put aside."""
    place = Path(os.path.abspath(folder))
    if place.is_dir():
        return place
    aside = sorted(place.parent.glob(f".{place.name}.old-*")) if place.parent.is_dir() else []
    hint = f" A save was interrupted: the model is in {aside[-1]}; rename that folder." if aside else ""
    raise LoadingError(f"Expected the folder of a saved model; there is none at {str(folder)!r}.{hint}")


def _temporary(place: Path, why: str, what: str) -> Path:
    """Makes a folder beside a place: a rename is only atomic within one file system."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{place.name}.{why}-", dir=place.parent))
    except OSError as error:
        found = f"no {what} can be made in {str(place.parent)!r} ({error.strerror})"
        raise SavingError(f"Cannot save to {str(place)!r}: {found}.") from error


def _check(place: Path, overwrite: bool) -> None:
    if not os.path.lexists(place):
        return
    if not place.is_dir() or place.is_symlink():
        raise SavingError(f"Expected a folder to save to; {str(place)!r} is something else.")
    names = sorted(entry.name for entry in place.iterdir())
    if not names:
        return
    if not overwrite:
        raise SavingError(f"{str(place)!r} is not empty; pass overwrite=True to replace the model in it.")
    others = [name for name in names if not _WRITTEN.fullmatch(name) and name not in (*PREPROCESSING, NOTICE)]
    if others:
        raise SavingError(
            f"overwrite=True replaces a whole folder, and {str(place)!r} also holds {', '.join(others[:5])}, which "
            "would be lost: move that, or save to another folder."
        )


def _replace(place: Path, made: Path) -> None:
    if not place.exists() or not any(place.iterdir()):
        os.replace(made, place)
        return
    aside = _temporary(place, "old", "folder")
    # Two renames, since no folder can be renamed onto a full one; an error between them is undone.
    os.replace(place, aside)
    try:
        os.replace(made, place)
    except BaseException:
        os.replace(aside, place)
        raise
    shutil.rmtree(aside)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders.
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
