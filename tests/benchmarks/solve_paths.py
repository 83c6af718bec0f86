"""Ratios of solver blocks and their plain layers: what is measured for the one kernel and for collapsed blocks.

    python tests/benchmarks/solve_paths.py [--only WORD] [--repeats 15]

Every repeat runs all variants of a row once, in turn, so that a busy machine slows all of them alike; a ratio is that
of the best times. Two threads, float32. Bounds are those that the rows are to stay below; nothing is asserted.
"predicted" is what the cost model counts: operations of forward and backward in units of the plain layer's.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from solver_plugins import SolverBlock, convert_model
from solver_plugins.surgery.cost import cost_of

Work = Callable[[], object]


def best(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Returns the best time of each, taken in turn."""
    times = dict.fromkeys(works, float("inf"))
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repeat:
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def step(module: nn.Module, u: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Work:
    """Forward and backward."""
    x = u.clone().requires_grad_(u.is_floating_point())

    def run() -> None:
        module.zero_grad(set_to_none=True)
        out = module(x)
        (out if activation is None else activation(out)).sum().backward()

    return run


def forward(module: nn.Module, u: Tensor) -> Work:
    """Evaluation."""

    def run() -> None:
        with torch.no_grad():
            module(u)

    return run


def predicted(block: SolverBlock, u: Tensor) -> float | None:
    """Returns the ratio of forward and backward that the cost model counts."""
    return cost_of(block, tuple(u.shape), block.solver, block.prior, backward=True).training


def show(title: str, works: dict[str, Work], repeats: int, bound: float | None, count: float | None = None) -> None:
    times = best(works, repeats)
    plain = times.pop("plain")
    ratios = "  ".join(f"{name} {seconds / plain:6.2f}" for name, seconds in times.items())
    told = "" if count is None else f"  predicted {count:6.2f}"
    print(f"{title:62s} plain {1e3 * plain:8.2f} ms  {ratios}{told}  (at most {bound})", flush=True)


def linear_rows(repeats: int) -> None:
    for (inputs, outputs), bound in zip(
        ((768, 3072), (768, 2304), (768, 768), (3072, 768)), (3.2, 3.3, 5.5, 2.9), strict=True
    ):
        torch.manual_seed(0)
        layer, u = nn.Linear(inputs, outputs), torch.randn(1576, inputs)
        block = SolverBlock.from_layer(layer, None, "proxgd", 10)
        title = f"no prior, {inputs} -> {outputs}, 1576 rows"
        works = {"plain": step(layer, u), "proxgd": step(block, u)}
        show(f"{title}, forward + backward", works, repeats, bound, predicted(block, u))
        still = SolverBlock.from_layer(layer, None, "proxgd", 10).eval()
        show(f"{title}, evaluation", {"plain": forward(layer, u), "proxgd": forward(still, u)}, repeats, 1.05)


def pointwise_rows(repeats: int) -> None:
    for inputs, outputs, size, batch, bound in ((1024, 256, 14, 16, 5.5), (960, 320, 7, 32, 6.0)):
        torch.manual_seed(0)
        layer, u = nn.Conv2d(inputs, outputs, 1), torch.randn(batch, inputs, size, size)
        block = SolverBlock.from_layer(layer, nn.ReLU(), "proxgd", 10)
        works = {"plain": step(layer, u, functional.relu), "proxgd": step(block, u, functional.relu)}
        show(
            f"pointwise with ReLU, {inputs} -> {outputs} at {size}x{size}, batch {batch}",
            works,
            repeats,
            bound,
            predicted(block, u),
        )


def solver_rows(repeats: int) -> None:
    torch.manual_seed(0)
    layer, u = nn.Linear(400, 120), torch.randn(256, 400)
    for name, bound in (("proxgd", 4.6), ("proxsg", None), ("ms2gd", 15.0), ("rcd", 9.0), ("anderson", 15.0)):
        block = SolverBlock.from_layer(layer, nn.ReLU(), name, 10)
        works = {"plain": step(layer, u, functional.relu), name: step(block, u, functional.relu)}
        show("400 -> 120, batch 256, ReLU", works, 8 * repeats, bound, predicted(block, u))


def model_rows(repeats: int) -> None:
    import timm

    for name, size, iters, bounds in (
        ("vit_tiny_patch16_224", 224, 10, (2.5, 1.1)),
        ("resnet50", 128, 3, (4.3, 4.6)),
        ("efficientnet_lite0", 128, 3, (4.3, 5.0)),
    ):
        torch.manual_seed(0)
        plain = timm.create_model(name, num_classes=10)
        model = convert_model(timm.create_model(name, num_classes=10), "proxgd", iters, pattern="all")
        u = torch.randn(8, 3, size, size)
        show(f"{name}, batch 8, training step", {"plain": step(plain, u), "all": step(model, u)}, repeats, bounds[0])
        works = {"plain": forward(plain.eval(), u), "all": forward(model.eval(), u)}
        show(f"{name}, batch 8, evaluation", works, repeats, bounds[1])


ROWS = {"linear": linear_rows, "pointwise": pointwise_rows, "solvers": solver_rows, "models": model_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, rows in ROWS.items():
        if arguments.only in (None, name):
            rows(arguments.repeats)


if __name__ == "__main__":
    main()
