"""Files of images: which ones a split reads, and which of them are damaged."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm.auto import tqdm

from solver_plugins.train.errors import DataError, summary_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
"""What names of images end in."""
_MOST_NAMED = 5
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""What stands at the end of a file of this format that was written to its end."""


def files_of(found: Any, column: str) -> list[str]:
    """Returns the files behind a column of images; none where the images are inside of the data set."""
    import datasets

    if not isinstance(found.features.get(column), datasets.Image):
        return []
    stored = found.cast_column(column, datasets.Image(decode=False))[:][column]
    return [one["path"] for one in stored if one["bytes"] is None and one["path"] and Path(one["path"]).is_file()]


def check_images(files: Iterable[str]) -> None:
    """Looks at the head and the end of every file, and reads those to the end that look unfinished.

    Raises:
        DataError: If some cannot be read; it names them.
    """
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
