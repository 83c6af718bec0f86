"""What the call without further arguments converts, and in whose words it says so."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from solver_plugins import convert_model, inspect_model
from solver_plugins.blocks import blocks_of
from solver_plugins.integrations.architectures import LeNet
from solver_plugins.surgery import ConversionError, ConversionSpec, DefaultsWarning, speaking
from tests.surgery.small import Model

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def network(rate: float = 0.0, **parts: nn.Module) -> nn.Module:
    """A head with a hidden layer behind a body without a dropout."""
    made = {
        "stem": nn.Linear(6, 6),
        "norm": nn.LayerNorm(6),
        "hidden": nn.Linear(6, 5),
        "act": nn.ReLU(),
        "drop": nn.Dropout(rate),
        "fc": nn.Linear(5, 3),
    }
    return Model(lambda m, x: m.fc(m.drop(m.act(m.hidden(m.norm(m.stem(x)))))), **(made | parts))


def rates(report: Any) -> dict[str, float | None]:
    return {row.name: row.p for row in report.converted}


def look(model: nn.Module, solver: str = "proxsg", **options: Any) -> Any:
    return inspect_model(model, solver, 2, example_inputs=X, lipschitz=False, **options)


@pytest.mark.parametrize(
    ("solver", "rate", "options", "expected"),
    [
        ("proxsg", 0.2, {}, {"fc": 0.2}),
        ("proxsg", 0.2, {"p": 0.4}, {"fc": 0.4}),
        ("proxsg", 0.0, {}, {"hidden": 0.5, "fc": 0.5}),
        ("proxsg", 0.0, {"p": 0.4}, {"hidden": 0.4, "fc": 0.4}),
        ("proxsg", 0.0, {"last": False}, {"hidden": 0.5}),
        ("proxsg", 0.0, {"exclude": ["hidden"]}, {"fc": 0.5}),
        # What a coordinate solver draws of the hidden layer would be dropped once more behind its activation.
        ("rcd", 0.2, {}, {"fc": 0.5}),
        ("rcd", 0.0, {}, {"hidden": 0.5}),
        ("proxgd", 0.0, {}, {"hidden": None}),
    ],
)
def test_the_head_where_nothing_is_live(
    solver: str, rate: float, options: dict[str, Any], expected: dict[str, float | None]
) -> None:
    report = look(network(rate), solver, **options)
    assert rates(report) == expected
    fallback = solver == "rcd" or (solver == "proxsg" and rate == 0)
    assert len(report.warnings) == fallback
    assert all("Choose the rate with p=" in text and repr(next(iter(expected))) in text for text in report.warnings)


def test_a_deterministic_solver_takes_a_classifier_where_no_activation_is_proximal() -> None:
    report = look(network(act=nn.GELU()), "proxgd")
    assert rates(report) == {"fc": None} and "Choose layers with targets= or pattern=" in report.warnings[0]


def test_one_warning_at_the_line_of_the_caller() -> None:
    with pytest.warns(DefaultsWarning, match=r"converts its head, 'hidden' and 'fc' at a rate of 0\.5") as caught:
        model = convert_model(network(), "proxsg", 2, example_inputs=X)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert set(blocks_of(model)) == {"hidden", "fc"}


def test_a_live_dropout_that_nobody_takes_over_is_not_doubled() -> None:
    """It feeds two classifiers, and a part of it: sampling there would drop the same features twice."""

    def two(m: Any, x: Tensor) -> Any:
        x = m.drop(m.norm(x))
        return m.fc(x), m.other(x)

    def part(m: Any, x: Tensor) -> Any:
        return m.fc(m.drop(m.norm(x))[:, :3])

    parts = {"norm": nn.LayerNorm(6), "drop": nn.Dropout(0.1)}
    for model in (
        Model(two, fc=nn.Linear(6, 3), other=nn.Linear(6, 2), **parts),
        Model(part, fc=nn.Linear(3, 3), **parts),
    ):
        assert not look(model).converted
        with pytest.raises(ConversionError, match=r"Dropout 'drop' drops its inputs as well.*with targets=") as caught:
            convert_model(model, "proxsg", example_inputs=X)
        assert "\n" not in str(caught.value)


class OwnWay(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.dropout(input, self.p, self.training)


class SameWay(nn.Dropout):
    """A class of its own with torch's forward, as libraries have it."""


@pytest.mark.parametrize(
    ("label", "drop", "shape"),
    [
        ("AlphaDropout 'drop'", nn.AlphaDropout(0.2), (4, 6)),
        ("OwnWay 'drop'", OwnWay(0.2), (4, 6)),
        ("alpha_dropout", lambda x: nn.functional.alpha_dropout(x, 0.2, True), (4, 6)),
        # Dropout1d draws tokens here, not features.
        ("Dropout1d 'drop'", nn.Dropout1d(0.2), (4, 7, 6)),
    ],
)
def test_a_dropout_of_another_kind_is_neither_taken_over_nor_doubled(
    label: str, drop: Any, shape: tuple[int, ...]
) -> None:
    model = Model(lambda m, x: m.fc(getattr(m, "drop", drop)(m.norm(x))), norm=nn.LayerNorm(6), fc=nn.Linear(6, 3))
    if isinstance(drop, nn.Module):
        model.drop = drop
    with pytest.raises(ConversionError, match=f"{label} drops its inputs as well"):
        convert_model(model, "proxsg", 2, example_inputs=torch.randn(shape))


def test_a_dropout_s_own_class_makes_no_difference() -> None:
    model = convert_model(network(drop=SameWay(0.2)), "proxsg", 2, example_inputs=X)
    assert {name: block.solver.config.p for name, block in blocks_of(model).items()} == {"fc": 0.2}
    assert isinstance(model.drop, SameWay) and torch.equal(model.train().drop(X), X)


def test_channels_that_are_dropped_are_the_features_of_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(6, 2, 1))
    report = inspect_model(model, "proxsg", 2, example_inputs=torch.randn(2, 3, 8, 8), lipschitz=False)
    assert rates(report) == {"3": 0.2}


class Backbone(nn.Module):
    """It returns a sum, so that no layer is a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.stem(x))
        return x + self.fc(x)


@pytest.mark.parametrize(("solver", "rate"), [("proxsg", 0.5), ("rcd", 0.5), ("proxgd", None)])
def test_a_backbone_without_a_classifier_converts_its_last_layer(solver: str, rate: float | None) -> None:
    report = look(Backbone(), solver)
    assert rates(report) == {"fc": rate}
    assert "converts its last layer (it has no classifier), 'fc'" in report.warnings[0]
    assert rates(look(Backbone(), solver, exclude=["fc"])) == {"stem": rate}


def test_one_line_where_nothing_can_be_found() -> None:
    """Neither a layer that the user excludes nor another one in the place of a classifier that there is."""
    for model in (nn.Sequential(nn.Linear(6, 3), nn.ReLU()), network()):
        left = ["0"] if isinstance(model, nn.Sequential) else ["fc", "hidden"]
        with pytest.raises(
            ConversionError, match=r"classifier.*Name layers with targets= and a rate with p="
        ) as caught:
            convert_model(model, "proxsg", exclude=left, example_inputs=X)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConversionError, match=r"no classifier.*Name layers with targets=;"):
        convert_model(nn.Sequential(nn.Linear(6, 3), nn.GELU()), "proxgd", exclude=["0"], example_inputs=X)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("python", ["p=", "targets=", "inspect_model(model, suggest=True)"]),
        ("command line", ["--p", "--targets", "--suggest"]),
        ("config", ["solver.p", "solver.targets", "solver-plugins inspect MODEL --suggest"]),
    ],
)
def test_messages_speak_the_words_of_the_place(place: Any, words: list[str]) -> None:
    with speaking(place):
        report = look(network())
        with pytest.raises(ValueError, match=f"{words[0]} has no meaning"):
            ConversionSpec.parse({"solver": "proxgd", "p": 0.5})
    assert all(word in report.warnings[0] for word in words)
    left = next(row.reason for row in report.rows if row.name == "stem")
    assert words[0] in left and words[1] in left
    if place != "python":
        assert "p=" not in f"{left} {report.warnings[0]}"


def test_the_library_s_own_network_says_its_size() -> None:
    model = convert_model(LeNet(drop_rate=0.5, in_chans=1), "proxsg", 2)
    assert set(blocks_of(model)) == {"fc1", "fc2"}


@pytest.mark.parametrize("solver", ["proxsg", "s2gd", "rcd"])
def test_a_resnet_converts_its_classifier(solver: str) -> None:
    with pytest.warns(DefaultsWarning, match="converts its classifier, 'fc'"):
        model = convert_model(timm.create_model("test_resnet"), solver, 2)
    assert list(blocks_of(model)) == ["fc"]
    model.train()(torch.randn(2, 3, 64, 64)).sum().backward()
