"""Files of images: which ones a split reads, and which of them are damaged."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm

from solver_plugins.train.errors import DataError, summary_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
"""What names of images end in."""
FILE_NAMES = ("file_name", "filename", "file", "path")
"""What a column of names of image files is called."""
_MOST_NAMED = 5
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""What stands at the end of a file of this format that was written to its end."""


def opened(found: Any, column: str, name: str) -> Any:
    """Returns a split whose column of names of files, if it is one, holds the images."""
    import datasets

    feature = found.features[column]
    if isinstance(feature, datasets.Image):
        return found
    # What a table has: pandas and polars write large_string.
    if getattr(feature, "dtype", None) not in ("string", "large_string", "string_view"):
        raise DataError(f"Expected images, or names of their files, in the column {column!r}; found {feature}.")
    place = Path(name).expanduser()
    root = place if place.is_dir() else place.parent
    files = [root / str(one) for one in found[column]]
    lacking = [str(file) for file in files if not file.is_file()]
    if lacking:
        raise DataError(
            f"Expected the column {column!r} to name files of images, from {str(root)!r} on; {len(lacking)} of "
            f"{len(files)} are not there, such as {lacking[0]!r}. Texts to "
            "classify are named with data.text."
        )
    column_of_files = datasets.Dataset.from_dict({column: [str(file) for file in files]}).cast_column(
        column, datasets.Image()
    )
    return datasets.concatenate_datasets([found.remove_columns(column), column_of_files], axis=1)


def files_of(found: Any, column: str) -> list[str]:
    """Returns the files behind a column of images; none where the images are inside of the data set."""
    import datasets

    if not isinstance(found.features.get(column), datasets.Image):
        return []
    stored = found.cast_column(column, datasets.Image(decode=False))[:][column]
    return [one["path"] for one in stored if one["bytes"] is None and one["path"] and Path(one["path"]).is_file()]


def check_images(files: Iterable[str]) -> None:
    """Looks at the head and end of every file, reads on where it looks unfinished; DataError names damaged ones."""
    damaged: list[str] = []
    for file in tqdm(list(files), desc="look at images", unit="file", leave=False, delay=2):
        try:
            with Image.open(file) as image:
                if not _ends(file, image.format):
                    image.load()
        except Exception as error:
            damaged.append(f"{file} ({summary_of(error)})")
    if damaged:
        more = f", and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
        raise DataError(
            f"Expected images that can be read; {len(damaged)} cannot: {', '.join(damaged[:_MOST_NAMED])}{more}. "
            "Repair or remove them; data.check=false leaves this look out."
        )


def _ends(file: str, form: str | None) -> bool:
    """Whether a file ends as its format does; cameras add a little behind the end."""
    with open(file, "rb") as opened:
        opened.seek(0, 2)
        opened.seek(max(0, opened.tell() - 4096))
        return form in _ENDS and _ENDS[form] in opened.read()
