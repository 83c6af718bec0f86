"""What holds for every page: short lines, and words that readers know."""

import re
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


PRIVATE = re.compile(
    r"\brooms?\b|\barms?\b|\boutlets?\b|\bstash(es)?\b|\bso many\b|\bis no proximal|proximal maps? of nothing"
    r"|who pays for|keep such an? |written, not run|as it is meant|goes by its name|stays? live"
    r"|is another function|without a word",
    re.IGNORECASE,
)
"""Words of the people who build this package, and phrases that no one else says."""


@pytest.mark.parametrize("page", PAGES)
def test_pages_speak_to_people_who_do_not_build_the_package(page: str):
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    if page != "CHANGELOG.md":  # Old entries name what was renamed.
        assert not [match[0] for match in PRIVATE.finditer(text)]
