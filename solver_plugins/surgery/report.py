"""The dry run: what a conversion would do to a model, block by block, as a table and as data."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from solver_plugins.blocks.fold import reference_diagonal
from solver_plugins.errors import some
from solver_plugins.operators import kernel_of, lipschitz_constant, operator_for
from solver_plugins.solve import SamplingSolver, Solver, working_dtype
from solver_plugins.solve.paths import gram_from, path_for, solve_size
from solver_plugins.surgery.cost import plain_flops
from solver_plugins.surgery.errors import changes_scale, naming
from solver_plugins.surgery.inputs import read_inputs
from solver_plugins.surgery.named_inputs import BATCH
from solver_plugins.surgery.parts import SCALE_PATTERNS, Block
from solver_plugins.surgery.plan import Plan, plan_conversion
from solver_plugins.surgery.printing import (
    ROOMY,
    Printable,
    amount,
    common_name,
    number,
    plain_table,
    rate,
    sentence,
    size,
    spread,
    without_numbers,
)
from solver_plugins.surgery.select import Chosen, by_default, nothing_by_default
from solver_plugins.surgery.spec import DEFAULTS, ConversionSpec
from solver_plugins.surgery.suggest import Suggestion, block_cost, shown_suggestions, suggestions_for

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = {
    "p, tau": "p, tau: the rate, and how many features it draws.",
    "L": "L: a certified bound on the largest eigenvalue of A A^T, which gives the step size.",
    "FLOPs": "FLOPs: of a forward pass in training, per sample.",
    "cost": "cost: FLOPs over those of the plain layer.",
}
"""What the columns of the table mean."""
_WORDS = {
    True: "step: the size of a first step. prior: its proximal map is the activation. path: how iterates are computed.",
    False: "Below a name: the pattern, the prior (its proximal map is the activation), the path (how iterates are "
    "computed).",
}
"""What the words about a layer mean, where they have columns and where they stand below its name."""
MANY_ROWS = 40
"""With more blocks than this, layers that repeat share a line."""


@dataclass(frozen=True)
class LayerRow:
    """One layer of the report.

    Attributes:
        reason: Why it is not converted, or what else is worth knowing.
        outlet: Where the solver's result comes out: the layer, its norm, or its activation.
        p: The rate that a sampling solver samples at; ``tau`` is how many features that is.
        L: The certified ``lambda_max(A A^T)``, with the running statistics of a folded norm; None if not asked for.
        step: The step of its first iteration: ``1/(L + lam)``, or what the solver's rule makes of that.
        cost: Floating point operations of the solve in units of the plain layer.
        plain_flops: Those of the plain layer in one forward pass, per sample: two for each multiply-add.
        flops: Those of the block in training; see :class:`~solver_plugins.surgery.cost.Cost`.
        memory: Bytes per sample that training keeps for this block beyond the plain layer.
        path: How its iterates are computed in training; see :mod:`solver_plugins.solve.paths`.
        gram_from: The least number of samples in a batch for which the path is "gram"; None if it never is, or if the
            path was chosen by the user.
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
    outlet: str | None = None
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
    """What :func:`inspect_model` found, one row per linear layer; ``print`` it, or take ``to_dict()``."""

    model: str
    spec: ConversionSpec
    rows: tuple[LayerRow, ...]
    warnings: tuple[str, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def solver(self) -> str:
        """The name of the solver."""
        return self.spec.solver

    @property
    def options(self) -> dict[str, Any]:
        """The options of the solver, ``iters`` among them."""
        return {"iters": self.spec.iters, **self.spec.args}

    @property
    def converted(self) -> list[LayerRow]:
        """The rows of the layers that are, or would be, converted."""
        return [row for row in self.rows if row.converted]

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the model: layers, patterns, operations of all linear layers before and after, memory.

        Both sums leave out layers whose operations are not known (weights outside of layers, transposed convolutions)
        and everything that is not a linear layer, such as attention.
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
        return {
            "model": self.model,
            "spec": self.spec.options() if self.spec.storable else None,
            "solver": self.solver,
            "options": self.options,
            "blocks": [asdict(row) for row in self.rows],
            "totals": self.totals,
            "warnings": list(self.warnings),
            "suggestions": [asdict(one) for one in self.suggestions],
        }

    def headline(self) -> str:
        return (
            f"{self.model}: {len(self.converted)} of {len(self.rows)} layers become {self.solver}, "
            f"iters={self.options['iters']}"
        )

    def parts(self, width: int) -> "list[RenderableType]":
        shown: list[RenderableType] = [sentence(self.headline(), "bold"), sentence("")]
        if self.converted:
            shown += [_table(self.converted, width), sentence(""), sentence(self._total_line())]
            shown.append(sentence(_explained(self.converted, width), "dim"))
        shown += [sentence(f"Warning: {text}", "yellow") for text in self.warnings]
        if self.suggestions:
            shown += shown_suggestions(self.suggestions)
        left: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if not row.converted:
                left.setdefault((row.pattern, row.reason), []).append(row.name)
        if left:
            shown += [sentence(""), sentence("Left alone:", "bold")]
        for (pattern, reason), names in left.items():
            shown.append(sentence(f"{some(names, 1)} ({pattern}): {reason}", "dim", indent=2))
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
    solver: str | ConversionSpec = DEFAULTS.solver,
    iters: int = DEFAULTS.iters,
    *,
    example_inputs: Any = None,
    lipschitz: bool = True,
    progress: bool = False,
    suggest: bool = False,
    **options: Any,
) -> Report:
    """Shows what :func:`convert_model` would do, without changing the model.

    Args:
        model: The model.
        solver: A registered solver, or a ready :class:`~solver_plugins.surgery.ConversionSpec`.
        iters: How many proximal steps.
        example_inputs: A tensor, tuple or mapping for the recorded forward pass.
        lipschitz: Whether to compute the certified constants, which takes a while for large layers.
        progress: Whether to show a progress bar on a terminal.
        suggest: Whether to say which layers are worth converting, what they cost, and whether they can be merged.
        **options: The other arguments of :func:`convert_model`. Errors are the same, but a model in which nothing
            would be converted gives a report that says so.
    """
    spec = ConversionSpec.of(
        solver, {"iters": iters, **options}, near=("example_inputs", "lipschitz", "progress", "suggest")
    )
    plan = plan_conversion(model, spec, example_inputs)
    chosen = {one.block.name: one for one in plan.selection.chosen}
    batch = _batch_of(example_inputs)
    rows = []
    # Without a terminal (disable=None) there is no bar.
    from tqdm.auto import tqdm

    for block in tqdm(plan.blocks, "blocks", leave=False, disable=None if progress else True):
        one = chosen.get(block.name)
        rows.append(_left_row(plan, block, batch) if one is None else _chosen_row(plan, one, lipschitz, batch))
    unbounded = spec.iters > 1 and spec.blend == 1 and spec.calibrate is None and spec.gate is None
    scaled = {row.name for row in rows if row.converted and row.pattern in SCALE_PATTERNS and unbounded}
    rows = [_with_note(row, changes_scale()) if row.name in scaled else row for row in rows]
    warnings = [plan.selection.warning] if plan.selection.warning is not None else []
    if not plan.selection.chosen and by_default(spec):
        warnings.append(f"Nothing is converted:{nothing_by_default(plan.blocks, spec, plan.selection.rejected)}")
    if scaled:
        what = f"{len(scaled)} block{'s' if len(scaled) > 1 else ''} behind a norm or a skip"
        warnings.append(f"{what}, iters={spec.iters}: {changes_scale()}")
    found = suggestions_for(plan) if suggest else ()
    return Report(type(model).__name__, spec, tuple(rows), tuple(warnings), found)


def _chosen_row(plan: Plan, one: Chosen, lipschitz: bool, batch: int) -> LayerRow:
    block, solver = one.block, plan.solver_for(one)
    assert block.prior is not None
    part = block.dropout_for(plan.spec.samples)
    taken = () if part is None or part.attribute is None else (f"takes the rate of {part.attribute!r} over",)
    row = _left_row(plan, block, batch, reason="; ".join((*block.notes, *taken)))
    tau = None
    if isinstance(solver, SamplingSolver):
        shape = block.output_shape if solver.samples == "outputs" else block.input_shape
        tau = solver.tau(shape[_feature_dim(block)])
    with naming(block.name):
        constant, step = _constant_and_step(block, solver) if lipschitz else (None, None)
    cost = block_cost(block, solver, plan.spec.gate)
    calls = max(1, len(block.calls))
    path, from_batch = _path(block, solver, batch)
    made = replace(
        row,
        converted=True,
        outlet=block.outlet_name,
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
    """Returns the path of a block in training, and the least batch for which that is the Gram matrix."""
    with torch.no_grad():
        operator = operator_for(block.module, block.input_shape)
    problems = math.prod(block.input_shape[: -len(operator.problem_dims)])
    sampling = solver.samples != "nothing"
    behind = block.outlet != "linear"
    size = solve_size(solver, operator, problems, sampling=sampling, prior=block.prior, known=behind)
    least = None if size is None or solver.path != "auto" else gram_from(size)
    # Tokens, and other dimensions before the features, are problems of the same sample.
    per_sample = max(1, problems // batch)
    least = None if least is None else -(-least // per_sample)
    return path_for(solver, size), least


def _constant_and_step(block: Block, solver: Solver) -> tuple[float, float]:
    diagonal = None
    if block.norm is not None:
        diagonal = reference_diagonal(block.norm.module, working_dtype(kernel_of(block.module).dtype))
    constant = lipschitz_constant(block.module, diagonal=diagonal)
    operator = operator_for(block.module, block.input_shape, diagonal=diagonal)
    return float(constant), 1 / float(solver.smoothness(operator, constant))


def _left_row(plan: Plan, block: Block, batch: int, reason: str | None = None) -> LayerRow:
    operations = plain_flops(block.module, block.output_shape, _feature_dim(block))
    return LayerRow(
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


def _with_note(row: LayerRow, note: str) -> LayerRow:
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


def _table(rows: list[LayerRow], width: int) -> "RenderableType":
    """Returns the table of blocks; in narrow terminals pattern, prior and path stand below the layer's name."""
    roomy = width >= ROOMY
    sampled, certified = any(row.tau is not None for row in rows), any(row.L is not None for row in rows)
    headings = ["layer", *(["pattern", "shape", "prior", "path"] if roomy else []), *(["p, tau"] if sampled else [])]
    figures = [*(["L", "step"] if certified and roomy else ["L"] if certified else []), "FLOPs", "cost"]
    table = plain_table([*headings, *figures], figures)
    groups: dict[Any, list[LayerRow]] = {}
    for row in rows:
        alike = (without_numbers(row.name), row.pattern, row.input_shape, row.output_shape, row.prior, row.p, row.tau)
        groups.setdefault(alike if len(rows) > MANY_ROWS else row.name, []).append(row)
    for first, *others in groups.values():
        members = [first, *others]
        name = f"{common_name([row.name for row in members])} ({len(members)} layers)" if others else first.name
        kind = [
            first.pattern,
            f"{size(first.input_shape)} → {size(first.output_shape)}",
            first.prior or "",
            first.path or "",
        ]
        cells = [name, *kind] if roomy else [f"{name}\n  {', '.join(filter(None, (kind[0], *kind[2:])))}"]
        if sampled:
            cells.append(rate(first.p, first.tau))
        if certified:
            cells += [spread(row.L for row in members), *([spread(row.step for row in members)] if roomy else [])]
        cells += [amount(sum(row.flops or 0 for row in members)), f"{number(first.cost)}x"]
        table.add_row(*cells)
    return table


def _explained(rows: list[LayerRow], width: int) -> str:
    """Returns what the columns of a table mean."""
    without = {"p, tau": all(row.tau is None for row in rows), "L": all(row.L is None for row in rows)}
    return " ".join([*(text for heading, text in COLUMNS.items() if not without.get(heading)), _WORDS[width >= ROOMY]])
