"""A model to check, and the result of its checks."""

import pathlib
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from solver_plugins.surgery import Inputs

TOLERANCE = 1e-4
"""Largest error in float32, in units of the scale of what is compared."""
ITERS = 3
"""Iterations of the comparison with the reference."""
CHECKS = (
    "walked", "converted", "keys", "eval", "train", "gradients", "statistics", "reference", "backward", "saved",
    "reverted", "generated",
)  # fmt: skip
"""The checks, in their order."""


@dataclass(frozen=True)
class Case:
    """One model to check.

    Attributes:
        library: "timm" or "transformers".
        name: The model's or the class's name.
        family: The module or model type that it belongs to.
        build: Makes the plain model; called twice, and makes the same modules each time.
        inputs: Its inputs.
        native: Makes the model as its users do, if ``build`` makes it for smaller inputs. That model is only walked: on
            the meta device, or with weights if it needs them.
        model: The result of a first ``build``, if there was one.
        reduced: How its depth was reduced, if it was.
        given: Whether the model does not say what its inputs are.
    """

    library: str
    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    native: Callable[[bool], nn.Module] | None = None
    model: nn.Module | None = None
    reduced: str | None = None
    given: bool = False


@dataclass
class Row:
    """The result for one model.

    Attributes:
        library: "timm" or "transformers".
        name: The model's or the class's name.
        family: The module or model type that it belongs to.
        parameters: How many numbers its Parameters hold.
        input: Shapes of its inputs.
        reduced: How its depth was reduced, if it was.
        device: Where it was walked.
        walk_seconds: How long that took, matching included, in seconds of the processor.
        layers: How many linear layers it has.
        blocks: Converted blocks by pattern.
        left: Layers that were left alone, by reason.
        errors: The largest error of each check that measures one.
        passed: The checks that hold.
        failures: The checks that do not, with the reason.
        foreign: The error of the plain model itself, if it does not run here; this package was not reached then.
        missing: What the plain model does not reach then: "built", "fed" or "ran" (both passes, finite).
        automatic: Whether its inputs were made from what it says about itself.
        generates: Whether the plain model generates, or its error.
        notes: What else is worth knowing.
        network: A hash of everything that it computes with except its weights, if it was built for smaller inputs.
        same_as: The model with the same hash whose results these are; this one was only walked.
        seconds: How long everything took, in processor seconds, so that other work on the machine does not count.
        wall_seconds: The same by the clock.
        stages: How long each check took, in seconds of the processor.
    """

    library: str
    name: str
    family: str
    parameters: int = 0
    input: str = ""
    reduced: str | None = None
    device: str | None = None
    walk_seconds: float | None = None
    layers: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    foreign: str | None = None
    missing: str | None = None
    automatic: bool = True
    generates: str | None = None
    notes: list[str] = field(default_factory=list)
    network: str | None = None
    same_as: str | None = None
    seconds: float = 0.0
    wall_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return asdict(self)


class CheckError(AssertionError):
    """A check does not hold."""


def told(error: BaseException) -> str:
    """Returns an error in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckError) else f"{type(error).__name__}: {text[:600]}{where}"


class NotBuiltError(Exception):
    """No small model of a class was found."""


class NotFedError(Exception):
    """A small model did not run with any inputs."""
