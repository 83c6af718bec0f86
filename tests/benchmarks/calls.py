"""Counts what a training step of one block calls: Python's functions, and those in C that Python calls.

    python -m tests.benchmarks.calls [SOLVER ...]

Small layers take longer to call than to multiply. Unlike a time, a count is the same on a busy machine.
"""

import argparse
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from solver_plugins import SolverBlock

SOLVERS = ("proxgd", "fista", "proxsg", "ms2gd", "rcd", "anderson")


def counted(solver: str) -> tuple[int, int]:
    """Returns the calls of functions in Python and in C, forward and backward, of 400 -> 120 with a batch of 256."""
    torch.manual_seed(0)
    block = SolverBlock.from_layer(nn.Linear(400, 120), nn.ReLU(), solver, 10)
    u, found = torch.randn(256, 400, requires_grad=True), {"call": 0, "c_call": 0}

    def step() -> None:
        block.zero_grad(set_to_none=True)
        functional.relu(block(u)).sum().backward()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event in found:
            found[event] += 1

    for _ in range(5):
        step()
    sys.setprofile(seen)
    step()
    sys.setprofile(None)
    return found["call"], found["c_call"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("solvers", nargs="*", default=SOLVERS)
    for solver in parser.parse_args().solvers:
        python, native = counted(solver)
        print(f"{solver:10s} {python + native:5d} calls, {python} of them in Python", flush=True)


if __name__ == "__main__":
    main()
