"""Which layers of a model are worth converting: what each kind costs, whether it merges, and how to ask for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from solver_plugins.errors import some
from solver_plugins.operators import operator_for
from solver_plugins.prox import IdentityPrior
from solver_plugins.solve import GateKind, ProxGD, Solver
from solver_plugins.solve.layout import is_matrix
from solver_plugins.surgery.cost import Cost, cost_of
from solver_plugins.surgery.errors import listed, option
from solver_plugins.surgery.parts import SCALE_PATTERNS, Block
from solver_plugins.surgery.plan import Plan
from solver_plugins.surgery.printing import number, sentence, without_numbers
from solver_plugins.surgery.select import HEAD_RATE, Chosen, select
from solver_plugins.surgery.spec import ConversionSpec

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Suggestion:
    """Layers of one kind: what the solver converts by itself, "classifier", "no prior", "prior" or "norm or skip".

    Attributes:
        options: What converts them, beside the solver and its iterations.
        training: Operations of the forward pass in training, in units of these layers as they are; likewise in
            evaluation.
        merges: Whether all of them become plain layers of the same function again (``merge_model``).
        why: When that is worth while.
    """

    kind: str
    layers: tuple[str, ...]
    options: dict[str, Any]
    training: float
    evaluation: float
    merges: bool
    why: str

    def ask(self) -> str:
        return listed(self.options) or "by default"


def block_cost(block: Block, solver: Solver, gate: GateKind | None) -> Cost:
    """Returns what a block costs with a solver, for inputs as in the recorded pass."""
    assert block.prior is not None
    behind, normed = block.outlet != "linear", block.norm is not None
    return cost_of(block.module, block.input_shape, solver, block.prior, behind=behind, normed=normed, gate=gate)


def suggestions_for(plan: Plan) -> tuple[Suggestion, ...]:
    """Returns the kinds of layers that a solver can be put into, those that ask for the least first."""
    spec = plan.spec.model_copy(update={"targets": None, "exclude": None, "pattern": None, "last": None, "p": None})
    rated = spec if spec.samples == "nothing" else spec.model_copy(update={"p": HEAD_RATE})
    default = select(plan.blocks, spec)
    groups: dict[str, list[Chosen]] = {"default": list(default.chosen)}
    known = {one.block.name for one in default.chosen}
    for one in select(plan.blocks, rated.model_copy(update={"pattern": "all"})).chosen:
        if one.block.name not in known and spec.samples not in one.block.dropped:
            groups.setdefault(_kind(one.block), []).append(one)
    order = ("default", "classifier", "no prior", "prior", "norm or skip")
    return tuple(_suggestion(kind, groups[kind], spec, default.warning) for kind in order if groups.get(kind))


def shown_suggestions(suggestions: Sequence[Suggestion]) -> "list[RenderableType]":
    """Returns suggestions as lines of a report."""
    heading = "Worth converting (cost of these layers alone, in training and in evaluation):"
    shown = [sentence(""), sentence(heading, "bold")]
    for one in suggestions:
        kinds = dict.fromkeys(map(without_numbers, one.layers))
        names = some(list(kinds), 4)
        merging = "can be merged into plain layers" if one.merges else "stays a solver"
        shown += [
            sentence(f"{len(one.layers)} x {names}", indent=2),
            sentence(f"{number(one.training)}x and {number(one.evaluation)}x; {merging}; {one.why}", "dim", indent=4),
            sentence(f"{one.ask()}", "cyan", indent=4),
        ]
    return shown


def _kind(block: Block) -> str:
    if block.is_last:
        return "classifier"
    if block.pattern in SCALE_PATTERNS:
        return "norm or skip"
    return "no prior" if isinstance(block.prior, IdentityPrior) else "prior"


def _suggestion(kind: str, chosen: Sequence[Chosen], spec: ConversionSpec, warning: str | None) -> Suggestion:
    sums, merges = [0, 0, 0], True
    for one in chosen:
        solver, calls = spec.make_solver(one.p), max(1, len(one.block.calls))
        cost = block_cost(one.block, solver, spec.gate)
        affine = _affine(one.block, solver)
        rule = ProxGD.from_options(iters=spec.iters) if solver.samples != "nothing" else solver
        later = cost.plain if affine else block_cost(one.block, rule, spec.gate).solver
        sums = [total + calls * part for total, part in zip(sums, (cost.plain, cost.solver, later), strict=True)]
        merges = merges and affine and one.block.outlet != "activation"
    plain, training, evaluation = sums
    names = tuple(one.block.name for one in chosen)
    why = {
        "default": "what the solver converts by default"
        if warning is None
        else "the head, because no dropout is active",
        "classifier": "only the last layer: a low cost and a small change",
        "no prior": "the activations after them stay unchanged",
        "prior": "with their activations, as in the paper",
        "norm or skip": f"changes pretrained outputs most; {option('gate', 'channel')} starts without a change",
    }[kind]
    return Suggestion(kind, names, _options(kind, chosen, spec), training / plain, evaluation / plain, merges, why)


def _options(kind: str, chosen: Sequence[Chosen], spec: ConversionSpec) -> dict[str, Any]:
    """Returns the options that convert these layers, beside the solver and its iterations."""
    if kind == "default":
        return {}
    patterns = list(dict.fromkeys(one.block.pattern for one in chosen))
    rate = {} if spec.samples == "nothing" else {"p": HEAD_RATE}
    if kind == "classifier":
        return {"targets": [one.block.name for one in chosen], "pattern": patterns, **rate}
    return {"pattern": patterns, **({"last": False} if kind == "no prior" else {}), **rate}


def _affine(block: Block, solver: Solver) -> bool:
    """Whether a block is one product in evaluation."""
    recursion = solver.recursion
    if not isinstance(block.prior, IdentityPrior) or recursion is None:
        return False
    with torch.no_grad():
        operator = operator_for(block.module, block.input_shape)
    return recursion.momenta(solver.config.iters) is not None and is_matrix(operator)
