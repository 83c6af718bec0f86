"""Which blocks a solver takes, and what a wrong target is told."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from solver_plugins.errors import OptionError, UnknownNameError
from solver_plugins.surgery import Block, ConversionSpec, TargetError, match, record, select
from solver_plugins.surgery.select import Selection
from tests.surgery.models import MODELS


class Net(nn.Module):
    """One block of every pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.drop1, self.fc1, self.act1 = nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU()
        self.drop2, self.fc2 = nn.Dropout(0.3), nn.Linear(8, 8)
        self.fc3, self.act3 = nn.Linear(8, 8), nn.Tanh()
        self.fc4, self.drop4, self.act4 = nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()
        self.fc5, self.bn5, self.act5 = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()
        self.fc6, self.bn6, self.act6 = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()
        self.fc7, self.act7 = nn.Linear(8, 8), nn.ReLU()
        self.fc8, self.act8 = nn.Linear(8, 8), nn.GELU()
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.fc1(self.drop1(x)))
        x = self.fc2(self.drop2(x)).mean(0, keepdim=True) + x
        x = self.act3(self.fc3(x))
        x = self.act4(self.drop4(self.fc4(x)))
        x = self.act5(self.bn5(self.fc5(x)))
        x = self.act6(self.bn6(self.fc6(x)) + x)
        x = self.act7(self.fc7(x) + x)
        x = self.act8(self.fc8(x))
        return self.head(x)


PATTERNS = {
    "fc1": "dropout-linear-act",
    "fc2": "dropout-linear",
    "fc3": "linear-act",
    "fc4": "linear-dropout-act",
    "fc5": "linear-norm-act",
    "fc6": "linear-norm-skip-act",
    "fc7": "linear-skip-act",
    "fc8": "linear-act",
    "head": "linear",
    "unused": "linear",
}


@pytest.fixture(name="net")
def made_net() -> tuple[Net, list[Block]]:
    net = Net()
    return net, match(record(net, torch.rand(2, 8)), net)


def selected(blocks: list[Block], solver: Any, model: nn.Module | None = None, **options: Any) -> Selection:
    return select(blocks, ConversionSpec.of(solver, options), model)


def chosen(blocks: list[Block], solver: str, **options: Any) -> dict[str, str]:
    return {block.name: block.pattern for block in selected(blocks, solver, **options).blocks}


def test_every_pattern_is_found(net: tuple[Net, list[Block]]) -> None:
    assert {block.name: block.pattern for block in net[1]} == PATTERNS


@pytest.mark.parametrize(
    ("solver", "options", "expected"),
    [
        ("proxgd", {}, {"fc1": "dropout-linear-act", "fc3": "linear-act"}),
        ("proxsg", {}, {"fc1": "dropout-linear-act", "fc2": "dropout-linear"}),
        (
            "proxsg",
            {"p": 0.4, "targets": r".*"},
            {
                "fc1": "dropout-linear-act",
                "fc2": "dropout-linear",
                "fc3": "linear-act",
                "fc4": "linear",
                "fc8": "linear",
                "head": "linear",
            },
        ),
        ("rcd", {}, {"fc4": "linear-dropout-act"}),
        ("proxsg", {"p": 0.4}, {"fc1": "dropout-linear-act", "fc2": "dropout-linear"}),
        ("rcd", {"p": 0.4}, {"fc4": "linear-dropout-act"}),
        ("rcd", {"p": 0.4, "targets": r"fc[1-4]"},
         {"fc1": "dropout-linear-act", "fc3": "linear-act", "fc4": "linear-dropout-act"}),
        ("proxgd", {"pattern": "strict"}, {"fc1": "dropout-linear-act"}),
        ("proxgd", {"pattern": ["linear-norm-act", "linear-skip-act"]},
         {"fc5": "linear-norm-act", "fc7": "linear-skip-act"}),
        ("proxgd", {"pattern": "linear"}, {"fc4": "linear", "fc8": "linear", "head": "linear"}),
        ("proxgd", {"pattern": "linear", "nonprox": "skip"}, {"fc4": "linear", "head": "linear"}),
        ("proxgd", {"pattern": "linear", "last": False}, {"fc4": "linear", "fc8": "linear"}),
        ("proxgd", {"last": True}, {"fc1": "dropout-linear-act", "fc3": "linear-act", "head": "linear"}),
        ("proxsg", {"targets": ["fc2"]}, {"fc2": "dropout-linear"}),
        ("proxsg", {"targets": r"fc\d"}, {"fc1": "dropout-linear-act", "fc2": "dropout-linear"}),
        ("proxsg", {"targets": lambda name, module: name.endswith("1")}, {"fc1": "dropout-linear-act"}),
        ("proxsg", {"exclude": ["fc1"]}, {"fc2": "dropout-linear"}),
    ],
)  # fmt: skip
def test_defaults_and_options(
    net: tuple[Net, list[Block]], solver: str, options: dict[str, Any], expected: dict[str, str]
) -> None:
    assert chosen(net[1], solver, **options) == expected


def test_all_takes_everything_that_can_be(net: tuple[Net, list[Block]]) -> None:
    made = chosen(net[1], "proxgd", pattern="all")
    assert made == {**{k: v for k, v in PATTERNS.items() if k != "unused"}, "fc4": "linear", "fc8": "linear"}


def test_rates_and_reduced_blocks(net: tuple[Net, list[Block]]) -> None:
    selection = selected(net[1], "proxsg", pattern="all")
    assert {one.block.name: one.p for one in selection.chosen} == {"fc1": 0.5, "fc2": 0.3}
    assert "give one with p=" in selection.rejected["fc3"]
    assert {one.p for one in selected(net[1], "proxsg", p=0.4).chosen} == {0.4}
    assert {one.p for one in selected(net[1], "proxgd").chosen} == {None}
    reduced = next(block for block in selected(net[1], "proxgd", pattern="all").blocks if block.name == "fc8")
    assert reduced.activation is None and reduced.prior is not None and reduced.prior.name == "identity"
    assert "GELU is not a proximal map and stays" in reduced.notes[-1]


def test_every_other_block_has_its_reason(net: tuple[Net, list[Block]]) -> None:
    selection = selected(net[1], "proxgd")
    assert set(selection.rejected) == PATTERNS.keys() - {"fc1", "fc3"}
    assert "not monotone" in selection.rejected["fc8"]
    assert selection.rejected["unused"] == "never called in the forward pass"
    assert "pattern 'linear-norm-act' is not converted by deterministic" in selection.rejected["fc5"]
    assert "fc5: pattern 'linear-norm-act'" in selection.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["fc33"]}, "'fc33' matches no layer. Did you mean 'fc3'"),
        ({"targets": ["fc1", "fc33"]}, "'fc33' matches no layer"),
        ({"targets": r"drop\d"}, "drop1: a Dropout, not a linear layer"),
        ({"targets": ["unused"]}, "unused: never called"),
        ({"targets": ["fc8"]}, "fc8: .*GELU is not the proximal map.*ask for it with pattern="),
        ({"targets": ["fc5"]}, "fc5: pattern 'linear-norm-act' is not converted"),
        ({"targets": lambda name, module: False}, "matches no layer"),
        ({"targets": ["fc1"], "exclude": ["fc1"]}, "fc1: excluded"),
        ({"targets": "fc("}, "not a regular expression"),
        ({"targets": []}, "not empty"),
        ({"targets": 3}, "a list of names, a regular expression or a function"),
        ({"exclude": ["fc33"]}, "exclude: 'fc33' matches no layer. Did you mean"),
    ],
)
def test_a_target_that_converts_nothing_says_why(
    net: tuple[Net, list[Block]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        selected(net[1], "proxgd", model=net[0], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "linear-nrom-act"}, "Did you mean 'linear-norm-act'"),
        ({"p": 0.5}, "deterministic solver draws nothing"),
        ({"nonprox": "drop"}, "'keep' or 'skip'"),
        ({"solver": nn.ReLU()}, "expected a valid string"),
        ({"solver": "proxsg", "p": 1.0}, r"in \[0, 1\)"),
        ({"solver": "proxsg", "p": "0.5", "pattern": "all"}, r"a rate p in \[0, 1\); found '0.5' \(str\)"),
        ({"solver": "proxsg", "p": False}, r"found False \(bool\)"),
    ],
)
def test_bad_options(net: tuple[Net, list[Block]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        selected(net[1], **{"solver": "proxgd", **options})


def test_an_unknown_solver(net: tuple[Net, list[Block]]) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'proxsg' or 'proxgd'"):
        selected(net[1], "proxdg")


def test_a_misspelled_name_is_answered_by_whole_names() -> None:
    model = timm.create_model("resnet18").eval()
    blocks = match(record(model), model)
    for targets in (["layer4.0.convv1"], r"layer4\.0\.convv1"):
        for option in ("targets", "exclude"):
            with pytest.raises(TargetError, match=r"Did you mean 'layer4\.0\.conv1' or 'layer4") as caught:
                selected(blocks, "proxgd", model=model, **{option: targets})
            assert "'conv1'" not in str(caught.value) and " more." in str(caught.value)
    with pytest.raises(TargetError, match=r"matches no layer. Whole names are conv1, fc, layer1\.0\.conv1, .* more\."):
        selected(blocks, "proxgd", model=model, targets="stage.*")
    with pytest.raises(TargetError, match=r"Did you mean 'conv1' or 'conv2'\?"):
        selected(blocks, "proxgd", model=model, targets=["convv1"])


def test_vgg16_by_default() -> None:
    model = timm.create_model("vgg16", drop_rate=0.5)
    selection = selected(match(record(model), model), "proxsg")
    assert [(one.block.name, one.block.pattern, one.p) for one in selection.chosen] == [
        ("pre_logits.fc2", "dropout-linear-act", 0.5),
        ("head.fc", "dropout-linear", 0.5),
    ]


def test_tied_and_shared_layers_are_near_misses() -> None:
    model = MODELS["bert_mlm"]()
    blocks = match(record(model), model)
    with pytest.raises(TargetError, match=r"cls\.predictions\.decoder: tied weight: it is also 'bert\.embeddings"):
        selected(blocks, "proxgd", targets=["decoder"], pattern="all", model=model)
