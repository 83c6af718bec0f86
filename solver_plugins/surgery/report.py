"""The dry run: what a conversion would do to a model, block by block, as a table and as data."""

import io
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from solver_plugins.operators import lipschitz_constant
from solver_plugins.solvers import SamplingSolver
from solver_plugins.surgery.convert import Plan, plan_conversion
from solver_plugins.surgery.parts import Block
from solver_plugins.surgery.select import Chosen


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
        host: The module that becomes the solver.
        p: The rate that a sampling solver samples at.
        tau: How many features that is.
        L: The certified ``lambda_max(A A^T)``, without a folded norm; None where it was not asked for.
        step: ``1/(L + lam)``.
        cost: Multiply-adds of the solve in units of the plain layer.
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


@dataclass(frozen=True)
class Report:
    """What :func:`inspect_model` found; ``print`` it, or take ``to_dict()``.

    Attributes:
        model: The model's class.
        solver: The solver's registered name.
        options: Its options.
        rows: One per linear layer, in the order of the model.
    """

    model: str
    solver: str
    options: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def converted(self) -> list[Row]:
        """The rows of layers that would be converted."""
        return [row for row in self.rows if row.converted]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, with totals."""
        return {
            "model": self.model,
            "solver": self.solver,
            "options": self.options,
            "blocks": [asdict(row) for row in self.rows],
            "totals": {
                "layers": len(self.rows),
                "converted": len(self.converted),
                "patterns": dict(Counter(row.pattern for row in self.converted)),
            },
        }

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150)
        console.print(self.table())
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def table(self) -> Table:
        """Returns the report as a rich table; layers left alone for one reason share a line."""
        title = f"{self.model}: {len(self.converted)} of {len(self.rows)} layers become {self.solver}"
        table = Table(title=title, title_justify="left")
        for heading in ("layer", "pattern", "shape", "p, tau", "prior", "L", "step", "cost"):
            table.add_column(heading, justify="right" if heading in ("L", "step", "cost") else "left")
        for row in self.converted:
            shape = f"{_size(row.input_shape)} → {_size(row.output_shape)}"
            rate = "" if row.p is None else f"{row.p:g}, {row.tau}"
            table.add_row(
                row.name, row.pattern, shape, rate, row.prior or "", _number(row.L), _number(row.step), f"{row.cost:g}x"
            )
        left: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            if not row.converted:
                left.setdefault((row.pattern, row.reason), []).append(row.name)
        if left:
            table.add_section()
        for (pattern, reason), names in left.items():
            more = f" (+{len(names) - 1})" if len(names) > 1 else ""
            table.add_row(f"[dim]{names[0]}{more}", f"[dim]{pattern}", f"[dim]left alone: {reason}")
        return table


def inspect_model(
    model: nn.Module, solver: str = "proxsg", iters: int = 10, *, lipschitz: bool = True, **keywords: Any
) -> Report:
    """Says what :func:`convert_model` would do, and leaves the model alone.

    Args:
        model: The model.
        solver: A registered solver.
        iters: How many proximal steps.
        lipschitz: Whether to compute the certified constants, which takes a while for large layers.
        **keywords: The other arguments of :func:`convert_model`; errors are the same, but for a model in which nothing
            would be converted: that is reported.
    """
    plan = plan_conversion(model, solver, iters, **keywords)
    chosen = {one.block.name: one for one in plan.selection.chosen}
    rows = tuple(
        _chosen_row(plan, chosen[block.name], lipschitz) if block.name in chosen else _left_row(plan, block)
        for block in plan.blocks
    )
    return Report(type(model).__name__, solver, plan.options, rows)


def _chosen_row(plan: Plan, one: Chosen, lipschitz: bool) -> Row:
    block, solver = one.block, plan.solver_for(one)
    tau = None
    if isinstance(solver, SamplingSolver):
        outputs = solver.samples == "outputs"
        shape = block.output_shape if outputs else block.input_shape
        tau = solver.tau(shape[_feature_dim(block)])
    constant = float(lipschitz_constant(block.module)) if lipschitz else None
    return Row(
        block.name,
        type(block.module).__name__,
        block.pattern,
        True,
        "; ".join(block.notes),
        block.input_shape,
        block.output_shape,
        None if block.activation is None else block.activation.label,
        None if block.prior is None else block.prior.name,
        block.host_name or block.name,
        one.p,
        tau,
        constant,
        None if constant is None else 1 / max(constant + solver.config.lam, 1e-12),
        # One product for the layer's own output, two for every further iteration.
        2.0 * solver.config.iters - 1,
    )


def _left_row(plan: Plan, block: Block) -> Row:
    return Row(
        block.name,
        type(block.module).__name__,
        block.pattern,
        False,
        plan.selection.rejected[block.name],
        block.input_shape,
        block.output_shape,
        None if block.activation is None else block.activation.label,
        None if block.prior is None else block.prior.name,
    )


def _feature_dim(block: Block) -> int:
    """Returns the dimension of the features: the last one, or the channels of a batch of images."""
    return 1 if isinstance(block.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else -1


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(str(n) for n in shape[1:])


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3g}"
