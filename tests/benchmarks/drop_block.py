"""DropBlock against timm's and torchvision's: time, and the rate that each one drops at.

    .venv/bin/python -m tests.benchmarks.drop_block [--threads 2]

Prints a Markdown table. Times are forward + backward, interleaved, best of several; ratios are theirs over ours in
the same run, so that above one ours is faster. With one thread the time is the processor's, which other programs do not
disturb as much. timm shares a mask among channels, torchvision does not; ours is run as each of them is. Nothing is
asserted: the machine is noisy.
"""

import argparse
import time
from collections.abc import Callable

import torch
from timm.layers import drop_block_2d as timm_drop_block_2d
from torch import Tensor
from torchvision.ops import drop_block2d as torchvision_drop_block_2d

from solver_plugins.dropblock import drop_block_2d

SHAPES = [(32, 64, 56, 56), (64, 256, 14, 14), (64, 512, 7, 7)]
BLOCKS = (3, 7)
RATE = 0.1


def trainer(drop: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Callable[[], None]:
    """Returns a call that runs forward and backward."""
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def call() -> None:
        drop(x).backward(grad)
        x.grad = None

    return call


def best_times(calls: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Returns the best time of each call; the calls take turns, so that a slow moment hits all of them."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            call()  # what the one before left in the caches is not its fault
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def rate(drop: Callable[[Tensor], Tensor], size: tuple[int, ...]) -> float:
    """Returns the share of units that are dropped."""
    return float((drop(torch.ones(4000, 1, *size)) == 0).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), drop rate {RATE}\n")
    print(
        "| map | block | ours shared, ms | timm / ours | ours per channel, ms | torchvision / ours | grid shared, ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for block in BLOCKS:
            options = {"theta": 1 - RATE, "block_size": block, "overlapping": True}
            drops = {
                "shared": lambda x, o=options: drop_block_2d(x, **o, couple_channels=True),
                "timm": lambda x, b=block: timm_drop_block_2d(x, RATE, b),
                "own": lambda x, o=options: drop_block_2d(x, **o),
                "torchvision": lambda x, b=block: torchvision_drop_block_2d(x, RATE, b),
            }
            if shape[-1] % block == 0:
                drops["grid"] = lambda x, b=block: drop_block_2d(x, 1 - RATE, b, couple_channels=True)
            times = best_times({name: trainer(drop, shape) for name, drop in drops.items()}, arguments.repeats, clock)
            grid = f"{1e3 * times['grid']:.2f}" if "grid" in times else "-"
            print(
                f"| {'x'.join(map(str, shape))} | {block} | {1e3 * times['shared']:.2f} "
                f"| {times['timm'] / times['shared']:.2f} | {1e3 * times['own']:.1f} "
                f"| {times['torchvision'] / times['own']:.2f} | {grid} |"
            )
    print(f"\n| size, block | ours drops | timm drops | torchvision drops |  nominal {RATE}\n|---|---|---|---|")
    for size, block in [((7, 7), 7), ((7, 7), 3), ((14, 14), 7), ((56, 56), 7)]:
        found = [
            rate(drop, size)
            for drop in (
                lambda x, b=block: drop_block_2d(x, 1 - RATE, b, overlapping=True),
                lambda x, b=block: timm_drop_block_2d(x, RATE, b),
                lambda x, b=block: torchvision_drop_block_2d(x, RATE, b),
            )
        ]
        print(f"| {size[0]}x{size[1]}, {block} | {' | '.join(f'{value:.3f}' for value in found)} |")


if __name__ == "__main__":
    main()
