"""Equilibria against torchdeq, on the same map and tolerance: evaluations, products with the Jacobian, time.

    .venv/bin/python -m tests.benchmarks.opteq_torchdeq [--repeats 5] [--batch-linear 128] [--batch-conv 16]

torchdeq is a development dependency (``pip install torchdeq``); from a folder of its own: ``PYTHONPATH=.:FOLDER``.
Every one of its solvers is tried, with implicit gradients, relative stopping and 1e-5 forward and backward, as ours.
Prints a Markdown table. Times are CPU seconds of this process, forward and backward, the best of several turns; calls
take turns, so that a slow moment hits all of them. Nothing here is asserted: machines are noisy.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.equilibrium import DeepOptEq, OptEqLayer
from tests.benchmarks.costs import peak_bytes

TOL = 1e-5
SOLVERS = ("fixed_point_iter", "anderson", "broyden")


@dataclass
class Turn:
    """What one forward and backward cost."""

    evaluations: int
    products: int
    residual: float
    gradient: Tensor


class _Counted(torch.autograd.Function):
    """The identity; counts how often gradients pass."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Counted.passes += 1
        return grad


def network(kind: str, layers: int, weights: str, **options: Any) -> DeepOptEq:
    """Returns an equilibrium with a certified norm of 0.9: a layer's own initial weights, or Gaussian ones."""
    torch.manual_seed(0)
    make = OptEqLayer.linear if kind == "linear" else OptEqLayer.conv2d
    width = 512 if kind == "linear" else 64  # Of the input, too.
    made = [make(width, width, constraint="none", norm=0.9) for _ in range(layers)]
    for layer in made if weights == "gaussian" else ():
        nn.init.normal_(layer.W.weight)
        layer.project()
    return DeepOptEq(made, **{"tol": TOL, "iters": 100, "implicit_iters": 100, **options})


def ours(model: DeepOptEq, x: Tensor) -> Callable[[], Turn]:
    """Returns a forward and backward of this package."""

    def call() -> Turn:
        model.zero_grad()
        found = model.solve(x)
        found.value.square().sum().backward()
        gradient = model.layers[0].W.weight.grad
        return Turn(found.evaluations, found.backward.products, float(found.residual.max()), gradient)

    return call


def theirs(model: DeepOptEq, x: Tensor, solver: str) -> Callable[[], Turn]:
    """Returns a forward and backward of torchdeq on the same map."""
    from torchdeq import get_deq

    deq = get_deq(
        ift=True,
        f_solver=solver,
        b_solver=solver,
        f_max_iter=100,
        b_max_iter=100,
        f_tol=TOL,
        b_tol=TOL,
        f_stop_mode="rel",
        b_stop_mode="rel",
    )
    deq.train()

    def call() -> Turn:
        model.zero_grad()
        problem = model.problem(x)
        count = 0

        def image(z: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return problem.image(_Counted.apply(z))

        start = torch.zeros_like(x)
        _Counted.passes = 0
        outputs, info = deq(image, start)
        outputs[-1].square().sum().backward()
        residual = float(info["rel_lowest"].max()) if "rel_lowest" in info else float("nan")
        gradient = model.layers[0].W.weight.grad
        return Turn(count, _Counted.passes, residual, gradient)

    return call


def compare(kind: str, layers: int, weights: str, batch: int, repeats: int) -> None:
    """Prints the rows of one map."""
    model = network(kind, layers, weights)
    x = torch.randn(batch, 512) if kind == "linear" else torch.randn(batch, 64, 16, 16)
    calls = {"solver_plugins": ours(model, x)} | {f"torchdeq {name}": theirs(model, x, name) for name in SOLVERS}
    best = dict.fromkeys(calls, float("inf"))
    turns: dict[str, Turn] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            turns[name] = call()
            best[name] = min(best[name], time.process_time() - start)
    # The exact gradient, for the error of each.
    exact = ours(network(kind, layers, weights, tol=1e-7, iters=300, implicit_iters=300), x)().gradient.clone()
    for name, turn in turns.items():
        # calls[...] share the model's gradient, so it is computed again.
        gradient = calls[name]().gradient
        error = float((gradient - exact).norm() / exact.norm())
        counts = f"{turn.evaluations} | {turn.products} | {turn.residual:.0e} | {error:.0e}"
        print(
            f"| {kind}, L = {layers}, {weights} | {name} | {counts} | {best[name] / best['solver_plugins']:.2f} |",
            flush=True,
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-linear", type=int, default=128)
    parser.add_argument("--batch-conv", type=int, default=16)
    parser.add_argument("--only", choices=["linear", "conv"])
    options = parser.parse_args()
    print("| map | solver | evaluations | Jacobian products | residual | gradient error | time / ours |")
    print("|---|---|---|---|---|---|---|")
    kinds = ["linear", "conv"] if options.only is None else [options.only]
    for kind, layers, weights in itertools.product(kinds, (1, 3), ("initial", "gaussian")):
        batch = options.batch_linear if kind == "linear" else options.batch_conv
        compare(kind, layers, weights, batch, options.repeats)
    for layers in (1, 3):
        x = torch.randn(options.batch_linear, 512)
        peaks = []
        for iters in (5, 50):
            model = network("linear", layers, "gaussian", iters=iters, tol=0.0, implicit_tol=1.0)
            call = ours(model, x)
            call()
            peaks.append(peak_bytes(call))
        print(f"\npeak memory of a training step, L = {layers}: K = 50 takes {peaks[1] / peaks[0]:.2f} of K = 5")


if __name__ == "__main__":
    main()
