"""Which layers are worth converting: the options that are shown convert them, and the costs are those of the blocks."""

import pytest
import timm
import torch
import transformers
from torch import nn

from solver_plugins import convert_model, inspect_model, merge_model
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import speaking
from solver_plugins.surgery.errors import Place

WIDTHS = (80, 100, 150)


@pytest.mark.filterwarnings("ignore::solver_plugins.errors.SolverPluginsWarning")
@pytest.mark.parametrize(("name", "solver"), [("test_resnet", "proxgd"), ("test_vit", "proxsg")])
def test_the_options_convert_what_they_say(name: str, solver: str) -> None:
    model = timm.create_model(name, num_classes=5)
    report = inspect_model(model, solver, 3, lipschitz=False, suggest=True)
    kinds = [one.kind for one in report.suggestions]
    assert kinds[0] == "default" and "no prior" in kinds and len(kinds) == len(set(kinds))
    assert ("norm or skip" in kinds) == (name == "test_resnet")
    for one in report.suggestions:
        made = convert_model(model, solver, 3, inplace=False, **one.options)
        assert set(one.layers) <= set(blocks_of(made))
        others = [layer for layer in blocks_of(made) if layer not in one.layers]
        rows = {row.name: row for row in inspect_model(model, solver, 3, lipschitz=False, **one.options).converted}
        plain, cost = (sum(getattr(rows[x], key) for x in one.layers) for key in ("plain_flops", "flops"))
        assert one.training == pytest.approx(cost / plain, rel=1e-6)
        assert 1 <= one.evaluation <= max(1, one.training)
        if not others:
            # Whether it merges is known only once it is done.
            try:
                merge_model(made.eval())
            except SolverPluginsError:
                assert not one.merges
            else:
                assert one.merges and one.evaluation == 1


def test_the_table_is_readable_in_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    report = inspect_model(model, "proxgd", 2, pattern="all", lipschitz=False)
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= width
        for name in ("conv1", "layer1.*.conv2 (3 layers)", "layer2.0.downsample.0", "fc"):
            assert any(line.startswith(f"{name} ") or line == name for line in lines), (width, name)
        text = " ".join(str(report).split())
        assert "cost: FLOPs over those of the plain layer" in text and "linear-norm-skip-act" in text
        # Every word of the table is explained below it, wherever it stands.
        assert ("Below a name: the pattern" in text) == (width < 110) and "how iterates are computed" in text


def test_suggestions_speak_the_words_of_the_place() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    report = inspect_model(model, "proxsg", 2, example_inputs=torch.randn(2, 6), lipschitz=False, suggest=True)
    last = report.suggestions[-1]
    assert last.options == {"pattern": ["linear"], "last": False, "p": 0.5} and last.layers == ("0",)
    assert last.ask() == "pattern=['linear'], last=False, p=0.5"
    with speaking("command line"):
        assert last.ask() == "--pattern linear --no-last --p 0.5"
    with speaking("config"):
        assert last.ask() == "solver.pattern=[linear] solver.last=False solver.p=0.5"
    assert report.to_dict()["suggestions"][-1]["merges"] and "Worth converting" in str(report)


def test_a_report_says_why_nothing_is_converted() -> None:
    """As the error of the call does: a language model's classifier is its embedding."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    places: tuple[tuple[Place, str], ...] = (("python", "targets="), ("command line", "--targets"))
    for where, targets in places:
        with speaking(where):
            text = " ".join(str(inspect_model(model, "proxsg", 2, lipschitz=False)).split())
        assert "0 of 5 layers become proxsg" in text
        assert "Nothing is converted: it has no linear layer behind a dropout with a rate above zero" in text
        assert "'lm_head' cannot be taken in its place: tied weight: it is also 'transformer.wte.weight'." in text
        assert f"Name layers with {targets} and a rate with" in text
    assert inspect_model(model, "proxsg", 2, pattern="linear", lipschitz=False).warnings == ()
