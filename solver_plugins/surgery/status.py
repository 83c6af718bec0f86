"""The state of a converted model's blocks: their steps and, with a batch, how well they solve."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks import SolverBlock, blocks_of
from solver_plugins.errors import OptionError, some
from solver_plugins.operators import operator_from_kernel
from solver_plugins.solve import SamplingSolver
from solver_plugins.surgery.errors import ConversionError, changes_scale
from solver_plugins.surgery.printing import ROOMY, Printable, number, plain_table, rate, sentence
from solver_plugins.surgery.untouched import left_as_it_was
from solver_plugins.surgery.watch import Seen, watch_pass

if TYPE_CHECKING:
    from rich.console import RenderableType

CONVERGED = 1e-3
"""Relative residual at which a solve counts as converged."""
RISE = 1e-4
"""How much an objective may rise by rounding alone, relative."""
FAR_APART = 1.5
"""A block whose constant in training is off that of evaluation by more than this factor is reported."""
LARGE_SCALE = 3.0
"""A block whose output is larger or smaller by more than this factor is reported."""


@dataclass(frozen=True)
class BlockStatus:
    """One block of a converted model; the fields from ``calls`` on need a batch.

    Attributes:
        outlet: Where the solver's result comes out.
        role: What that is: the "layer", or its "norm", "norm-activation" or "activation".
        p: The rate that it samples at; ``tau`` is how many features that is.
        constant: Where ``L`` comes from: "certified", "followed" by power steps since then, "stale" (the weights have
            moved; the next forward pass updates it), or "unknown" (the weights have no values on this device).
        drift: How far the weights have moved: their constant, by power steps, over that of the last certificate.
        step: Step of the first iteration: ``1/(L + lam)``, or what the solver's rule makes of that.
        blend: Share of the solve in the block's output; ``gain`` and ``gate`` are means (gate 0: the plain layer).
        residual: What the last implicit solve left.
        calls: How often the block solved in the pass. The worst of several solves is reported.
        objective_first: ``F + g`` after the first iteration, mean over the batch; ``objective_last`` after the last.
        last_residual: Relative size of a further step, the largest of the batch.
        scale: Standard deviation of the block's output over that of the plain layers' output.
        verdict: "converged", "descends", "rises", "not finite", "one step", or "not called".
        effective_rate: The dropout rate with the same noise; see :func:`solver_plugins.effective_rate`.
        of_evaluation: The constant of this pass over that of evaluation, for a block with a folded norm. In training
            a BatchNorm has the scales of the batch; far from one, the block computes something else in evaluation.
    """

    name: str
    outlet: str
    role: str
    solver: str
    iters: int
    prior: str
    p: float | None
    tau: int | None
    L: float
    constant: str
    drift: float | None
    step: float | None
    blend: float | None = None
    gain: float | None = None
    gate: float | None = None
    residual: float | None = None
    calls: int | None = None
    objective_first: float | None = None
    objective_last: float | None = None
    last_residual: float | None = None
    scale: float | None = None
    verdict: str | None = None
    effective_rate: float | None = None
    of_evaluation: float | None = None


@dataclass(frozen=True, repr=False)
class SolverReport(Printable):
    """What :func:`solver_report` found, one row per block; ``print`` it, or take ``to_dict()``."""

    model: str
    training: bool
    blocks: tuple[BlockStatus, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with which blocks, and what to do."""
        cases: dict[str, Callable[[BlockStatus], bool]] = {
            "the objective is not finite; look at the weights and inputs": lambda one: one.verdict == "not finite",
            "the objective rises from the first iteration to the last; call refresh_steps(model); a sampling solver "
            "may want a smaller p or another step=": lambda one: one.verdict == "rises",
            f"more than {LARGE_SCALE:g}x off, {changes_scale()}": lambda one: _off(one.scale, LARGE_SCALE),
            f"the batch's own scales give a constant over {FAR_APART:g}x off that of evaluation, where the solver is "
            "then another one; train on, or use larger batches, until running statistics settle": lambda one: _off(
                one.of_evaluation, FAR_APART
            ),
            "not called in this pass": lambda one: one.verdict == "not called",
        }
        found = [([one.name for one in self.blocks if meets(one)], text) for text, meets in cases.items()]
        return tuple(f"{some(names)}: {text}" for names, text in found if names)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "training": self.training,
            "blocks": [asdict(block) for block in self.blocks],
            "totals": {
                "blocks": len(self.blocks),
                "constants": dict(Counter(block.constant for block in self.blocks)),
                "verdicts": dict(Counter(block.verdict for block in self.blocks if block.verdict is not None)),
            },
            "warnings": list(self.warnings),
        }

    def headline(self) -> str:
        kinds = dict.fromkeys(f"{block.solver}, iters={block.iters}" for block in self.blocks)
        count = f"{len(self.blocks)} solver block{'s' if len(self.blocks) > 1 else ''}"
        return f"{self.model}: {count} ({'; '.join(kinds)}), {'training' if self.training else 'evaluation'} mode"

    def parts(self, width: int) -> "list[RenderableType]":
        shown: list[RenderableType] = [sentence(self.headline(), "bold"), sentence("")]
        shown += [_table(self.blocks, width), sentence("")]
        shown += [sentence(f"Warning: {text}", "yellow") for text in self.warnings]
        return shown if self.warnings else shown[:-1]


def _off(ratio: float | None, factor: float) -> bool:
    return ratio is not None and not 1 / factor <= ratio <= factor


def solver_report(model: nn.Module, batch: Any = None) -> SolverReport:
    """Reports how well each block of a converted model solves, without changing the model.

    Args:
        model: A converted model, or a single block; wrapped (DDP, compiled) or not.
        batch: What the model's forward takes: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. With it, one forward pass in the model's present mode records how well every block solves.

    Raises:
        ConversionError: If there is no solver block.
        RecordError: If the batch is of another kind, or the forward pass fails with it.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"Expected a converted model; found {type(model).__name__}.")
    found = blocks_of(model)
    if not found:
        raise ConversionError(
            f"Expected a converted model; found {type(model).__name__} without a solver block. Convert it with "
            "convert_model, or look at it with inspect_model."
        )
    names = {id(module): name for name, module in model.named_modules()}
    # Computing a parametrised weight may change it (spectral norm).
    with torch.no_grad(), left_as_it_was(model):
        rows = [_row(name, block, names) for name, block in found.items()]
    if batch is not None:
        seen = watch_pass(model, batch)
        rows = [_with_solves(row, found[row.name]._reference() is not None, seen[row.name]) for row in rows]
    return SolverReport(type(model).__name__, model.training, tuple(rows))


def _row(name: str, block: SolverBlock, names: dict[int, str]) -> BlockStatus:
    solver, kernel = block.solver, block._kernel().detach()
    inputs, outputs = kernel.shape[1] * block.geometry.groups, kernel.shape[0]
    constant, drift = block.origin()
    tau = None
    if isinstance(solver, SamplingSolver):
        tau = solver.tau(outputs if solver.samples == "outputs" else inputs)
    return BlockStatus(
        name=name,
        outlet=name if block.link is None else names.get(id(block.link.outlet.module), block.link.outlet.name),
        role="layer" if block.link is None else block.link.role,
        solver=solver.name,
        iters=solver.config.iters,
        prior=block.prior.name,
        p=getattr(solver.config, "p", None),
        tau=tau,
        L=float(block.L) if constant != "unknown" else math.nan,
        constant=constant,
        drift=None if drift is None else float(drift),
        step=None if constant == "unknown" else _step(block, kernel),
        blend=_mean(block.blend),
        gain=_mean(block.channel_gain),
        gate=_mean(block.gate),
        residual=float(block.residual) if solver.implicit else None,
    )


def _step(block: SolverBlock, kernel: Tensor) -> float:
    geometry = block.geometry
    pads = () if isinstance(geometry.padding, str) else geometry.padding
    reach = [2 * d * (k - 1) + 2 for d, k in zip(geometry.dilation, kernel.shape[2:], strict=True)]
    # Any size that the padding allows: a step holds for all of them.
    side = max([16, *reach, *(max(pair) + 1 for pair in pads)])
    shape = (kernel.shape[1] * geometry.groups, *[side] * geometry.dims)
    operator = operator_from_kernel(kernel, geometry, shape, diagonal=block._reference())
    return 1 / float(block.solver.smoothness(operator, block.L))


def _with_solves(row: BlockStatus, behind_norm: bool, seen: list[Seen]) -> BlockStatus:
    if not seen:
        return replace(row, calls=0, verdict="not called")
    worst = max(seen, key=lambda one: one.residual if math.isfinite(one.residual) else math.inf)
    return replace(
        row,
        step=1 / worst.smoothness,
        calls=len(seen),
        objective_first=worst.first,
        objective_last=worst.last,
        last_residual=worst.residual,
        scale=worst.scale / worst.plain_scale if worst.plain_scale else None,
        verdict=_verdict(row, worst),
        of_evaluation=worst.smoothness * row.step if row.step and behind_norm else None,
        effective_rate=seen[0].effective_rate,
    )


def _verdict(row: BlockStatus, one: Seen) -> str:
    if not all(math.isfinite(value) for value in (one.first, one.last, one.residual)):
        return "not finite"
    if one.residual <= CONVERGED:
        return "converged"
    if row.iters == 1:
        return "one step"
    return "rises" if one.last - one.first > RISE * max(abs(one.first), abs(one.last)) else "descends"


def _mean(value: Any) -> float | None:
    if value is None:
        return None
    return float(value.detach().float().mean()) if isinstance(value, Tensor) else float(value)


_TEXTS = ("layer", "outlet", "solver", "p, tau", "prior", "constant", "verdict")
"""Columns that hold no numbers."""


def _table(blocks: tuple[BlockStatus, ...], width: int) -> "RenderableType":
    passed, roomy = any(block.calls is not None for block in blocks), width >= ROOMY
    # A narrow table of a pass leaves out what the other columns imply.
    wide = roomy or not passed

    def has(name: str) -> bool:
        return any(getattr(block, name) is not None for block in blocks)

    columns: tuple[tuple[str, bool, Callable[[BlockStatus], str]], ...] = (
        ("layer", True, lambda one: one.name),
        ("outlet", roomy, lambda one: one.role if one.role == "layer" else one.outlet),
        ("solver", len({block.solver for block in blocks}) > 1, lambda one: one.solver),
        ("p, tau", wide and has("tau"), lambda one: rate(one.p, one.tau)),
        ("prior", wide, lambda one: one.prior),
        ("L", True, lambda one: number(one.L)),
        ("step", wide, lambda one: number(one.step)),
        ("constant", wide or any(block.constant != "certified" for block in blocks), lambda one: one.constant),
        ("drift", wide, lambda one: number(one.drift, 4)),
        ("blend", has("blend"), lambda one: number(one.blend)),
        ("gain", has("gain"), lambda one: number(one.gain)),
        ("gate", has("gate"), lambda one: number(one.gate)),
        ("like p", has("effective_rate"), lambda one: number(one.effective_rate)),
        ("implicit residual", has("residual"), lambda one: number(one.residual)),
        ("objective", passed and (roomy or not has("of_evaluation")), lambda one: _objective(one, roomy)),
        ("residual", passed, lambda one: number(one.last_residual, 2)),
        ("L / eval", passed and has("of_evaluation"), lambda one: number(one.of_evaluation, 2)),
        ("scale", passed, lambda one: "" if one.scale is None else f"{number(one.scale)}x"),
        ("verdict", passed, lambda one: one.verdict or ""),
    )
    shown = [(heading, cell) for heading, wanted, cell in columns if wanted]
    headings = [heading for heading, _ in shown]
    table = plain_table(headings, right=set(headings).difference(_TEXTS))
    for block in blocks:
        table.add_row(*(cell(block) for _, cell in shown))
    return table


def _objective(block: BlockStatus, roomy: bool) -> str:
    first, last = block.objective_first, block.objective_last
    if first is None or last is None:
        return ""
    if roomy:
        return f"{number(first)} → {number(last)}"
    change = (last - first) / abs(first) if first else math.nan
    return f"{change:+.2g}" if abs(change) >= 10 else f"{change:+.1%}"
