"""The dry run: what a conversion would do to a model, block by block, as a table and as data."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks.fold import reference_diagonal
from solver_plugins.operators import kernel_of, lipschitz_constant, operator_for
from solver_plugins.solve import SamplingSolver, Solver, working_dtype
from solver_plugins.solve.paths import gram_from, path_for, solve_size
from solver_plugins.surgery.convert import Plan, plan_conversion
from solver_plugins.surgery.cost import cost_of, plain_flops
from solver_plugins.surgery.errors import naming
from solver_plugins.surgery.inputs import BATCH, read_inputs
from solver_plugins.surgery.parts import Block
from solver_plugins.surgery.printing import (
    ROOMY,
    Printable,
    amount,
    common_name,
    number,
    plain_table,
    sentence,
    size,
    spread,
    without_numbers,
)
from solver_plugins.surgery.select import Chosen

if TYPE_CHECKING:
    from rich.console import RenderableType

CHANGES_SCALE = "changes the network's scale: use calibrate(model, batches) or blend="
"""What is said of norm and skip patterns, whose every further iteration makes the activations larger."""
SCALE_PATTERNS = ("linear-norm-act", "linear-norm-skip-act", "linear-skip-act")
MANY_ROWS = 40
"""From so many blocks on, layers that repeat share a line."""


@dataclass(frozen=True)
class Row:
    """One layer of the report.

    Attributes:
        name: The layer's name.
        layer: Its class.
        pattern: The pattern that it is part of.
        converted: Whether a conversion would take it.
        reason: Why not, or what else is worth knowing.
        input_shape: Of the recorded pass.
        output_shape: Of the recorded pass.
        activation: What follows it.
        prior: The prior whose proximal map that is.
        host: Where the solver's result comes out: the layer, its norm, or its activation.
        p: The rate that a sampling solver samples at.
        tau: How many features that is.
        L: The certified ``lambda_max(A A^T)`` that the block will have, a folded norm's running statistics included;
            None where it was not asked for.
        step: The step of its first iteration, ``1/(L + lam)`` or what the solver's rule makes of it.
        cost: Floating point operations of the solve in units of the plain layer.
        plain_flops: Those of the plain layer in one forward pass, per sample: two for each multiply-add.
        flops: Those of the block in training; see :class:`~solver_plugins.surgery.cost.Cost`.
        memory: Bytes per sample that training keeps for this block beyond the plain layer.
        path: How its iterates are computed in training, for a batch like the recorded one; see
            :mod:`solver_plugins.solve.paths`.
        gram_from: From how many samples in a batch on that is "gram"; None where it never is, or where it is forced.
    """

    name: str
    layer: str
    pattern: str
    converted: bool
    reason: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    activation: str | None = None
    prior: str | None = None
    host: str | None = None
    p: float | None = None
    tau: int | None = None
    L: float | None = None
    step: float | None = None
    cost: float | None = None
    plain_flops: int | None = None
    flops: int | None = None
    memory: int | None = None
    path: str | None = None
    gram_from: int | None = None


@dataclass(frozen=True, repr=False)
class Report(Printable):
    """What :func:`inspect_model` found; ``print`` it, or take ``to_dict()``.

    Attributes:
        model: The model's class.
        solver: The solver's registered name.
        options: Its options.
        rows: One per linear layer, in the order of the model.
        warnings: What to know before converting.
    """

    model: str
    solver: str
    options: dict[str, Any]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    @property
    def converted(self) -> list[Row]:
        """The rows of layers that would be converted."""
        return [row for row in self.rows if row.converted]

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the model: layers, patterns, operations of all linear layers before and after, memory.

        Layers whose operations are not known (weights outside of layers, transposed convolutions) are left out of both
        sums, and so is everything that is no linear layer, such as attention.
        """
        plain = sum(row.plain_flops or 0 for row in self.rows)
        extra = sum((row.flops or 0) - (row.plain_flops or 0) for row in self.converted)
        return {
            "layers": len(self.rows),
            "converted": len(self.converted),
            "patterns": dict(Counter(row.pattern for row in self.converted)),
            "plain_flops": plain,
            "flops": plain + extra,
            "memory": sum(row.memory or 0 for row in self.converted),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, with totals."""
        return {
            "model": self.model,
            "solver": self.solver,
            "options": self.options,
            "blocks": [asdict(row) for row in self.rows],
            "totals": self.totals,
            "warnings": list(self.warnings),
        }

    def headline(self) -> str:
        """Returns the report in one line."""
        return (
            f"{self.model}: {len(self.converted)} of {len(self.rows)} layers become {self.solver}, "
            f"iters={self.options['iters']}"
        )

    def parts(self, width: int) -> "list[RenderableType]":
        """Returns headline, table of the blocks, totals, warnings, and what is left alone for which reason."""
        shown: list[RenderableType] = [sentence(self.headline(), "bold"), sentence("")]
        if self.converted:
            shown += [_table(self.converted, width), sentence(""), sentence(self._total_line())]
        shown += [sentence(f"Warning: {text}", "yellow") for text in self.warnings]
        left: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if not row.converted:
                left.setdefault((row.pattern, row.reason), []).append(row.name)
        if left:
            shown.append(sentence("Left alone:"))
        for (pattern, reason), names in left.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            shown.append(sentence(f"{names[0]}{more} ({pattern}): {reason}", "dim", indent=2))
        return shown

    def _total_line(self) -> str:
        totals = self.totals
        patterns = ", ".join(f"{count} {pattern}" for pattern, count in totals["patterns"].items())
        ratio = f" ({totals['flops'] / totals['plain_flops']:.3g}x)" if totals["plain_flops"] else ""
        return (
            f"Blocks: {patterns}. Per sample, all linear layers: {amount(totals['plain_flops'])} -> "
            f"{amount(totals['flops'])} FLOPs forward{ratio}; training keeps {amount(totals['memory'], 'B')} more."
        )


def inspect_model(
    model: nn.Module,
    solver: str = "proxsg",
    iters: int = 10,
    *,
    lipschitz: bool = True,
    progress: bool = False,
    **keywords: Any,
) -> Report:
    """Says what :func:`convert_model` would do, and leaves the model alone.

    Args:
        model: The model.
        solver: A registered solver.
        iters: How many proximal steps.
        lipschitz: Whether to compute the certified constants, which takes a while for large layers.
        progress: Whether to show a progress bar on a terminal.
        **keywords: The other arguments of :func:`convert_model`; errors are the same, but for a model in which nothing
            would be converted: that is reported.
    """
    plan = plan_conversion(model, solver, iters, **keywords)
    chosen = {one.block.name: one for one in plan.selection.chosen}
    batch = _batch_of(keywords.get("example_inputs"))
    rows = []
    # Without a terminal (disable=None) there is no bar.
    from tqdm.auto import tqdm

    for block in tqdm(plan.blocks, "blocks", leave=False, disable=None if progress else True):
        one = chosen.get(block.name)
        rows.append(_left_row(plan, block, batch) if one is None else _chosen_row(plan, one, lipschitz, batch))
    unbounded = iters > 1 and plan.blend == 1
    scaled = {row.name for row in rows if row.converted and row.pattern in SCALE_PATTERNS and unbounded}
    rows = [_with_note(row, CHANGES_SCALE) if row.name in scaled else row for row in rows]
    warnings = []
    if scaled:
        what = f"{len(scaled)} block{'s' if len(scaled) > 1 else ''} behind a norm or a skip"
        warnings.append(f"{what}, iters={iters}: {CHANGES_SCALE}")
    return Report(type(model).__name__, solver, plan.options, tuple(rows), tuple(warnings))


def _chosen_row(plan: Plan, one: Chosen, lipschitz: bool, batch: int) -> Row:
    block, solver = one.block, plan.solver_for(one)
    assert block.prior is not None
    row = _left_row(plan, block, batch, reason="; ".join(block.notes))
    tau = None
    if isinstance(solver, SamplingSolver):
        shape = block.output_shape if solver.samples == "outputs" else block.input_shape
        tau = solver.tau(shape[_feature_dim(block)])
    with naming(block.name):
        constant, step = _constant_and_step(block, solver) if lipschitz else (None, None)
    cost = cost_of(
        block.module,
        block.input_shape,
        solver,
        block.prior,
        behind=block.host != "linear",
        normed=block.norm is not None,
    )
    calls = max(1, len(block.calls))
    path, from_batch = _path(block, solver, batch)
    made = replace(
        row,
        converted=True,
        host=block.host_name or block.name,
        p=one.p,
        tau=tau,
        L=constant,
        step=step,
        cost=cost.solver / cost.plain,
        plain_flops=cost.plain * calls // batch,
        flops=cost.solver * calls // batch,
        memory=cost.memory * calls // batch,
        path=path,
        gram_from=from_batch,
    )
    if solver.implicit:
        limit = solver.config.implicit_iters
        return _with_note(made, f"its backward takes up to {limit} conjugate-gradient steps of two products each")
    return made


def _path(block: Block, solver: Solver, batch: int) -> tuple[str, int | None]:
    """Returns the path of a block in training, and from how many samples on that is the Gram matrix."""
    with torch.no_grad():
        operator = operator_for(block.module, block.input_shape)
    problems = math.prod(block.input_shape[: -len(operator.problem_dims)])
    sampling = solver.samples != "nothing"
    behind = block.host != "linear"
    size = solve_size(solver, operator, problems, sampling=sampling, prior=block.prior, known=behind)
    least = None if size is None or solver.path != "auto" else gram_from(size)
    # Tokens, and other dimensions in front of the features, are problems of the same sample.
    per_sample = max(1, problems // batch)
    least = None if least is None else -(-least // per_sample)
    return path_for(solver, operator, problems, sampling=sampling, prior=block.prior, known=behind), least


def _constant_and_step(block: Block, solver: Solver) -> tuple[float, float]:
    diagonal = None
    if block.norm is not None:
        diagonal = reference_diagonal(block.norm.module, working_dtype(kernel_of(block.module).dtype))
    constant = lipschitz_constant(block.module, diagonal=diagonal)
    operator = operator_for(block.module, block.input_shape, diagonal=diagonal)
    return float(constant), 1 / float(solver.smoothness(operator, constant))


def _left_row(plan: Plan, block: Block, batch: int, reason: str | None = None) -> Row:
    operations = plain_flops(block.module, block.output_shape, _feature_dim(block))
    return Row(
        block.name,
        type(block.module).__name__,
        block.pattern,
        False,
        plan.selection.rejected[block.name] if reason is None else reason,
        block.input_shape,
        block.output_shape,
        None if block.activation is None else block.activation.label,
        None if block.prior is None else block.prior.name,
        plain_flops=None if operations is None else operations * max(1, len(block.calls)) // batch,
    )


def _with_note(row: Row, note: str) -> Row:
    return replace(row, reason=f"{row.reason}; {note}" if row.reason else note)


def _batch_of(example_inputs: Any) -> int:
    """Returns how many samples the recorded pass had."""
    if example_inputs is None:
        return BATCH
    given = read_inputs(example_inputs)
    tensors = (value for value in (*given.args, *given.kwargs.values()) if isinstance(value, Tensor) and value.dim())
    return max(1, next((tensor.shape[0] for tensor in tensors), 1))


def _feature_dim(block: Block) -> int:
    """Returns the dimension of the features: the last one, or the channels of a batch of images."""
    return 1 if isinstance(block.module, nn.modules.conv._ConvNd) and len(block.output_shape) > 1 else -1


def _table(rows: list[Row], width: int) -> "RenderableType":
    roomy = width >= ROOMY
    sampled = any(row.tau is not None for row in rows)
    headings = ["layer", "pattern", *(["shape"] if roomy else []), *(["p, tau"] if sampled else []), "prior", "path"]
    certified = any(row.L is not None for row in rows)
    figures = [*(["L", "step"] if certified else []), "FLOPs", "cost"]
    table = plain_table([*headings, *figures], figures)
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        alike = (without_numbers(row.name), row.pattern, row.input_shape, row.output_shape, row.prior, row.p, row.tau)
        groups.setdefault(alike if len(rows) > MANY_ROWS else row.name, []).append(row)
    for first, *others in groups.values():
        members = [first, *others]
        name = f"{common_name([row.name for row in members])} ({len(members)} layers)" if others else first.name
        cells = [name, first.pattern]
        if roomy:
            cells.append(f"{size(first.input_shape)} → {size(first.output_shape)}")
        if sampled:
            cells.append(
                ""
                if first.tau is None
                else f"{number(first.p)}, {first.tau}"
                if first.p is not None
                else f"{first.tau}"
            )
        cells += [first.prior or "", first.path or ""]
        if certified:
            cells += [spread(row.L for row in members), spread(row.step for row in members)]
        cells += [amount(sum(row.flops or 0 for row in members)), f"{number(first.cost)}x"]
        table.add_row(*cells)
    return table
