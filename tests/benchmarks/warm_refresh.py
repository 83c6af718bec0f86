"""What following the step sizes of a whole network costs, against one of its training steps.

    .venv/bin/python -m tests.benchmarks.warm_refresh [--model resnet50] [--batch 32] [--threads 2] [--repeats 3]

The training step is that of the plain network; the refresh is what a training forward of every converted layer does
for its step size (three power steps). Both take turns and the best counts.
"""

import argparse

import timm
import torch
from torch.nn import functional

from solver_plugins import convert_model
from solver_plugins.blocks import blocks_of
from tests.benchmarks.costs import best_times
from tests.coverage.steps import rough_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    plain = timm.create_model(arguments.model).train()
    with rough_steps():
        # Constants are not what is measured here, and certificates take longer than all the rest.
        made = convert_model(timm.create_model(arguments.model), "proxgd", 2, pattern="all").train()
    blocks = list(blocks_of(made).values())
    images = torch.randn(arguments.batch, *plain.pretrained_cfg["input_size"])
    labels = torch.randint(1000, (arguments.batch,))

    def step() -> None:
        functional.cross_entropy(plain(images), labels).backward()
        plain.zero_grad()

    def refresh() -> None:
        for block in blocks:
            block._current_L(block._kernel())

    calls = {"training step": step, "warm refresh": refresh}
    best = best_times(calls, arguments.repeats)
    share = best["warm refresh"] / best["training step"]
    for name, seconds in best.items():
        print(f"{name}: {1e3 * seconds:.0f} ms")
    print(f"{arguments.model}, {len(blocks)} blocks: a warm refresh takes {100 * share:.1f}% of a training step")


if __name__ == "__main__":
    main()
