"""The table of ``solver-plugins bench`` with torchdeq beside it: its fixed-point iteration of the same map.

python -m tests.benchmarks.solver_blocks --threads 2 --repeats 7
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchdeq import get_deq

from solver_plugins.cli.measure import CASES, LAM, Call, Case, constant_of, measure, table, variants
from solver_plugins.operators import operator_for


def with_torchdeq(case: Case, layer: nn.Module, shape: torch.Size, iterations: int) -> dict[str, Call]:
    """Adds ``v <- relu(v) - H relu(v) + c`` by torchdeq, with its implicit gradient of as many steps."""
    constant = constant_of(layer)
    deq = get_deq(
        f_solver="fixed_point_iter", b_solver="fixed_point_iter", f_max_iter=iterations - 1, b_max_iter=iterations - 1,
        f_tol=0.0, b_tol=0.0, ift=True, no_stat=True,
    )  # fmt: skip

    def solve(u: Tensor) -> Tensor:
        A, c = operator_for(layer, shape), layer(u)

        def image(v: Tensor) -> Tensor:
            x = functional.relu(v)
            return x - (A.apply(A.adjoint(x)) + LAM * x) / constant + c

        return deq(image, c)[0][-1]

    calls = variants(case, layer, shape, iterations)
    return {"plain": calls.pop("plain"), "loop": calls.pop("loop"), "torchdeq": solve, **calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--filter", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    cases = [case for case in CASES if arguments.filter in case.title]
    print(table(measure(cases, with_torchdeq, iterations=arguments.iters, repeats=arguments.repeats, clock=clock)))


if __name__ == "__main__":
    main()
