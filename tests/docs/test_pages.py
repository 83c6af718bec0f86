"""What holds for every page: short lines."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "configs/*.md", "patches/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES)
def test_lines_have_at_most_100_characters(page: str):
    """But for tables, and for what cannot be broken: one code span, link or address."""
    long = [
        f"{number}: {line}"
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1)
        if len(line) > 100 and not line.lstrip().startswith("|") and not is_one_thing(line.strip(" -,.:;"))
    ]
    assert not long, "\n".join(long)


def is_one_thing(text: str) -> bool:
    link = text.lstrip("!").startswith("[") and text.count("](") == 1
    return link or (text.startswith("`") and text.endswith("`") and text.count("`") == 2)
