"""The interface of equilibrium solvers: a config, and one iteration rule as ``init`` and ``step``.

A new solver is one file: derive a final class, write ``step``, decorate with ``@register_equilibrium_solver``. Another
distribution adds one through the entry-point group ``solver_plugins.equilibrium_solvers``.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pydantic
from torch import Tensor

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium.problem import EquilibriumProblem
from solver_plugins.registry import Registry, subclasses_of

RENAMED = {"grad": "It is called 'gradient' since 0.2.0, as in solver blocks."}


class EquilibriumConfig(StrictConfig):
    """Options of every equilibrium solver."""

    hints: ClassVar[Mapping[str, str]] = RENAMED

    iters: int = pydantic.Field(
        20, ge=1, description="Largest number of evaluations of the map; unrolled, the exact number."
    )
    tol: float = pydantic.Field(
        1e-4,
        ge=0,
        description="A sample is done once |T(z) - z| <= tol |T(z)|; also for the backward. Unrolled: not used.",
    )
    gradient: Literal["implicit", "unrolled"] = pydantic.Field(
        "implicit", description="'implicit' differentiates the equilibrium, 'unrolled' all of the iterations."
    )
    implicit_iters: int = pydantic.Field(50, ge=1, description="Largest number of steps of the implicit backward.")
    # Larger than the 1e-4 of solver blocks on purpose. A block has no stopping rule, and this is its only check of
    # convergence. Here every sample is solved to `tol`, and this bound only concerns samples that run out of `iters`.
    implicit_tol: float = pydantic.Field(
        1e-2, gt=0, description="Largest residual at which an implicit gradient is trusted; above it, unroll and warn."
    )


@dataclass(frozen=True)
class EquilibriumState:
    """The state of a solve between two evaluations.

    Attributes:
        z: Where the map is evaluated next; None is zero.
        value: The result if the solve ends here; None is the last image.
        moved: ``T(z) - z`` with one row per sample, if the loop has computed it.
        distance: The length of each row.
    """

    z: Tensor | None
    value: Tensor | None = None
    moved: Tensor | None = field(default=None, kw_only=True)
    distance: Tensor | None = field(default=None, kw_only=True)


class EquilibriumSolver(abc.ABC):
    """An iteration rule with its options; subclasses are final and registered.

    Attributes:
        name: The registered name.
        tags: Words to filter by.
        Config: The model of the options.
        one_layer_only: It minimises ``h``, which only a single layer has.
        chooses: It uses the regulariser to choose among fixed points instead of appending it to the map. Such a solve
            ends near a fixed point, not at one, and has no implicit gradient.
    """

    name: ClassVar[str]
    tags: ClassVar[tuple[str, ...]] = ()
    Config: ClassVar[type[EquilibriumConfig]] = EquilibriumConfig
    one_layer_only: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def __init__(self, config: Any):
        self.config = config

    @classmethod
    def from_options(cls, **options: Any) -> "EquilibriumSolver":
        """Makes the solver from its options; raises OptionError for an unknown one or a bad value."""
        return cls(cls.Config.parse(options, owner=f"equilibrium solver {cls.name!r}"))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.config.options().items())
        return f"{type(self).__name__}({options})"

    def init(self) -> EquilibriumState:
        """Returns the state before the first evaluation, which is at zero."""
        return EquilibriumState(None)

    @abc.abstractmethod
    def step(self, problem: EquilibriumProblem, state: Any, image: Tensor, iteration: int) -> EquilibriumState:
        """Returns the state after an evaluation.

        Args:
            problem: The problem.
            state: The state before; if a sample is done, the loop may have moved its ``state.z`` back.
            image: ``T(state.z)``.
            iteration: The number of the iteration, from zero.
        """


EQUILIBRIUM_SOLVERS: Registry[type[EquilibriumSolver]] = Registry(
    "equilibrium solver",
    entry_point_group="solver_plugins.equilibrium_solvers",
    check=subclasses_of(EquilibriumSolver, "solver_plugins.equilibrium.EquilibriumSolver"),
)
register_equilibrium_solver = EQUILIBRIUM_SOLVERS.register_class
"""Class decorator: registers a solver under its ``name``; the first line of its docstring is the description."""
list_equilibrium_solvers = EQUILIBRIUM_SOLVERS.names
"""Returns the names of the equilibrium solvers; ``filter`` is a glob on the name or a tag ("accelerated")."""
