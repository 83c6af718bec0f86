"""A classifier whose features are an equilibrium: backbone features -> equilibrium -> classes."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import pydantic
from torch import Tensor, nn

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium.activations import allowed_activation
from solver_plugins.equilibrium.deep import DeepOptEq
from solver_plugins.equilibrium.layer import OptEqLayer
from solver_plugins.equilibrium.solvers.solver import RENAMED

_WIDEST = 512


class DeepOptEqConfig(StrictConfig):
    """Options of a :class:`DeepOptEq` and of its layers, as plain JSON values."""

    hints: ClassVar[Mapping[str, str]] = RENAMED

    alpha: float = pydantic.Field(0.8, gt=0, le=1, description="Step of the layers.")
    activation: str | dict[str, Any] = pydantic.Field(
        "relu", description="Registered prior, or {'name': ..., ...}: monotone, slopes in [0, 1]."
    )
    constraint: Literal["aol", "none"] = pydantic.Field("aol", description="How |W| stays bounded; see OptEqLayer.")
    norm: float = pydantic.Field(0.9, gt=0, le=1, description="Bound on |W|.")
    solver: str = pydantic.Field("anderson", description="Registered equilibrium solver.")
    iters: int = pydantic.Field(20, ge=1, description="Largest number of evaluations; unrolled, the exact number.")
    gradient: Literal["implicit", "unrolled"] | None = pydantic.Field(
        None, description="'implicit' (default) or 'unrolled' (the only choice for solver='sam')."
    )
    regularizer: str | dict[str, Any] | None = pydantic.Field(None, description="Feature regulariser, with parameters.")
    lam: float = pydantic.Field(0.1, ge=0, description="Weight of the regulariser.")
    tol: float = pydantic.Field(1e-4, ge=0, description="A sample is done once |T(z) - z| <= tol |T(z)|.")
    solver_args: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Further options of the solver: implicit_iters, implicit_tol, window, ..."
    )

    def layer_options(self) -> dict[str, Any]:
        named = {"name": self.activation} if isinstance(self.activation, str) else dict(self.activation)
        prior = allowed_activation(named.pop("name", ""), **named)
        return {"activation": prior, "constraint": self.constraint, "norm": self.norm}

    def equilibrium(self, layers: Iterable[OptEqLayer]) -> DeepOptEq:
        """Returns the equilibrium of layers that were made with :meth:`layer_options`."""
        own = ("solver", "regularizer", "lam", "iters", "tol") + (() if self.gradient is None else ("gradient",))
        return DeepOptEq(layers, self.alpha, **{name: getattr(self, name) for name in own}, **self.solver_args)


class HeadConfig(DeepOptEqConfig):
    """Options of an equilibrium head, as plain JSON values."""

    hidden: int | None = pydantic.Field(
        None, ge=1, description="Features of the equilibrium; None takes those of the backbone, at most 512."
    )
    layers: int = pydantic.Field(2, ge=1, description="Layers of the equilibrium.")


class OptEqHead(nn.Module):
    """Maps features to classes through an equilibrium: ``y = W_{L+1} z``, ``z = f_L o ... o f_1(z, x)`` (equation 4).

    ``head.equilibrium.solve(x)`` tells how a solve went. ``replaced`` holds the layer that the head replaces, in a
    tuple so that it is not a submodule; it may be empty.
    """

    def __init__(
        self, in_features: int, out_features: int, config: HeadConfig, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        hidden = min(in_features, _WIDEST) if config.hidden is None else config.hidden
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        own = config.layer_options()
        self.equilibrium = config.equilibrium(
            OptEqLayer.linear(hidden, in_features, **own, **made) for _ in range(config.layers)
        )
        self.output = nn.Linear(hidden, out_features, **made)
        self.in_features, self.out_features = in_features, out_features
        self.config = config
        self.replaced: tuple[nn.Linear, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.equilibrium(x))
