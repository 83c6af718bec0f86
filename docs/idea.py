"""Draws docs/idea.png: a layer is the first step of a solver, and a solver block takes the next ones, too.

python docs/idea.py
"""

from pathlib import Path

import numpy
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from solver_plugins import SolverLinear

STEPS = 12
INK, BLUE, ORANGE = "#222222", "#1f6fb4", "#d1701f"


def iterates(layer: nn.Linear, inputs: torch.Tensor) -> numpy.ndarray:
    """Returns what a block of 0, 1, 2, ... iterations computes, its ReLU included."""
    found = [torch.zeros(layer.out_features)]
    for count in range(1, STEPS + 1):
        block = SolverLinear.from_linear(layer, activation=nn.ReLU(), solver="proxgd", iters=count, lam=0.05)
        with torch.no_grad():
            found.append(block.eval()(inputs).relu()[0])
    return torch.stack(found).numpy()


def main() -> None:
    """Writes the figure beside this file."""
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
    height = 0.5 * numpy.einsum("...i,ij,...j", x, (A @ A.T + 0.05 * numpy.eye(2)) / L, x) - x @ (A @ u)

    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    words, plane = figure.subplots(1, 2, width_ratios=(1.15, 1))
    words.axis("off")
    for y, text, colour, size in (
        (0.93, "A layer with ReLU", INK, 13),
        (0.80, r"$x = \mathrm{relu}(A u)$", ORANGE, 15),
        (0.62, "is the first step of a solver, from $x_0 = 0$:", INK, 13),
        (0.47, r"$x_{k+1} = \mathrm{relu}(\,x_k - A A^{\!\top} x_k / L + A u\,)$", BLUE, 15),
        (0.28, "A solver block takes more steps, with the", INK, 13),
        (0.17, "same weights, towards the minimum of", INK, 13),
        (0.03, r"$\frac{1}{2}\Vert A^{\!\top} x / \sqrt{L} - \sqrt{L}\,u \Vert^2$  over  $x \geq 0$", INK, 14),
    ):
        words.text(0.0, y, text, color=colour, fontsize=size, transform=words.transAxes, va="center")
    plane.contour(across, up, height, 22, colors="#c4cdd6", linewidths=0.8, linestyles="solid")
    plane.axhspan(up[0], 0, color="#eeeeee", zorder=0)
    plane.plot(*path.T, "-o", color=BLUE, markersize=4, linewidth=1.4)
    plane.plot(*path[1], "o", color=ORANGE, markersize=9)
    plane.annotate("$x_0 = 0$", path[0], (6, -16), textcoords="offset points", color=INK, fontsize=11)
    plane.annotate("the layer", path[1], (8, 6), textcoords="offset points", color=ORANGE, fontsize=12)
    plane.annotate(f"{STEPS} steps", path[-1], (-6, 14), textcoords="offset points", color=BLUE, fontsize=12)
    plane.set(xlabel="first output", ylabel="second output", xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    for side in ("top", "right"):
        plane.spines[side].set_visible(False)
    figure.savefig(Path(__file__).with_name("idea.png"), dpi=130)


if __name__ == "__main__":
    main()
