"""An epoch of the paper's LeNet (D-D) with ``proxsg`` blocks against the same network with dropout.

    .venv/bin/python -m tests.benchmarks.lenet_epoch [--images 10000] [--batch 128] [--threads 2] [--repeats 3]

Random images of CIFAR-10's size: no time depends on what they show. Epochs take turns and the best counts.
"""

import argparse
import time

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import solver_plugins.integrations  # noqa: F401 (registers solver_lenet)
from solver_plugins import convert_model


def epoch(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> float:
    """Trains for one epoch and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=5e-4)
    start = time.perf_counter()
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    images, labels = torch.randn(arguments.images, 3, 32, 32), torch.randint(10, (arguments.images,))

    def network() -> nn.Module:
        return timm.create_model("solver_lenet", num_classes=10, dropout="d-d", drop_rate=0.5).train()

    models = {"dropout": network()}
    models["proxsg"] = convert_model(network(), "proxsg", arguments.iters, pattern="strict", step="exp", lam=1e-3)
    models["proxsg, loop"] = convert_model(
        network(), "proxsg", arguments.iters, pattern="strict", step="exp", lam=1e-3, path="loop"
    )
    best = dict.fromkeys(models, float("inf"))
    for turn in range(arguments.repeats + 1):
        for name, model in models.items():
            # The first turn, a short one, warms up.
            count = arguments.images if turn else 4 * arguments.batch
            seconds = epoch(model, images[:count], labels[:count], arguments.batch)
            best[name] = min(best[name], seconds) if turn else best[name]
    print("| epoch | seconds | over dropout |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.2f} | {seconds / best['dropout']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
