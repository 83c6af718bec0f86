"""Certified constants of all convolutions of a network against Lemma 2 of the paper: an FFT and an SVD per frequency.

    .venv/bin/python -m tests.benchmarks.certificates [--full] [--model resnet50] [--threads 1] [--convert resnet18 ...]

Lemma 2 is taken at the size of each layer's own input (its output for a stride: aliased frequencies share a matrix),
for one of each pair of conjugate frequencies, or with ``--whole-grid`` for both, as the lemma is written. Without
``--full`` layers of equal shape are timed once and counted as often as they occur, and Lemma 2 runs on some of the
frequencies, scaled up. Both calls take turns, best of several, in processor time, which a busy machine disturbs less.
``--convert`` times ``convert_model(model, "proxgd", pattern="all")`` instead. Nothing here is asserted.
"""

import argparse
import time
from collections import Counter

import timm
import torch
from torch import Tensor, nn

from solver_plugins import convert_model
from solver_plugins.operators import geometry_of, lipschitz_constant
from solver_plugins.operators.symbol import polyphase

SOME = 4
"""How many frequencies stand for all of them."""


def lemma_2(layer: nn.Conv2d, size: tuple[int, int], some: int | None, whole: bool) -> tuple[float, float]:
    """Returns the largest squared singular value and the time of all frequencies, of which the SVD's is scaled up."""
    start = time.process_time()
    blocks = polyphase(layer.weight.detach(), geometry_of(layer).reduced_stride(), layer.groups)
    transform = torch.fft.fft2 if whole else torch.fft.rfft2
    symbol = transform(blocks, s=size) if blocks[0, 0, 0].numel() > 1 else blocks
    matrices = symbol.flatten(3).movedim(3, 0)
    transformed = time.process_time()
    chosen = matrices if some is None else matrices[:some]
    top = torch.linalg.svdvals(chosen.contiguous()).amax()
    decomposed = (time.process_time() - transformed) * len(matrices) / len(chosen)
    return float(top.square()), transformed - start + decomposed


def input_sizes(model: nn.Module) -> dict[nn.Conv2d, tuple[int, int]]:
    """Returns every convolution of a model with the size of its output at the model's own input."""
    sizes: dict[nn.Conv2d, tuple[int, int]] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        sizes[layer] = (output.shape[-2], output.shape[-1])

    handles = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *model.pretrained_cfg["input_size"]))  # type: ignore[index, operator]
    for handle in handles:
        handle.remove()
    return sizes


def compare(name: str, full: bool, whole: bool, repeats: int) -> None:
    """Prints a Markdown table of one model."""
    torch.manual_seed(0)
    sizes = input_sizes(timm.create_model(name))
    kinds = {layer: (tuple(layer.weight.shape), layer.stride, layer.groups, size) for layer, size in sizes.items()}
    counts = Counter(kinds.values())
    seen: set[object] = set()
    sums = {"lemma 2": 0.0, "certified": 0.0}
    print("| weight | stride | output | layers | Lemma 2 (ms) | certified (ms) | ratio | certified / Lemma 2 |")
    print("|---" * 8 + "|")
    for layer, size in sizes.items():
        kind = kinds[layer]
        if kind in seen and not full:
            continue
        seen.add(kind)
        count = 1 if full else counts[kind]
        some = None if full else SOME
        times = dict.fromkeys(sums, float("inf"))
        for _ in range(repeats):
            start = time.process_time()
            bound = float(lipschitz_constant(layer))
            middle = time.process_time()
            value, seconds = lemma_2(layer, size, some, whole)
            times["certified"] = min(times["certified"], middle - start)
            times["lemma 2"] = min(times["lemma 2"], seconds)
        for key in sums:
            sums[key] += count * times[key]
        closeness = f"{bound / value:.3f}" if full else ""
        print(
            f"| {'x'.join(map(str, layer.weight.shape))} | {layer.stride[0]} | {size[0]} | {count} | "
            f"{1e3 * times['lemma 2']:.1f} | {1e3 * times['certified']:.1f} | "
            f"{times['lemma 2'] / times['certified']:.1f} | {closeness} |",
            flush=True,
        )
    ratio = sums["lemma 2"] / sums["certified"]
    print(f"\n{name}: Lemma 2 {sums['lemma 2']:.1f} s, certified {sums['certified']:.1f} s, {ratio:.1f} times faster")


def convert(name: str) -> None:
    """Prints the time of a conversion, certificates included."""
    torch.manual_seed(0)
    model = timm.create_model(name)
    start, busy = time.perf_counter(), time.process_time()
    convert_model(model, "proxgd", pattern="all")
    wall, busy = time.perf_counter() - start, time.process_time() - busy
    print(f"{name}: {wall:.1f} s ({busy:.1f} s of processor time, {torch.get_num_threads()} threads)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--full", action="store_true", help="every layer and every frequency; takes minutes")
    parser.add_argument("--whole-grid", action="store_true", help="Lemma 2 at conjugate frequencies, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--convert", nargs="+", metavar="MODEL", help="time conversions of these models instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.convert:
        for name in arguments.convert:
            convert(name)
    else:
        compare(arguments.model, arguments.full, arguments.whole_grid, arguments.repeats)


if __name__ == "__main__":
    main()
