"""Gradients of an equilibrium, unrolled and implicit: error, time and memory by the number of iterations K."""

import copy
import math
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import EQUILIBRIUM_SOLVERS, DeepOptEq, OptEqLayer
from solver_plugins.errors import NotConvergedWarning
from solver_plugins.studies.figures import draw_by, label, legend, new_figure
from solver_plugins.studies.opteq_alpha import REFERENCE
from solver_plugins.studies.study import Cell, Context, Results, Study, StudyConfig, Table, mean, register_study

MODES = {
    "unrolled, plain": {"solver": "fixed_point", "gradient": "unrolled"},
    "unrolled, Anderson": {"solver": "anderson", "gradient": "unrolled"},
    "implicit, plain": {"solver": "fixed_point", "gradient": "implicit"},
    "implicit, Anderson": {"solver": "anderson", "gradient": "implicit"},
}
"""Forward solver and gradient; the implicit backward is conjugate gradients for one layer, Anderson for more."""


class DrawnMap(StrictConfig):
    """An equilibrium with random weights."""

    kind: Literal["linear", "conv"] = Field("linear", description="Vectors, or feature maps with 3x3 convolutions.")
    layers: int = Field(1, ge=1, description="Layers of the equilibrium.")
    width: int = Field(512, ge=1, description="Features, or channels, of state, input and hidden features.")
    size: int = Field(16, ge=1, description="Height and width of feature maps.")
    batch: int = Field(128, ge=1, description="Samples.")

    @property
    def name(self) -> str:
        size = "" if self.kind == "linear" else f"x{self.size}x{self.size}"
        return f"{self.kind} {self.width}{size}, L = {self.layers}"

    def inputs(self) -> Tensor:
        shape = (self.width,) if self.kind == "linear" else (self.width, self.size, self.size)
        return torch.randn(self.batch, *shape)


class GradConfig(StudyConfig):
    """Settings of the comparison."""

    maps: list[DrawnMap] = Field([DrawnMap(), DrawnMap(layers=3)], min_length=1, description="The equilibria.")
    alpha: float = Field(0.8, gt=0, le=1, description="Step of the layers.")
    norm: float = Field(0.9, gt=0, lt=1, description="The certified bound on |W| of Gaussian weights.")
    iterations: list[int] = Field([1, 2, 5, 10, 20, 50], min_length=1, description="K, the most evaluations.")
    tol: float = Field(1e-6, gt=0, description="Relative residual at which an implicit solve stops before K.")
    repeats: int = Field(3, ge=1, description="Turns; the least time of each mode is taken.")

    @pydantic.model_validator(mode="after")
    def _counts(self) -> Self:
        if min(self.iterations) < 1 or len({one.name for one in self.maps}) < len(self.maps):
            raise ValueError("expected iterations of at least 1, and maps that differ in kind, width, size or layers")
        return self


@register_study
class OptEqGrad(Study[GradConfig]):
    """Error, time and memory of unrolled and implicit gradients against the number of iterations."""

    name = "opteq-grad"
    tags = ("opteq", "synthetic")
    reference = f"Discussion 1 and appendix B {REFERENCE}, which have no numbers"
    Config = GradConfig

    def cells(self) -> list[Cell]:
        # One cell measures all modes of a map in turns, so that a slow moment affects all of them.
        return Cell.grid(arm=[one.name for one in self.config.maps], seed=self.config.seeds)

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        config = self.config
        wanted = next(one for one in config.maps if one.name == cell.arm)
        model = self._make(wanted).to(context.device)
        x = wanted.inputs().to(context.device)
        towards = torch.randn_like(x)
        exact = _gradient(_with(model.double(), "anderson", "implicit", 2000, 1e-13), x.double(), towards.double())
        model = model.float()
        calls: dict[tuple[str, int], Callable[[], Tensor]] = {}
        for mode, options in MODES.items():
            for k in config.iterations:
                made = _with(model, options["solver"], options["gradient"], k, config.tol)
                calls[mode, k] = lambda made=made: _gradient(made, x, towards)  # type: ignore[misc]
        seconds = dict.fromkeys(calls, math.inf)
        errors, peaks = {}, {}
        with warnings.catch_warnings():
            # Solves with few iterations are the point of this study.
            warnings.simplefilter("ignore", NotConvergedWarning)
            for turn in context.steps(config.repeats + 1):
                for key, call in calls.items():
                    if turn == 0:
                        errors[key] = float((call().double() - exact).norm() / exact.norm())
                        peaks[key] = _peak_bytes(call)
                    else:
                        seconds[key] = min(seconds[key], _seconds(call, context.device))
        return {
            "curves": {
                mode: {
                    "error": [errors[mode, k] for k in config.iterations],
                    "seconds": [seconds[mode, k] for k in config.iterations],
                    "megabytes": [peaks[mode, k] / 1e6 for k in config.iterations],
                }
                for mode in MODES
            }
        }

    def _make(self, wanted: DrawnMap) -> DeepOptEq:
        make = OptEqLayer.linear if wanted.kind == "linear" else OptEqLayer.conv2d
        layers = [
            make(wanted.width, wanted.width, constraint="none", norm=self.config.norm) for _ in range(wanted.layers)
        ]
        for layer in layers:
            # The initial weights are orthogonal, for which one layer converges unusually fast.
            torch.nn.init.normal_(layer.W.weight)
            layer.project()
        return DeepOptEq(layers, self.config.alpha)

    def _mean(self, results: Results, name: str, mode: str, key: str) -> list[float]:
        found = [one[mode][key] for one in results.of(arm=name).each("curves")]
        return [float(mean(list(values)) or 0.0) for values in zip(*found, strict=True)]

    def tables(self, results: Results) -> list[Table]:
        config = self.config
        forms = (("error", "relative error of the gradient", ".0e"), ("seconds", "CPU ms", ".1f"),
                 ("megabytes", "peak MB", ".1f"))  # fmt: skip
        tables = []
        for one in config.maps:
            rows = []
            for key, text, form in forms:
                scale = 1000 if key == "seconds" else 1
                for mode in MODES:
                    values = self._mean(results, one.name, mode, key)
                    rows.append((f"{text}: {mode}", *(f"{scale * value:{form}}" for value in values)))
            tables.append(
                Table(
                    f"{one.name}: one forward and backward, batch of {one.batch}",
                    ("K", *(str(k) for k in config.iterations)),
                    rows,
                    f"|W| <= {config.norm:g}, Gaussian weights, alpha {config.alpha:g}, float32, mean over seeds "
                    f"{config.seeds}. Error: of the gradients of all weights and the input, against float64 at 1e-13. "
                    f"Implicit solves stop at {config.tol:g}, forward and backward; at most K steps each, "
                    f"and no fallback. Time: the least of {config.repeats} turns that alternate. Memory: "
                    "tensors, beyond those that were there before.",
                )
            )
        return tables

    def summary(self, results: Results) -> dict[str, Any]:
        return {
            f"{one.name}, {mode}, K = {k}: {key}": value
            for one in self.config.maps
            for mode in MODES
            for key in ("error", "seconds", "megabytes")
            for k, value in zip(self.config.iterations, self._mean(results, one.name, mode, key), strict=True)
        }

    def draw(self, results: Results) -> Any:
        config = self.config
        figure, axes = new_figure(len(config.maps), 3, width=3.6)
        wanted = (("error", "relative error of the gradient"), ("seconds", "CPU seconds"), ("megabytes", "peak MB"))
        for one, panels in zip(config.maps, axes, strict=True):
            for panel, (key, text) in zip(panels, wanted, strict=True):
                found = {mode: [[value] for value in self._mean(results, one.name, mode, key)] for mode in MODES}
                draw_by(panel, config.iterations, found, "iterations K", text, log="y")
            label(panels[1], title=one.name)
        legend(axes[0][2], outside=True)
        return figure


def _with(model: DeepOptEq, solver: str, gradient: str, iters: int, tol: float) -> DeepOptEq:
    """Returns a copy of the model with another solver."""
    made = copy.deepcopy(model)
    made.solver = EQUILIBRIUM_SOLVERS.get(solver).from_options(
        # No tolerance: this study measures the error.
        iters=iters, tol=tol, gradient=gradient, implicit_iters=iters, implicit_tol=1e9
    )  # fmt: skip
    return made


def _gradient(model: DeepOptEq, x: Tensor, towards: Tensor) -> Tensor:
    """Returns the gradient of ``towards . z + |z|^2 / 2`` by all weights and the input, as one vector."""
    x = x.clone().requires_grad_()
    z = model(x)
    loss = (towards * z).sum() + z.square().sum() / 2
    found = torch.autograd.grad(loss, [*model.parameters(), x])
    return torch.cat([one.flatten() for one in found])


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """Returns the CPU seconds of a call, or its wall time on a GPU."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _peak_bytes(call: Callable[[], Tensor]) -> int:
    with _Held() as held:
        call()
    return held.peak


class _Held(TorchDispatchMode):
    """Counts the bytes of tensors that were created inside it and are still alive.

    The profiler finds the same numbers, up to the workspace of convolutions, but writes to the terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                # Views and results of in-place operations are not new.
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self.held += storage.nbytes()
                    self.peak = max(self.peak, self.held)
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return made

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size
