"""Every Python block of the README and of docs/*.md runs, the blocks of one page after each other.

A block that a test cannot run has a line ``<!-- not run: reason -->`` above it.
"""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from solver_plugins.equilibrium import EQUILIBRIUM_SOLVERS, FEATURE_REGULARIZERS
from solver_plugins.prox import PRIORS, activations
from solver_plugins.registry import SOLVERS
from solver_plugins.train import FinetuneConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
TESTED_ELSEWHERE = {
    "docs/dropblock.md": "tests/dropblock/test_docs.py",
    "docs/opteq.md": "tests/equilibrium/test_docs.py",
    "docs/proxprop.md": "tests/proxprop/test_docs.py",
    "docs/plugins.md": "tests/test_plugin_package.py",
}
"""Pages whose results are checked, too, by a test that runs all their blocks."""
SETUP = {
    "docs/finetuning.md": """
        from pathlib import Path
        from PIL import Image
        from solver_plugins.train import FinetuneConfig
        from solver_plugins.train.finetune import finetune

        for split in ("train", "test"):
            for name in ("cat", "dog"):
                folder = Path("photos", split, name)
                folder.mkdir(parents=True)
                for number in range(4):
                    Image.new("RGB", (32, 32), (60 * number, 90, 120)).save(folder / f"{number}.jpg")
        solver = {"name": "proxgd", "iters": 2, "pattern": "all", "targets": ["conv1"]}
        run = {"model": {"spec": "timm/test_resnet"}, "solver": solver, "data": {"name": "photos", "image_size": 32}}
        run |= {"baseline": False, "epochs": 1, "batch_size": 4, "output": "runs/photos"}
        finetune(FinetuneConfig.parse(run))
    """,
    "docs/performance.md": """
        import torch
        from torch import nn
        from solver_plugins import convert_model as convert

        def convert_model(model, *args, **keywords):  # Its fragments convert one model again and again.
            plain = nn.Sequential(nn.Dropout(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
            return convert(plain, *args, example_inputs=torch.randn(4, 16), **keywords)

        model = convert_model(None, "proxgd")
    """,
}
"""What the fragments of a page take for granted."""


def blocks_of(page: str) -> list[tuple[int, str, str | None]]:
    """Returns line, text, and the reason why it is not run, of every Python block."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"^(?:<!-- not run: (.+) -->\n)?```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found.append((text[: match.start(2)].count("\n"), match[2], match[1]))
    opened = re.findall(r"^\s*```\s*(?:python|py)\b", text, re.MULTILINE)
    assert len(found) == len(opened), f"{page} has a Python block of another form"
    return found


def runnable() -> list[str]:
    run = {page for page in PAGES if any(reason is None for _, _, reason in blocks_of(page))}
    return sorted(run - TESTED_ELSEWHERE.keys())


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an example register something without any other test seeing it."""
    for registry in (SOLVERS, PRIORS, EQUILIBRIUM_SOLVERS, FEATURE_REGULARIZERS):
        registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(activations, "_DECLARED", dict(activations._DECLARED))


@pytest.mark.parametrize("page", runnable())
def test_blocks_run(page: str, registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    exec(textwrap.dedent(SETUP.get(page, "")), names)
    ran = 0
    for line, block, reason in blocks_of(page):
        if reason is None:
            # Empty lines first, so that a traceback names the line of the page.
            exec(compile("\n" * line + block, str(ROOT / page), "exec"), names)
            ran += 1
    assert ran


def test_pages_with_a_test_of_their_own():
    for page, test in TESTED_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text() and blocks_of(page)


def test_the_config_of_the_readme_is_a_config():
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    config = FinetuneConfig.from_yaml(example)
    assert config.solver.solver == "proxgd" and config.data.name == "photos"


@pytest.mark.parametrize("page", [*PAGES, "docs/examples/README.md", "configs/README.md", "patches/README.md"])
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:|#", target):
            assert ((ROOT / page).parent / target.partition("#")[0]).exists(), target
