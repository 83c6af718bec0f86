"""The examples of the documentation run as they are printed."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "dropblock.md"


def test_examples_run(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert "dropouts become dropblock" in capsys.readouterr().out


def test_errata_name_tests_that_exist():
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+?)(?:_?\.\.\.)?`", PAGE.read_text().partition("## Errata")[2])
    assert len(named) >= 10
    assert all(f"def {name}" in written for name in named)
