"""What a solver of fixed-point problems is: a config, and one iteration rule as ``init`` and ``step``.

A new one is one file: derive a final class, write ``step``, decorate with ``@register_equilibrium_solver``. Another
distribution offers it through the entry-point group ``solver_plugins.equilibrium_solvers``.
"""

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import pydantic
from torch import Tensor

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium.problem import EquilibriumProblem
from solver_plugins.registry import Registry, subclasses_of


class EquilibriumConfig(StrictConfig):
    """Options that every solver of equilibria has."""

    iters: int = pydantic.Field(
        20, ge=1, description="At most so many evaluations of the map; unrolled, exactly so many."
    )
    tol: float = pydantic.Field(
        1e-4,
        ge=0,
        description="A sample is done once |T(z) - z| <= tol |T(z)|; also for the backward. Unrolled: not used.",
    )
    grad: Literal["implicit", "unrolled"] = pydantic.Field(
        "implicit", description="'implicit' differentiates the equilibrium; 'unrolled' the iterations, all of them."
    )
    implicit_iters: int = pydantic.Field(50, ge=1, description="At most so many steps of the implicit backward.")
    implicit_tol: float = pydantic.Field(
        1e-2, gt=0, description="Largest residual at which an implicit gradient is trusted; above it, unroll and warn."
    )


@dataclass(frozen=True)
class State:
    """Where a solve stands.

    Attributes:
        z: Where the map is evaluated next; None is zero.
        value: The result if the solve ended here; None is the last image.
        moved: ``T(z) - z`` with one row per sample, where the loop has computed it.
        distance: Its length.
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
        Config: The options' model.
        one_layer_only: It needs the equilibrium to be a minimiser of ``h``: a single layer.
        chooses: It chooses among fixed points by the regulariser, which otherwise is appended to the map. Such a solve
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

    def init(self) -> State:
        """Returns the state before the first evaluation, which is at zero."""
        return State(None)

    @abc.abstractmethod
    def step(self, problem: EquilibriumProblem, state: Any, image: Tensor, iteration: int) -> State:
        """Returns the state after an evaluation.

        Args:
            problem: The problem.
            state: The state before; the loop may have moved ``state.z`` back where a sample is done.
            image: ``T(state.z)``.
            iteration: Counted from zero.
        """


EQUILIBRIUM_SOLVERS: Registry[type[EquilibriumSolver]] = Registry(
    "equilibrium solver",
    entry_point_group="solver_plugins.equilibrium_solvers",
    check=subclasses_of(EquilibriumSolver, "solver_plugins.equilibrium.EquilibriumSolver"),
)
S = TypeVar("S", bound=type[EquilibriumSolver])


def register_equilibrium_solver(solver: S) -> S:
    """Class decorator: registers a solver under its ``name``; the first line of its docstring is the description."""
    return EQUILIBRIUM_SOLVERS.register_class(solver)


def list_equilibrium_solvers(filter: str | Iterable[str] | None = None) -> list[str]:
    """Lists the registered solvers; ``filter`` is a glob on the name or a tag ("accelerated")."""
    return EQUILIBRIUM_SOLVERS.names(filter)
