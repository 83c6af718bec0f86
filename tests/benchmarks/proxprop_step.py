"""One training step with ProxProp against a plain one: time and memory, on the paper's two networks.

    .venv/bin/python -m tests.benchmarks.proxprop_step [--repeats 7] [--batch 500] [--adamw] [--profile]

Prints a Markdown table. Times are whole steps (forward, backward, SGD with momentum or AdamW), interleaved, best of
several, in units of the plain step; the CPU time is that of the process, which other work hardly disturbs. Memory is
the highest sum of live tensors during a step beyond that of the plain step, both without momentum, whose own
temporaries would hide it; in units of the largest layer's activations (its input and output), of which 2 are allowed.
Nothing here is asserted: machines are noisy.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from solver_plugins import ProxProp
from tests.benchmarks.costs import best_times, peak_bytes

BATCH = 500
MODES = ("exact", "cg3", "cg3-joint")


def mlp() -> tuple[nn.Module, Tensor]:
    """Returns the network of section 5.1 and a batch."""
    sizes = (3072, 4000, 1000, 4000)
    layers: list[nn.Module] = []
    for n1, n2 in itertools.pairwise(sizes):
        layers += [nn.Linear(n1, n2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4000, 10)), torch.rand(BATCH, 3072)


def conv_net() -> tuple[nn.Module, Tensor]:
    """Returns the network of section 5.3 and a batch."""
    layers: list[nn.Module] = []
    for n1, n2 in ((3, 16), (16, 20), (20, 20)):
        layers += [nn.Conv2d(n1, n2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(320, 10)), torch.rand(BATCH, 3, 32, 32)


def stepper(
    model: nn.Module, x: Tensor, mode: str | None, momentum: float = 0.95, adamw: bool = False
) -> Callable[[], None]:
    """Returns a call that takes one training step."""
    model = copy.deepcopy(model)
    labels = torch.arange(len(x)) % 10
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if not adamw:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum, nesterov=momentum > 0)
    if mode is not None:
        ProxProp(model, mode, tau_theta=0.05).attach(optimizer)

    def step() -> None:
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def best_cpu_times(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Returns the least CPU time of each call, interleaved."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return best


def largest_activations(model: nn.Module, x: Tensor) -> int:
    """Returns the bytes of input and output of the layer where they are most."""
    sizes: list[int] = []
    handles = [
        layer.register_forward_hook(lambda layer, args, y: sizes.append(4 * (args[0].numel() + y.numel())))
        for layer in model.modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--adamw", action="store_true", help="AdamW in place of SGD with momentum")
    parser.add_argument("--profile", action="store_true", help="also print where the time of a step goes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"| network, batch {arguments.batch} | mode | time, CPU time / plain | memory beyond plain, in activations |")
    print("|---|---|---|---|")
    for title, make in (("MLP 3072-4000-1000-4000-10", mlp), ("conv net", conv_net)):
        torch.manual_seed(0)
        model, x = make()
        x = x[: arguments.batch]
        calls = {str(mode): stepper(model, x, mode, adamw=arguments.adamw) for mode in (None, *MODES)}
        for call in calls.values():
            call()
        times, cpu = best_times(calls, arguments.repeats), best_cpu_times(calls, arguments.repeats)
        peaks = {str(mode): peak_bytes(stepper(model, x, mode, momentum=0.0)) for mode in (None, *MODES)}
        unit = largest_activations(model, x)
        for mode in MODES:
            extra = (peaks[mode] - peaks["None"]) / unit
            ratios = ", ".join(f"{one[mode] / one['None']:.2f}" for one in (times, cpu))
            print(f"| {title} | `{mode}` | {ratios} | {extra:.2f} |", flush=True)
        if arguments.profile:
            for name, call in calls.items():
                with profile(activities=[ProfilerActivity.CPU]) as records:
                    call()
                print(f"\n{title}, {name}: {times[name]:.3f} s")
                print(records.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


if __name__ == "__main__":
    main()
