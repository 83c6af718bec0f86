"""Every solver after ten iterations: how far from the minimum, and what it costs against the plain layer.

    .venv/bin/python -m tests.benchmarks.solvers_at_ten [--figure docs/solvers.png]

Prints a Markdown table. Times are forward + backward, interleaved, best of several, in units of linear + ReLU in the
same run; two threads. Gaps are medians over the batch of ``(F(x_k) - F*) / (F(x_1) - F*)`` for the problem that each
solver solves, with ``F*`` from 3000 iterations of fista. Nothing here is asserted: the machine is noisy.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from solver_plugins import SolverLinear, list_solvers, solver_linear
from tests.benchmarks.costs import best_times

SHAPES = {"400→120, batch 256 (LeNet)": (400, 120, 256), "512→512, batch 128 (VGG16-CIFAR)": (512, 512, 128)}


def trainer(module: nn.Module, u: Tensor) -> Callable[[], None]:
    """Returns a call that runs forward and backward."""

    def call() -> None:
        torch.relu(module(u)).sum().backward()

    return call


def relative_gap(fc: nn.Linear, u: Tensor, name: str, iters: int) -> Tensor:
    """Returns the median gap per iteration (see the module's docstring)."""
    block = SolverLinear.from_linear(fc, nn.ReLU(), solver=name, iters=iters, lam=1e-3)
    objective = block.diagnose(u).objective
    # A solver with a guarded constant normalises the problem by it: measure the gap to that problem's minimum.
    constant = block.solver.smoothness(block.operator(u.shape), block.L) - 1e-3
    _, best = solver_linear(
        u, fc.weight.detach(), fc.bias.detach(), activation="relu", solver="fista", iters=3000, lam=1e-3,
        lipschitz=constant, diagnose=True,
    )  # fmt: skip
    floor = best.objective.amin(0)
    return ((objective - floor) / (objective[0] - floor)).median(-1).values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", help="also draw the gaps over 30 iterations to this file")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    curves: dict[str, dict[str, Tensor]] = {}
    for title, (n1, n2, batch) in SHAPES.items():
        torch.manual_seed(0)
        # A layer inside of a network: its input wants a gradient, too.
        fc, u = nn.Linear(n1, n2), torch.randn(batch, n1, requires_grad=True)
        names = list_solvers()
        calls = {"plain layer": trainer(fc, u)}
        calls |= {name: trainer(SolverLinear.from_linear(fc, nn.ReLU(), solver=name), u) for name in names}
        times = best_times(calls, arguments.repeats)
        double, inputs = nn.Linear(n1, n2, dtype=torch.float64), u[:16].detach().double()
        double.load_state_dict(fc.state_dict())
        curves[title] = {name: relative_gap(double, inputs, name, 30) for name in names}
        print(f"\n{title}\n\n| solver | gap after 10 iterations | time / plain layer |\n|---|---|---|")
        for name in sorted(names, key=lambda name: float(curves[title][name][9])):
            print(f"| `{name}` | {float(curves[title][name][9]):.1e} | {times[name] / times['plain layer']:.1f} |")
    if arguments.figure:
        draw(curves, arguments.figure)


def draw(curves: dict[str, dict[str, Tensor]], path: str) -> None:
    """Draws the gap of every solver over its iterations, one panel per shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(11, 4), sharey=True, layout="constrained")
    for axis, (title, gaps) in zip(axes, curves.items(), strict=True):
        for index, (name, gap) in enumerate(sorted(gaps.items(), key=lambda item: float(item[1][9]))):
            axis.semilogy(range(1, len(gap) + 1), gap.clamp_min(1e-9), label=name, color=f"C{index}")
        axis.axvline(10, color="0.8", linewidth=1, zorder=0)
        axis.set(title=title, xlabel="proximal steps", ylim=(1e-6, 3))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("gap to the minimum / gap of the plain layer")
    axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
