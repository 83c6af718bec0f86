"""How long it takes to walk the models of timm: one recorded forward pass, and the blocks found in it.

    .venv/bin/python -m tests.benchmarks.walking [--every 1] [--slowest 10]

Every model as `timm.create_model(name)` makes it, on the meta device, or with undrawn weights where it cannot be made
there. Seconds of the processor, one thread; the first model is walked twice, as imports are not what is measured.
"""

import argparse
import statistics
import time

import torch
from tqdm import tqdm

from solver_plugins.surgery import match, record
from tests.coverage.timm_models import as_it_is, names


def walk(name: str) -> float:
    """Returns the seconds of one model."""
    for weights in (False, True):
        try:
            model = as_it_is(name, weights)
            start = time.process_time()
            match(record(model), model)
            return time.process_time() - start
        except Exception:
            if weights:
                raise
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every n-th model")
    parser.add_argument("--slowest", type=int, default=10, help="how many of the slowest to name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [name for name, _ in names()][:: arguments.every]
    walk(chosen[0])
    seconds = {name: walk(name) for name in tqdm(chosen)}
    print(
        f"{len(seconds)} models: {statistics.mean(seconds.values()):.3f} s on average, median "
        f"{statistics.median(seconds.values()):.3f} s"
    )
    for name in sorted(seconds, key=lambda one: -seconds[one])[: arguments.slowest]:
        print(f"  {name}: {seconds[name]:.2f} s")


if __name__ == "__main__":
    main()
