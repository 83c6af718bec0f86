"""docs/api.md is what the docstrings say."""

import importlib.util
from pathlib import Path

import solver_plugins

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    """Run ``make docs`` where this fails."""
    spec = importlib.util.spec_from_file_location("docs_api", DOCS / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.api_page()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == made
    for name in solver_plugins.__all__:
        assert f"`{name}" in made
    # Neither addresses nor paths of the machine that it was made on.
    assert " at 0x" not in made and str(Path.home()) not in made
