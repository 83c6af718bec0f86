"""Draws the figures of the pages on concepts: idea, problem, steps, gates and collapse.png.

python docs/figures.py
"""

from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from solver_plugins import SolverLinear, convert_model, gates_of

STEPS = 12
INK, BLUE, ORANGE, GREEN, GREY = "#222222", "#1f6fb4", "#d1701f", "#3a8f4d", "#8a949e"
FIGURES: dict[str, Callable[[], Figure]] = {}


def draws(name: str) -> Callable[[Callable[[], Figure]], Callable[[], Figure]]:
    """Decorates a function that draws the figure ``NAME.png``."""

    def add(function: Callable[[], Figure]) -> Callable[[], Figure]:
        FIGURES[name] = function
        return function

    return add


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Axes, x: str, y: str) -> None:
    """Names the axes and leaves out the frame."""
    axes.set(xlabel=x, ylabel=y)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def iterates(layer: nn.Linear, inputs: torch.Tensor) -> numpy.ndarray:
    """Returns what a block of 0, 1, 2, ... iterations computes, its ReLU included."""
    found = [torch.zeros(layer.out_features)]
    for count in range(1, STEPS + 1):
        block = SolverLinear.from_linear(
            layer, activation=nn.ReLU(), solver="proxgd", iters=count, lam=0.05
        )
        with torch.no_grad():
            found.append(block.eval()(inputs).relu()[0])
    return torch.stack(found).numpy()


@draws("idea")
def idea() -> Figure:
    """A layer is the first step of a solver; a solver block takes the next ones."""
    layer = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.2, 0.0], [0.8, 0.0, 0.5]]))
    inputs = torch.tensor([[0.9, 0.5, -0.24]]).double()
    path = iterates(layer, inputs)
    A, u = layer.weight.detach().numpy(), inputs[0].numpy()
    # The problem that the block solves: A and u are scaled so that the first step is the layer.
    L = numpy.linalg.eigvalsh(A @ A.T).max() + 0.05
    across, up = numpy.linspace(-0.1, 2.1, 300), numpy.linspace(-0.35, 1.1, 300)
    x = numpy.stack(numpy.meshgrid(across, up), -1)
    hessian = (A @ A.T + 0.05 * numpy.eye(2)) / L
    height = 0.5 * numpy.einsum("...i,ij,...j", x, hessian, x) - x @ (A @ u)

    figure = new_figure(8.6, 3.6)
    words, plane = figure.subplots(1, 2, width_ratios=(1.15, 1))
    words.axis("off")
    for y, text, colour, size in (
        (0.93, "A layer with ReLU", INK, 13),
        (0.80, r"$x = \mathrm{relu}(A u)$", ORANGE, 15),
        (0.62, "is the first step of a solver, from $x_0 = 0$:", INK, 13),
        (0.47, r"$x_{k+1} = \mathrm{relu}(\,x_k - A A^{\!\top} x_k / L + A u\,)$", BLUE, 15),
        (0.28, "A solver block takes more steps, with the", INK, 13),
        (0.17, "same weights, towards the minimum of", INK, 13),
        (
            0.03,
            r"$\frac{1}{2}\Vert A^{\!\top} x / \sqrt{L} - \sqrt{L}\,u \Vert^2$  over  $x \geq 0$",
            INK,
            14,
        ),
    ):
        words.text(
            0.0, y, text, color=colour, fontsize=size, transform=words.transAxes, va="center"
        )
    plane.contour(across, up, height, 22, colors="#c4cdd6", linewidths=0.8, linestyles="solid")
    plane.axhspan(up[0], 0, color="#eeeeee", zorder=0)
    plane.plot(*path.T, "-o", color=BLUE, markersize=4, linewidth=1.4)
    plane.plot(*path[1], "o", color=ORANGE, markersize=9)
    note = {"textcoords": "offset points", "fontsize": 12}
    plane.annotate("$x_0 = 0$", path[0], (6, -16), color=INK, **note)
    plane.annotate("the layer", path[1], (8, 6), color=ORANGE, **note)
    plane.annotate(f"{STEPS} steps", path[-1], (-6, 14), color=BLUE, **note)
    plane.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    plain_axes(plane, "first output", "second output")
    return figure


def random_block(solver: str, iters: int = 10) -> SolverLinear:
    """Returns a random block, the same one for every solver."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 64).double()
    return SolverLinear.from_linear(layer, activation=nn.ReLU(), solver=solver, iters=iters).eval()


def gaps(block: SolverLinear, inputs: torch.Tensor, least: float) -> numpy.ndarray:
    """Returns by iteration how far the objective is from its minimum, in units of the first gap."""
    with torch.no_grad():
        objective = block.diagnose(inputs).objective.sum(1).numpy()
    return (objective - least) / (objective[0] - least)


@draws("problem")
def problem() -> Figure:
    """What is left of the objective after each iteration of some solvers."""
    inputs = torch.randn(32, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        least = float(random_block("fista", 2000).diagnose(inputs).objective[-1].sum())
    figure = new_figure(7.2, 3.2)
    axes = figure.subplots()
    for solver, colour in (("proxgd", BLUE), ("fista", ORANGE), ("anderson", GREEN)):
        left = gaps(random_block(solver), inputs, least)
        axes.semilogy(range(1, len(left) + 1), left, "-o", color=colour, markersize=4, label=solver)
    axes.annotate("the layer", (1, left[0]), (10, 2), textcoords="offset points", color=INK)
    axes.legend(frameon=False)
    plain_axes(axes, "iteration", "gap to the minimum (layer: 1)")
    return figure


@draws("steps")
def steps() -> Figure:
    """The objective of gradient steps 1/L for L right, too large and too small."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(64, 128, generator=generator, dtype=torch.float64).numpy() / 128**0.5
    u = torch.randn(128, generator=generator, dtype=torch.float64).numpy()
    gram, right = A @ A.T, A @ u
    true = numpy.linalg.eigvalsh(gram).max()

    def objective(x: numpy.ndarray) -> float:
        return float(0.5 * x @ gram @ x - x @ right)

    def run(L: float, count: int) -> list[float]:
        x, found = numpy.zeros(64), []
        for _ in range(count):
            x = x - (gram @ x - right) / L
            found.append(objective(x))
        return found

    least = objective(numpy.linalg.solve(gram, right))
    figure = new_figure(7.2, 3.2)
    axes = figure.subplots()
    for factor, colour, label in (
        (1.0, BLUE, "$L$"),
        (4.0, GREY, "four times too large: slow"),
        (0.4, ORANGE, "0.4 times: diverges"),
    ):
        left = numpy.array(run(factor * true, 20)) - least
        left /= run(true, 1)[0] - least
        axes.semilogy(range(1, 21), left, "-o", color=colour, markersize=3, label=label)
    axes.set_ylim(1e-3, 1e3)
    axes.legend(frameon=False)
    plain_axes(axes, "iteration", "gap to the minimum (layer: 1)")
    return figure


@draws("gates")
def gates() -> Figure:
    """The distance of a block's output from the layer and from the solver, by its gate."""
    inputs = torch.randn(64, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 64).double(), nn.ReLU()).eval()
    convert_model(net, "proxgd", iters=10, gate="scalar", example_inputs=inputs)
    (gate,) = gates_of(net).values()
    values = numpy.linspace(0, 1, 41)
    outputs = []
    with torch.no_grad():
        for value in values:
            gate.fill_(float(value))
            outputs.append(net(inputs))
    layer, solver = outputs[0], outputs[-1]
    far = float((solver - layer).norm())
    figure = new_figure(7.2, 3.2)
    axes = figure.subplots()
    for other, colour, label in (
        (layer, ORANGE, "from the layer"),
        (solver, BLUE, "from the solver"),
    ):
        distances = [float((output - other).norm()) / far for output in outputs]
        axes.plot(values, distances, color=colour, label=label)
    axes.legend(frameon=False)
    plain_axes(axes, "gate a", "distance of the block")
    return figure


@draws("collapse")
def collapse() -> Figure:
    """The gain of T iterations along a singular direction, over that of the layer."""
    share = numpy.linspace(1e-3, 1, 400)
    figure = new_figure(7.2, 3.2)
    axes = figure.subplots()
    for count, colour in ((1, ORANGE), (3, GREEN), (10, BLUE), (30, GREY)):
        label = f"T = {count}" + (": the layer" if count == 1 else "")
        axes.loglog(share, (1 - (1 - share) ** count) / share, color=colour, label=label)
    axes.legend(frameon=False)
    plain_axes(axes, r"strength of the direction, $\sigma^2 / L$", "gain over the layer")
    return figure


def main() -> None:
    """Writes the figures beside this file."""
    for name, draw in FIGURES.items():
        draw().savefig(Path(__file__).with_name(f"{name}.png"), dpi=130)


if __name__ == "__main__":
    main()
