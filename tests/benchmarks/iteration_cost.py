"""What one more iteration adds to a training step, counted without computing anything.

    .venv/bin/python -m tests.benchmarks.iteration_cost [--batch 32]

The table of docs/performance.md: multiply-adds in units of the plain model's linear layers, and bytes kept for the
backward pass, both the slope between two and ten iterations. No times: the counts are the same on every machine.
"""

import argparse

import timm
import torch
from torch import nn

from solver_plugins import inspect_model

ROWS: tuple[tuple[str, str, dict, dict], ...] = (
    ("resnet50", "proxgd", {"pattern": "all"}, {}),
    ("resnet50", "proxgd", {"pattern": "all", "targets": r"layer4\..*"}, {}),
    ("vgg16", "proxsg", {}, {"drop_rate": 0.5}),
    ("vgg16", "proxgd", {}, {}),
    ("vit_base_patch16_224", "proxgd", {"pattern": "all", "targets": r".*\.mlp\.fc[12]"}, {}),
    ("efficientnet_b0", "proxgd", {"pattern": "all"}, {}),
)


def per_iteration(model: nn.Module, solver: str, **keywords) -> tuple[int, float, float]:
    """Returns the number of blocks, and per added iteration the share of operations and the bytes per sample."""
    few, many = (inspect_model(model, solver, iters, lipschitz=False, **keywords) for iters in (2, 10))
    pairs = [(a, b) for a, b in zip(few.rows, many.rows, strict=True) if a.converted]
    plain = sum(row.plain_flops or 0 for row in few.rows)
    flops = sum(b.flops - a.flops for a, b in pairs) / 8
    memory = sum(b.memory - a.memory for a, b in pairs) / 8
    return len(pairs), flops / plain, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    batch = parser.parse_args().batch
    print("| model | solver | blocks | operations | kept per sample |\n|---|---|---:|---:|---:|")
    for name, solver, keywords, arguments in ROWS:
        with torch.device("meta"):
            model = timm.create_model(name, **arguments)
            images = torch.empty(batch, 3, 224, 224)
        found = {}
        for memory in ("full", "low") if solver == "proxgd" else ("full",):
            options = {"memory": memory} if solver == "proxgd" else {}
            blocks, share, kept = per_iteration(model, solver, example_inputs=images, **keywords, **options)
            found[memory] = f"{kept / 2**20:.1f} MiB"
        what = f"`{solver}`" + "".join(f", `{key}={value!r}`" for key, value in keywords.items())
        kept_both = found["full"] + (f" ({found['low']})" if "low" in found else "")
        print(f"| {name} | {what} | {blocks} | +{100 * share:.0f}% | {kept_both} |", flush=True)


if __name__ == "__main__":
    main()
