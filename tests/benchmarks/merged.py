"""What a merged network costs: a ViT-tiny, converted, trained a few steps and merged, beside the plain one.

    python -m tests.benchmarks.merged

Prints the inference time of both in CPU time of one thread; the ratio is 1.00 ± 0.03, as the modules are the same.
"""

import argparse
import statistics
import time

import timm
import torch
from torch import nn

from solver_plugins import convert_model, merge_model, param_groups
from solver_plugins.blocks import blocks_of


@torch.no_grad()
def seconds(model: nn.Module, images: torch.Tensor) -> float:
    """Returns the CPU time of one pass."""
    start = time.process_time()
    model(images)
    return time.process_time() - start


def main() -> None:
    """Converts, trains, merges and compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = timm.create_model(args.model, num_classes=10).eval()
    model = convert_model(
        timm.create_model(args.model, num_classes=10), "proxgd", args.iters, pattern="all", gate="channel"
    )
    blocks, images = len(blocks_of(model)), torch.randn(args.batch, 3, args.size, args.size)
    optimizer = torch.optim.AdamW(param_groups(model, 1e-3))
    for _ in range(3):
        nn.functional.cross_entropy(model(images), torch.arange(args.batch) % 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        before = model.eval()(images)
        merge_model(model)
        apart = float((model(images) - before).norm() / before.norm())
    # In turns, so that a slow moment of the machine hits both.
    pairs = [(seconds(plain, images), seconds(model, images)) for _ in range(args.rounds)]
    ours, theirs = (min(pair[place] for pair in pairs) for place in (1, 0))
    median = statistics.median(one / other for other, one in pairs)
    print(f"{args.model}: {blocks} blocks merged, outputs {apart:.1e} apart")
    print(f"plain {theirs:.3f} s, merged {ours:.3f} s: {ours / theirs:.3f} (median of pairs {median:.3f})")


if __name__ == "__main__":
    main()
