"""The messages that docs/troubleshooting.md explains are those that a user sees."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import solver_plugins as sp
from solver_plugins.errors import SolverPluginsError, SolverPluginsWarning
from solver_plugins.train import launch

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def model(**options: Any) -> nn.Module:
    return timm.create_model("test_resnet", num_classes=10, **options)


def solvers(**options: Any) -> nn.Module:
    return sp.convert_model(model(), "proxgd", iters=3, pattern="all", **options)


def twice() -> None:
    sp.convert_model(solvers(last=True, targets=["fc"]), "proxgd", targets=["fc"], last=True)


def steep() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.PReLU(init=2.0))
    sp.convert_model(net, "proxgd", targets=["0"], example_inputs=torch.randn(2, 4))


def implicit() -> None:
    block = sp.SolverLinear.from_linear(nn.Linear(64, 64), activation=nn.ReLU(), iters=3, gradient="implicit", **GD)
    block(torch.randn(4, 64)).sum().backward()


def replaced() -> None:
    net = solvers()
    net.layer1[0].conv2 = nn.Conv2d(32, 32, 3, padding=1)
    net(torch.randn(1, 3, 64, 64))


def not_finite() -> None:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, torch.nan)
    sp.SolverLinear.from_linear(layer, activation=nn.ReLU(), **GD)


def reverted() -> None:
    net = solvers()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.randn(4, 3, 64, 64)).sum().backward()
    optimizer.step()
    sp.revert_model(net)


def no_tensorboard() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "get_available_trackers", list)
        launch._check_trackers(["tensorboard"])


GD = {"solver": "proxgd"}
CASES: dict[str, Callable[[], Any]] = {
    "This model has no linear": lambda: sp.convert_model(model(), "proxsg", iters=10),
    "Targets that convert nothing": lambda: sp.convert_model(model(), "proxgd", targets=["conv9"]),
    "fc is converted already": twice,
    "Expected a plain model": lambda: sp.convert_model(nn.DataParallel(model()), "proxgd"),
    "torch.nn.modules.activation.GELU": lambda: sp.prox_for(nn.GELU()),
    "PReLU is a proximal map": steep,
    "A channel gate": lambda: sp.convert_model(model(), "proxgd", iters=1, gate="channel"),
    "proxgd: after 3 iterations": implicit,
    "The converted layer": replaced,
    "Expected finite weights": not_finite,
    "Expected blocks that are affine": lambda: sp.merge_model(solvers().eval()),
    "The outputs of the reverted network": reverted,
    "A solver block chooses": lambda: torch.jit.script(solvers()),
    "holds neither": lambda: sp.load(str(Path(__file__).parent)),
    "Unknown solver": lambda: sp.convert_model(model(), "fsta"),
    "The tracker": no_tensorboard,
}


def explained() -> list[str]:
    """Returns the messages of the page, each as one line."""
    quotes = re.findall(r"(?:^> .*\n)+", PAGE.read_text(), re.MULTILINE)
    return [" ".join(line.removeprefix("> ") for line in quote.splitlines()) for quote in quotes]


def said_by(case: Callable[[], Any]) -> str:
    """Returns the message of the error, or else of the warnings, of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case()
        except SolverPluginsError as error:
            return str(error)
    return "\n".join(str(one.message) for one in caught if issubclass(one.category, SolverPluginsWarning))


@pytest.mark.parametrize("message", explained())
def test_messages_are_said_as_they_are_explained(message: str):
    (case,) = (case for start, case in CASES.items() if message.startswith(start))
    assert message in " ".join(said_by(case).split())


def test_every_case_is_explained():
    assert all(any(message.startswith(start) for message in explained()) for start in CASES)
