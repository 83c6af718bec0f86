"""Times and memory of solver blocks, compared with the plain layer and the obvious loop in one run.

Calls take turns and the best time of each counts, so that a slow moment of the machine hits all of them alike. Look at
the ratios; no test asserts them.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from tqdm.auto import tqdm

from solver_plugins.blocks import SolverBlock, cache_gram
from solver_plugins.errors import OptionError
from solver_plugins.operators import operator_for
from solver_plugins.solve.paths import SolveSize, choose_path, multiply_adds
from tests.benchmarks.costs import best_times

Call = Callable[[Tensor], Tensor]
LAM = 1e-3


@dataclass(frozen=True)
class Case:
    """A layer and a batch.

    Attributes:
        title: Its name in tables.
        inputs: ``n1``.
        outputs: ``n2``.
        batch: How many samples.
        kernel: The size of a convolution's kernel; 0 for a linear layer.
        size: The side of a convolution's input.
    """

    title: str
    inputs: int
    outputs: int
    batch: int
    kernel: int = 0
    size: int = 0

    def layer(self) -> nn.Module:
        """Returns the plain layer."""
        if self.kernel:
            return nn.Conv2d(self.inputs, self.outputs, self.kernel, padding=self.kernel // 2)
        return nn.Linear(self.inputs, self.outputs)

    def input(self) -> Tensor:
        """Returns a batch."""
        return torch.randn(self.batch, self.inputs, *(self.size,) * (2 if self.kernel else 0))

    def counted(self, iterations: int) -> float:
        """Returns forward and backward of the cheapest path in units of the plain layer, by multiply-adds."""
        size = SolveSize(self.inputs, self.outputs, self.batch, iterations, is_matrix=not self.kernel)
        path = choose_path(size)
        plain = self.batch * self.inputs * self.outputs
        iterated = multiply_adds(path, size)
        # The backward pass takes twice as long as the forward pass, except for the Gram matrix, one product in each.
        once = self.inputs * self.outputs**2 if path == "gram" else 0
        return 1 + (3 * (iterated - once) + 2 * once) / (3 * plain)


CASES = (
    Case("400 → 120 (LeNet)", 400, 120, 256),
    Case("4096 → 512", 4096, 512, 128),
    Case("3072 → 768 (ViT fc2)", 3072, 768, 1576),
    Case("512 → 512 (VGG16, CIFAR)", 512, 512, 128),
    Case("4096 → 4096 (VGG16)", 4096, 4096, 128),
    Case("768 → 3072 (ViT fc1)", 768, 3072, 1576),
)
CONVOLUTIONS = (
    Case("conv 64 → 64, 3x3, 32x32", 64, 64, 64, kernel=3, size=32),
    Case("conv 3 → 64, 5x5, 32x32", 3, 64, 64, kernel=5, size=32),
)
SWEEP = tuple(
    Case(f"{n1} → {n2}, {batch}", n1, n2, batch)
    for n1 in (64, 400, 1024, 2048)
    for n2 in (10, 120, 512, 1024)
    for batch in (32, 256)
)


@dataclass(frozen=True)
class Row:
    """What one way of computing a block costs.

    Attributes:
        case: The case's title.
        batch: Its batch.
        iterations: Proximal steps.
        variant: Which way.
        forward: Seconds of a forward pass without gradients, the best of all.
        both: Seconds of forward and backward.
        kept: Bytes that the forward pass keeps for the backward one, beyond weights and input.
        counted: Forward and backward of the cheapest exact path over the plain layer, by multiply-adds.
        output_bytes: The size of the layer's output.
    """

    case: str
    batch: int
    iterations: int
    variant: str
    forward: float
    both: float
    kept: int
    counted: float
    output_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return asdict(self)


def naive_loop(layer: nn.Module, shape: torch.Size, iterations: int) -> Call:
    """Returns the iteration as one would write it: two products a step, differentiated by autograd."""
    constant = constant_of(layer)

    def solve(u: Tensor) -> Tensor:
        A = operator_for(layer, shape)
        c = v = layer(u)
        for _ in range(iterations - 1):
            x = functional.relu(v)
            v = x - (A.apply(A.adjoint(x)) + LAM * x) / constant + c
        return v

    return solve


def naive_masked_loop(layer: nn.Module, shape: torch.Size, iterations: int, p: float) -> Call:
    """Returns the same for a sampled solve: three products a step, and masks by sorting random numbers."""
    constant = constant_of(layer)
    bias: Tensor = layer.bias  # type: ignore[assignment]

    def solve(u: Tensor) -> Tensor:
        A = operator_for(layer, shape)
        n1, b, v = A.in_features, A.per_feature(bias), None
        tau = round((1 - p) * n1)
        for k in range(iterations):
            keys = torch.rand(*u.shape[: -len(A.problem_dims)], n1)
            chosen = keys.topk(tau, sorted=False).indices
            mask = A.per_feature(torch.zeros_like(keys).scatter(-1, chosen, n1 / tau))
            linear = A.apply(mask * u) + b
            if v is None:
                v = linear
                continue
            x = functional.relu(v)
            v = x - 0.9**k * ((A.apply(mask * A.adjoint(x)) + LAM * x) / constant - linear)
        assert v is not None
        return v

    return solve


def constant_of(layer: nn.Module) -> float:
    """Returns a bound on ``lambda_max(A A^T) + lam``; for timing any bound does that keeps iterates finite."""
    weight: Any = layer.weight
    with torch.no_grad():
        return float(torch.linalg.matrix_norm(weight.flatten(1), 2)) ** 2 * math.prod(weight.shape[2:]) + LAM


def variants(
    case: Case, layer: nn.Module, shape: torch.Size, iterations: int, compiled: bool = False
) -> dict[str, Call]:
    """Returns every way of computing a deterministic block, by name."""

    def block(**options: Any) -> SolverBlock:
        return SolverBlock.from_layer(layer, nn.ReLU(), "proxgd", iterations, **options)

    calls: dict[str, Call] = {
        "plain": layer,
        "loop": naive_loop(layer, shape, iterations),
        "two_step": block(path="two_step"),
        "auto": block(),
        "low memory": block(memory="low"),
        "implicit": block(gradient="implicit", implicit_tol=1e6, implicit_iters=iterations),
    }
    if not case.kernel:
        calls["gram"] = block(path="gram")
        calls["fista"] = SolverBlock.from_layer(layer, nn.ReLU(), "fista", iterations)
    if compiled:
        calls["loop, compiled"] = torch.compile(naive_loop(layer, shape, iterations))
        calls["auto, compiled"] = torch.compile(block())
    return calls


def sampled_variants(case: Case, layer: nn.Module, shape: torch.Size, iterations: int) -> dict[str, Call]:
    """Returns every way of computing a ``proxsg`` block with p = 0.5, by name."""

    def block(**options: Any) -> SolverBlock:
        return SolverBlock.from_layer(layer, nn.ReLU(), "proxsg", iterations, p=0.5, **options)

    def dropout(u: Tensor) -> Tensor:
        return layer(functional.dropout(u, 0.5))

    calls: dict[str, Call] = {
        "dropout": dropout,
        "masked loop": naive_masked_loop(layer, shape, iterations, 0.5),
        "masked": block(path="masked"),
        "shared, masked": block(path="masked", per_sample=False),
    }
    if not case.kernel:
        calls["shared, columns"] = block(path="columns", per_sample=False)
    return calls


def two_variants(case: Case, layer: nn.Module, shape: torch.Size, iterations: int) -> dict[str, Call]:
    """Returns the plain layer, the loop, and what a user gets."""
    made = variants(case, layer, shape, iterations)
    return {name: made[name] for name in ("plain", "loop", "auto")}


def measure(
    cases: Iterable[Case],
    make: Callable[[Case, nn.Module, torch.Size, int], dict[str, Call]],
    *,
    iterations: int = 10,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
    only: Sequence[str] | None = None,
) -> list[Row]:
    """Measures all variants of all cases.

    Args:
        cases: The layers.
        make: Returns the variants of one; the first one is the plain layer.
        iterations: Proximal steps.
        repeats: How many rounds, of which the best counts.
        clock: Seconds, of the wall or of the processor.
        only: Variants to measure beside the plain layer and the loop, the first two; None measures all.

    Raises:
        OptionError: If a layer has none of them.
    """
    rows = []
    for case in tqdm(list(cases), "layers", leave=False, disable=None):
        torch.manual_seed(0)
        layer, u = case.layer(), case.input()
        calls = make(case, layer, u.shape, iterations)
        if only is not None:
            if not set(only) & set(calls):
                raise OptionError(f"Expected variants among {', '.join(calls)}; found {', '.join(only)}.")
            calls = {name: call for place, (name, call) in enumerate(calls.items()) if place < 2 or name in only}
        u.requires_grad_()
        size = layer(u).nbytes
        forward = best_times({name: _forward(call, u) for name, call in calls.items()}, repeats, clock)
        both = best_times({name: _both(call, u) for name, call in calls.items()}, repeats, clock)
        for name, call in calls.items():
            kept = kept_bytes(call, u, layer)
            seconds = forward[name], both[name]
            rows.append(Row(case.title, case.batch, iterations, name, *seconds, kept, case.counted(iterations), size))
    return rows


def measure_evaluation(
    cases: Iterable[Case],
    *,
    iterations: int = 10,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Measures evaluation with a cached Gram matrix against the naive loop."""
    rows = []
    for case in cases:
        torch.manual_seed(0)
        layer, u = case.layer(), case.input()
        block = SolverBlock.from_layer(layer, nn.ReLU(), "proxgd", iterations).eval()
        cache_gram(block)
        calls: dict[str, Call] = {"plain": layer, "loop": naive_loop(layer, u.shape, iterations), "cached gram": block}
        times = best_times({name: _forward(call, u) for name, call in calls.items()}, repeats, clock)
        rows += [
            Row(case.title, case.batch, iterations, name, seconds, math.nan, 0, case.counted(iterations), 1)
            for name, seconds in times.items()
        ]
    return rows


def _forward(call: Call, u: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            functional.relu(call(u))

    return run


def _both(call: Call, u: Tensor) -> Callable[[], None]:
    def run() -> None:
        # Not the sum: its gradient is an expanded one, which has a price of its own.
        out = functional.relu(call(u))
        out.backward(out.detach())
        u.grad = None

    return run


def kept_bytes(call: Call, u: Tensor, layer: nn.Module) -> int:
    """Returns how many bytes a forward pass keeps for its backward pass, beyond weights and input."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        call(u)
    own = {one.untyped_storage()._cdata for one in (u, *layer.parameters())}
    return sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)


def table(rows: list[Row]) -> str:
    """Returns a Markdown table: all times in units of the plain layer, the first variant of each layer."""
    lines = [
        "| layer, batch | iters | variant | forward | forward + backward | loop / this | counted | kept, in outputs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.iterations), []).append(row)
    for (case, iterations), members in groups.items():
        plain = members[0]
        loop = next((row for row in members if "loop" in row.variant), plain)
        for row in members:
            both = "" if math.isnan(row.both) else f"{row.both / plain.both:.2f}"
            faster = loop.forward / row.forward if math.isnan(row.both) else loop.both / row.both
            lines.append(
                f"| {case}, {row.batch} | {iterations} | {row.variant} | {row.forward / plain.forward:.2f} | {both} | "
                f"{faster:.2f} | {row.counted:.2f} | {row.kept / row.output_bytes:.1f} |"
            )
    return "\n".join(lines)
