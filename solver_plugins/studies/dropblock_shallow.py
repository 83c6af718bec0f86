"""The structured dropout paper's synthetic problem and its linear network with one hidden layer (section 5.1).

``X`` (N, b) standard normal, ``Y = X V_true U_true^T`` (N, a); the network is ``X V U^T`` with ``V`` (b, d) and
``U`` (a, d). All matrices are standard normal at first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import pydantic
import torch
from pydantic import Field
from torch import Tensor

from solver_plugins.config import StrictConfig
from solver_plugins.dropblock import GlobalMinimum, Scheme, global_minimum, omega, theta_bar_of
from solver_plugins.dropblock.retain import check_divides
from solver_plugins.studies.figures import COLOURS, label, legend, line, nan_for_none, new_figure
from solver_plugins.studies.study import Context, Measured, Results, Study, StudyConfig, Table, finite, shown
from solver_plugins.train.randomness import seed_for

REFERENCE = "of *On the Regularization Properties of Structured Dropout* (Pal, Lane, Vidal and Haeffele, CVPR 2020)"
POINTS = 300
"""At most how many points of a curve are kept, half of them spread evenly, half over the powers of ten."""


class Sizes(StrictConfig):
    """The sizes of the synthetic problem."""

    samples: int = Field(1000, ge=2, description="N.")
    inputs: int = Field(100, ge=1, description="b.")
    hidden: int = Field(50, ge=1, description="d, the width that is dropped from.")
    outputs: int = Field(80, ge=1, description="a.")


class Descent(StrictConfig):
    """How the network is trained. The loss of a batch is half its mean squared error, as in Algorithm 1."""

    optimizer: Literal["adam", "sgd"] = Field("adam", description="Adam, or the plain SGD of Algorithm 1.")
    lr: float = Field(0.02, gt=0, description="Learning rate at the beginning.")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="Of the learning rate.")
    iterations: int = Field(6000, ge=2, description="Steps; one batch and one draw of masks each.")
    batch_size: int | None = Field(None, ge=1, description="Samples of a step; all of them by default.")

    def rate(self, step: int) -> float:
        return self.lr * (1.0 if self.schedule == "constant" else (1 + math.cos(math.pi * step / self.iterations)) / 2)


class ShallowConfig(StudyConfig):
    """What the studies of the synthetic problem share."""

    sizes: Sizes = Sizes()
    descent: Descent = Descent()


class BlockConfig(ShallowConfig):
    """What those share that drop blocks of one size."""

    block_size: int = Field(5, ge=1, description="r.")

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        check_divides(self.block_size, self.sizes.hidden)
        return self


def _check_theta(theta: float) -> float:
    if not 0 < theta < 1:
        raise ValueError(f"expected every theta, the probability that a unit is kept, in (0, 1); found {theta}")
    return theta


Thetas = list[Annotated[float, pydantic.AfterValidator(_check_theta)]]
"""Retain probabilities."""


@dataclass(frozen=True)
class Synthetic:
    """Data ``X``, ``Y`` and first weights ``U``, ``V`` of the last and the first layer, in float64."""

    X: Tensor
    Y: Tensor
    U: Tensor
    V: Tensor

    def compressed(self) -> "Synthetic":
        """Returns a problem with at most b samples and the same objective for all weights and schemes.

        Y lies in what X reaches, and ``X = Q R``: then ``|Y - X A|^2 = |Q^T Y - R A|^2``, and ``X V`` has the Gram
        matrix of ``R V``.
        """
        if len(self.X) <= self.X.shape[1]:
            return self
        Q, R = torch.linalg.qr(self.X)
        return Synthetic(R, Q.mT @ self.Y, self.U, self.V)

    def minimum(self, theta: float, r: int) -> GlobalMinimum:
        """Returns the closed form (Theorem 2.7) for blocks of ``r`` on a grid, which are kept with ``theta``."""
        return global_minimum(self.Y, theta_bar_of(theta, self.U.shape[1], r), r, self.X)


def synthetic(sizes: Sizes, seed: int, shape_inputs: Callable[[Tensor], Tensor] = lambda X: X) -> Synthetic:
    """Draws the problem; ``shape_inputs`` may give the inputs another covariance."""
    generator = torch.Generator().manual_seed(seed_for("synthetic", seed))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X = shape_inputs(normal(sizes.samples, sizes.inputs))
    # The true factors are as wide as the network's.
    U_true, V_true = normal(sizes.outputs, sizes.hidden), normal(sizes.inputs, sizes.hidden)
    return Synthetic(X, X @ V_true @ U_true.mT, normal(sizes.outputs, sizes.hidden), normal(sizes.inputs, sizes.hidden))


@dataclass(frozen=True)
class Trained:
    """The weights after training, in float64, and the curves, read at these iterations.

    ``sampled`` is the objective with the masks of that step, over the samples of its batch, scaled to all of them
    (empty where nothing is sampled), ``objective`` the deterministic one with the same weights.
    """

    U: Tensor
    V: Tensor
    iterations: list[int]
    sampled: list[float]
    objective: list[float]

    def values(self) -> dict[str, Any]:
        """Returns what a cell's file holds: None where training has diverged.

        Sampled objectives are compared with the deterministic one at the same weights. The masks of a step are
        independent of its weights, so each ratio is one on average, and so is their mean up to a standard error.
        """
        pairs = zip(self.sampled, self.objective, strict=False)
        ratios = torch.tensor([one / other for one, other in pairs], dtype=torch.float64)
        compared = len(ratios) > 1 and bool(torch.isfinite(ratios).all())
        return {
            "final": finite(self.objective[-1]),
            "sampled_over_deterministic": float(ratios.mean()) if compared else None,
            "standard_error": float(ratios.std() / math.sqrt(len(ratios))) if compared else None,
            "curves": {
                "iteration": self.iterations,
                "sampled": [finite(value) for value in self.sampled],
                "objective": [finite(value) for value in self.objective],
            },
        }


Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From a batch of X, V and U to outputs, with masks drawn from the global random state."""
Objective = Callable[[Tensor, Tensor], Tensor]
"""From U and V to the deterministic objective."""


def train(
    problem: Synthetic, descent: Descent, objective: Objective, predict: Predict | None, context: Context
) -> Trained:
    """Trains the network with sampled masks, or without any (``predict`` is None) on the deterministic objective.

    The loop of the matrix problems: they descend on a closed form in float64 and read curves at steps, not epochs.
    """
    dtype = torch.float32 if predict is not None else torch.float64
    X, Y = problem.X.to(dtype), problem.Y.to(dtype)
    U, V = (one.to(dtype, copy=True).requires_grad_() for one in (problem.U, problem.V))
    count = len(X)
    size = min(descent.batch_size or count, count)
    plain = descent.optimizer == "sgd"
    optimizer = torch.optim.SGD([U, V]) if plain else torch.optim.Adam([U, V], betas=(0.9, 0.99))
    read_at = _places(descent.iterations)
    places: list[int] = []
    sampled: list[float] = []
    objectives: list[float] = []
    for step in context.steps(descent.iterations):
        optimizer.param_groups[0]["lr"] = descent.rate(step)
        if predict is None:
            value = objective(U, V)
        else:
            rows = slice(None) if size == count else torch.randint(count, (size,))
            value = (Y[rows] - predict(X[rows], V, U)).square().sum() * (count / size)
        if step in read_at:
            places.append(step)
            with torch.no_grad():
                objectives.append(float(objective(U.double(), V.double())))
            if predict is not None:
                sampled.append(float(value.detach()))
        optimizer.zero_grad()
        (value / (2 * count)).backward()
        optimizer.step()
    U, V = U.detach().double(), V.detach().double()
    return Trained(U, V, [*places, descent.iterations], sampled, [*objectives, float(objective(U, V))])


def _places(iterations: int) -> set[int]:
    even = torch.linspace(0, iterations - 1, POINTS // 2)
    powers = torch.logspace(0, math.log10(iterations), POINTS // 2) - 1
    return {min(max(int(place), 0), iterations - 1) for place in torch.cat([even, powers]).round().tolist()}


def objective_of(problem: Synthetic, scheme: Scheme) -> Objective:
    """Returns the deterministic objective of a scheme (Lemma 2.1, Lemma 3.1) on the compressed problem."""
    return objective_with(problem, scheme.characteristic_matrix((problem.U.shape[1],)))


def objective_with(problem: Synthetic, cbar: Tensor) -> Objective:
    """Returns the deterministic objective of masks with a characteristic matrix (Lemma 3.1)."""
    small = problem.compressed()

    def objective(U: Tensor, V: Tensor) -> Tensor:
        features = small.X.to(U) @ V
        return (small.Y.to(U) - features @ U.mT).square().sum() + omega(U, features, cbar)

    return objective


C = TypeVar("C", bound=ShallowConfig)


class ShallowStudy(Study[C]):
    """A study of the synthetic problem: one row of the table for each cell."""

    tags = ("dropblock", "synthetic")
    heading: ClassVar[str]

    def row_name(self, one: Measured) -> str:
        return one.cell.arm

    def cell_table(
        self, results: Results, title: str, columns: dict[str, Callable[[Measured], str]], note: str
    ) -> list[Table]:
        """Returns the table: a row for each cell, and a function from cells to texts for each column."""
        rows = [(f"{self.row_name(one)}, seed {one.cell.seed}", *(text(one) for text in columns.values()))
                for one in results]  # fmt: skip
        return [Table(title, (self.heading, *columns), rows, note)]


def value(key: str, form: str, missing: str = "-") -> Callable[[Measured], str]:
    """Returns a column with a value of the cells."""
    return lambda one: shown(one.values[key], form, missing)


def closed_form(form: str) -> Callable[[Measured], str]:
    """Returns a column with the closed form, which says where this width does not attain it."""
    return lambda one: f"{one.values['closed_form']:{form}}" + ("" if one.values["attainable"] else " (bound)")


def agreement(one: Measured) -> str:
    """Returns how the sampled objective agrees with its expectation."""
    ratio = one.values["sampled_over_deterministic"]
    return "-" if ratio is None else f"{ratio:.4f} ± {one.values['standard_error']:.4f}"


FINAL = value("final", ".6g", "diverged")
"""A column with the objective at the end."""


def plotted(one: Measured, key: str) -> tuple[list[int], list[float]]:
    """Returns the iterations, counted from one, and the values of a curve of a cell, for ``plot``."""
    curves = one.values["curves"]
    return [1 + step for step in curves["iteration"][: len(curves[key])]], nan_for_none(curves[key])


class Panels(NamedTuple):
    """Two panels, one above the other: the arm ``sampled`` (and its name) with its masks, and all objectives.

    ``cells`` has one cell for each arm, and ``minimum`` is the global minimum, if it is shown.
    """

    title: str
    cells: Results
    sampled: tuple[str, str]
    names: dict[str, str]
    minimum: float | None = None


def draw_panels(columns: list[Panels], width: float) -> Any:
    """Draws objectives over iterations, on logarithmic axes."""
    figure, axes = new_figure(2, len(columns), width=width)
    for column, top, bottom in zip(columns, *axes, strict=True):
        for number, one in enumerate(column.cells):
            arm, name = column.sampled
            if one.cell.arm == arm:
                top.plot(*plotted(one, "sampled"), color=COLOURS[5], linewidth=1, label=f"{name}, stochastic")
                top.plot(*plotted(one, "objective"), color=COLOURS[0], label=f"{name}, deterministic")
            bottom.plot(*plotted(one, "objective"), **line(number, label=column.names[one.cell.arm]))
        if column.minimum is not None:
            style = {"color": COLOURS[2], "linestyle": ":", "label": "global minimum, Theorem 2.7"}
            bottom.axhline(column.minimum, linewidth=2, **style)
        for panel in (top, bottom):
            label(panel, "iteration", "objective", column.title if panel is top else None, log="xy")
            legend(panel)
    return figure
