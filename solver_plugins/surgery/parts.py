"""What the matcher says about a linear layer: its pattern, the parts of it, and what stands in the way."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import nn

from solver_plugins.prox import IdentityPrior, Prior

Pattern = Literal[
    "dropout-linear-act",
    "dropout-linear",
    "linear-act",
    "linear-dropout-act",
    "linear-norm-act",
    "linear-norm-skip-act",
    "linear-skip-act",
    "linear",
]
PATTERNS: tuple[Pattern, ...] = Pattern.__args__  # type: ignore[attr-defined]
SCALE_PATTERNS: tuple[Pattern, ...] = ("linear-norm-act", "linear-norm-skip-act", "linear-skip-act")
"""Patterns that change the scale of a pretrained network at more than one iteration."""
Samples = Literal["nothing", "inputs", "outputs"]
"""What a solver draws at random: nothing, input features, or output features."""
CALLED: dict[Samples, str] = {"nothing": "deterministic", "inputs": "sampling", "outputs": "coordinate"}
"""What messages call a solver, by what it draws."""
Ownership = Literal["private", "shared", "functional"]
"""Whether a part is a module that serves this block alone, a module that also serves others, or a function."""


@dataclass(frozen=True)
class DropoutPart:
    """The dropout of a block, at a rate above zero; a function has no name and no module.

    Attributes:
        ownership: "shared" if some call of it does not belong to this block.
        sites: How often it is called in one forward pass; ``calls`` are those that belong to this block.
        after: Whether it stands behind the linear layer instead of before it.
        direct: Whether the same tensor goes between layer and dropout, without a view in between.
        attribute: The path of the attribute that holds the rate of a function, if a solver can set it to zero;
            otherwise ``problem`` says why not.
    """

    name: str | None
    module: nn.Module | None
    p: float
    ownership: Ownership
    sites: int
    calls: tuple[int, ...]
    after: bool = False
    direct: bool = True
    attribute: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class NormPart:
    """The norm of a block, which is folded into the linear map as a diagonal.

    ``statistics`` are those that it uses in training: of the "batch", or "running" ones that never change. The
    activation may be part of the same module (timm's BatchNormAct2d): ``holds_activation``.
    """

    name: str
    module: nn.Module
    kind: str
    statistics: Literal["batch", "running"]
    holds_activation: bool = False


@dataclass(frozen=True)
class SkipPart:
    """What is added before the activation: the other summand, in which argument of which call, and what computes it."""

    value: int
    operand: int
    call: int
    source: str


@dataclass(frozen=True)
class ActivationPart:
    """The activation of a block, which stays where it is: a module, a function, or several operations (neither).

    A function has ``args`` and ``kwargs`` after its input. ``label`` is for reports; ``sites`` and ``calls`` are as for
    a dropout.
    """

    label: str
    name: str | None
    module: nn.Module | None
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ownership: Ownership
    sites: int
    calls: tuple[int, ...]


@dataclass(kw_only=True)
class Surroundings:
    """What stands around a linear layer.

    Attributes:
        pattern: The longest pattern that the layer is part of.
        dropout: The dropout before the layer (or behind it: ``linear-dropout-act``).
        skip: What is added before the activation.
        prior: The prior whose proximal map is the activation; that of the identity if there is no activation; None,
            with a ``nonprox_reason``, if the activation is not a proximal map.
        outlet: Where the solver's result comes out: the linear layer, the norm, or the activation.
        is_last: Whether the model returns the layer's output: the classifier.
        feeds_last: Whether the classifier reads its activation: the hidden layer of a head.
        dropped: What a live dropout that is not the block's own acts on ("inputs" or "outputs"), and its label.
        calls: Indices of the layer's calls.
        reasons: What makes it impossible to convert the layer, at all or for some solvers.
        notes: What else is worth knowing, such as why no longer pattern matched.
    """

    pattern: Pattern = "linear"
    dropout: DropoutPart | None = None
    norm: NormPart | None = None
    skip: SkipPart | None = None
    activation: ActivationPart | None = None
    prior: Prior | None = dataclasses.field(default_factory=IdentityPrior)
    nonprox_reason: str | None = None
    outlet: Literal["linear", "norm", "activation"] = "linear"
    is_last: bool = False
    feeds_last: bool = False
    dropped: dict[Samples, str] = dataclasses.field(default_factory=dict)
    calls: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def without_activation(self, why: str) -> Self:
        """Returns what ends with the linear layer: ``g = 0``, and all that follows stays as it is."""
        before = self.dropout if self.dropout is not None and not self.dropout.after else None
        plain = Surroundings(
            pattern="linear" if before is None else "dropout-linear",
            dropout=before,
            is_last=self.is_last,
            feeds_last=self.feeds_last,
            dropped=self.dropped,
            calls=self.calls,
            notes=(*self.notes, why),
        )
        return dataclasses.replace(self, **vars(plain))


@dataclass
class Block(Surroundings):
    """One linear layer of a model, or a weight that belongs to no layer (with the module that holds it).

    ``convertible`` is what a solver may draw if the layer is converted to it; shapes are () if it was never called.
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    convertible: frozenset[Samples] = frozenset()

    @property
    def outlet_name(self) -> str:
        """The name of the module where the solver's result comes out."""
        part = {"linear": None, "norm": self.norm, "activation": self.activation}[self.outlet]
        return self.name if part is None or part.name is None else part.name

    def dropout_for(self, samples: Samples) -> DropoutPart | None:
        """Returns the dropout whose work a solver takes over: before the layer, or behind it if outputs are drawn."""
        if self.dropout is None or samples == "nothing":
            return None
        return self.dropout if self.dropout.after == (samples == "outputs") else None
