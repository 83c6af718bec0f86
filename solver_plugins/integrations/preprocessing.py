"""Tokenizers and image processors of transformers, which belong to a model as its weights do."""

import os
import shutil
from pathlib import Path
from typing import Any

from solver_plugins.integrations.errors import LoadingError, SavingError
from solver_plugins.integrations.folder import PREPROCESSING, VOCABULARIES


def save_preprocessing(model: Any, folder: Path, given: Any = None) -> None:
    """Writes what prepares the inputs of a model: what is given, or the files that the model was loaded with."""
    if given is None:
        for file in _files_of(getattr(model, "name_or_path", "")):
            shutil.copyfile(file, folder / file.name)
        return
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if not hasattr(one, "save_pretrained"):
            raise SavingError(f"Expected a tokenizer or a processor of transformers; found {type(one).__name__}.")
        if is_stub(one):
            raise SavingError(
                f"Expected a tokenizer with a vocabulary; found a {type(one).__name__} of {len(one)} special tokens. "
                "transformers makes it where a folder has no tokenizer: load the one that the model was "
                "trained with."
            )
        one.save_pretrained(folder)


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """Returns the tokenizer of a folder or repository; LoadingError where transformers would make an empty one."""
    from transformers import AutoTokenizer

    where = Path(source).expanduser()
    if where.is_dir() and not any((where / name).is_file() for name in VOCABULARIES):
        raise LoadingError(
            f"Expected a tokenizer in {str(source)!r}: one of {', '.join(VOCABULARIES)}; found none of these. Save it "
            "there: AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER)."
        )
    tokenizer = AutoTokenizer.from_pretrained(str(where) if where.is_dir() else str(source))
    if is_stub(tokenizer):
        raise LoadingError(
            f"Expected a tokenizer with a vocabulary in {str(source)!r}; found one of {len(tokenizer)} special tokens."
        )
    return tokenizer


def is_stub(tokenizer: Any) -> bool:
    """Whether a tokenizer knows special tokens only, as one that transformers makes out of nothing."""
    words = getattr(tokenizer, "get_vocab", None)
    return words is not None and set(words()) <= set(tokenizer.all_special_tokens)


def _files_of(source: str) -> list[Path]:
    """Returns the files of a model's folder, or those of its repository that are in the cache or can be downloaded."""
    if not source:
        return []
    if Path(source).is_dir():
        found = [Path(source) / name for name in PREPROCESSING]
        return [file for file in found if file.is_file()]
    from transformers.utils.hub import cached_file

    quiet = ("missing_entries", "gated_repo", "connection_errors")
    options: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in quiet}
    paths = (cached_file(source, name, **options) for name in PREPROCESSING)
    return [Path(path) for path in paths if path is not None]
