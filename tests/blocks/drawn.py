"""Small networks that are drawn at random, and what they compute with solvers, interpreted step by step.

A network is layers, norms and ReLUs; a *program* says in which order they are called, and on what. One program is
recorded when the network is converted; another one may be run later. The reference interprets the very program that is
run: it carries with every value which layers' outputs have come to it through norms and sums.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.blocks.linked import diagonal, lively, solved

INPUT = -1
"""The input of the network, among the numbers of its cells."""


def _in_place(one: Tensor, other: Tensor) -> Tensor:
    one += other
    return one


def _into_buffer(y: Tensor, x: Tensor) -> Tensor:
    return y + x if torch.is_grad_enabled() else torch.add(x, y, out=torch.empty_like(x))


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y + x": lambda y, x: y + x,
    "x + y": lambda y, x: x + y,
    "y += x": _in_place,
    "x += y": lambda y, x: _in_place(x.clone(), y),
    "y.add_(x)": lambda y, x: y.add_(x),
    "x.add_(y)": lambda y, x: x.clone().add_(y),
    "add(x, y)": lambda y, x: torch.add(x, y),
    "add(x, y, out=)": _into_buffer,
    "y.clone() + x": lambda y, x: y.clone() + x,
}
_CHANGES_Y = ("y += x", "y.add_(x)")


@dataclass(frozen=True, repr=False)
class Op:
    """One call of a program.

    Attributes:
        kind: Of a layer, of what an adapter adds to it, of its norm, a sum, or an activation.
        cell: Which value it makes or changes.
        index: Of the layer (for a layer, adapter or norm) or of the activation.
        other: The value that a layer, adapter or sum reads besides.
        form: How the sum is written.
    """

    kind: Literal["layer", "adapter", "norm", "add", "act"]
    cell: int
    index: int = 0
    other: int = INPUT
    form: str = "y + x"

    def __repr__(self) -> str:
        value, other = (f"v{cell}" if cell != INPUT else "x" for cell in (self.cell, self.other))
        made = {
            "layer": f"layers[{self.index}]({other})",
            "adapter": f"{value} + adapted({other})",
            "norm": f"norms[{self.index}]({value})",
            "add": f"{self.form} of {value}, {other}",
            "act": f"acts[{self.index}]({value})",
        }
        return f"{value} = {made[self.kind]}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis has its own way with dataclasses.


@dataclass(frozen=True)
class Program:
    """Calls in their order, and which values are returned."""

    ops: tuple[Op, ...]
    returned: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A network.

    Attributes:
        conv: Whether its layers are convolutions.
        norms: For each layer, whether a BatchNorm follows.
        acts: For each layer, the activation that usually follows; layers may share one.
        inplace: Whether activations are in place.
        seed: Of the weights.
    """

    conv: bool
    norms: tuple[bool, ...]
    acts: tuple[int, ...]
    inplace: bool
    seed: int


@dataclass(frozen=True)
class Segment:
    """Calls that gradient checkpointing recomputes."""

    start: int
    stop: int
    reentrant: bool


class Drawn(nn.Module):
    """The network of a plan; ``program`` and ``segment`` may be changed between passes."""

    def __init__(self, plan: Plan, program: Program):
        super().__init__()
        torch.manual_seed(plan.seed)
        count = len(plan.norms)
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for norm in plan.norms:
            bare = nn.Conv2d(3, 3, 3, padding=1, bias=not norm) if plan.conv else nn.Linear(4, 4, bias=not norm)
            kind: Any = nn.BatchNorm2d if plan.conv else nn.BatchNorm1d
            self.layers.append(bare)
            self.norms.append(lively(kind(3 if plan.conv else 4)) if norm else nn.Identity())
        self.acts = nn.ModuleList(nn.ReLU(plan.inplace) for _ in range(count))
        self.program, self.segment, self.inplace = program, None, plan.inplace
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        ops, values = self.program.ops, {INPUT: x}
        owned: set[int] = set()
        if self.segment is None:
            self._run(ops, values, owned)
        else:
            start, stop = self.segment.start, self.segment.stop
            self._run(ops[:start], values, owned)
            self._recomputed(ops[start:stop], values, owned)
            self._run(ops[stop:], values, owned)
        return torch.cat([values[cell] for cell in self.program.returned])

    def _recomputed(self, ops: tuple[Op, ...], values: dict[int, Tensor], owned: set[int]) -> None:
        written = sorted({op.cell for op in ops})
        read = sorted({cell for op in ops for cell in (op.cell, op.other) if cell in values})

        def part(*inputs: Tensor) -> tuple[Tensor, ...]:
            inside = dict(zip(read, inputs, strict=True))
            self._run(ops, inside, set())
            return tuple(inside[cell] for cell in written)

        assert self.segment is not None
        outputs = checkpoint(part, *(values[cell] for cell in read), use_reentrant=self.segment.reentrant)
        values.update(zip(written, outputs, strict=True))
        # What a segment returns is not written to: torch forbids it of some.
        owned.difference_update(written)

    def _run(self, ops: tuple[Op, ...], values: dict[int, Tensor], owned: set[int]) -> None:
        for op in ops:
            if op.kind == "layer":
                values[op.cell] = self.layers[op.index](values[op.other])
            elif op.kind == "adapter":
                values[op.cell] = values[op.cell] + adapted(values[op.other])
            elif op.kind == "norm":
                values[op.cell] = self.norms[op.index](values[op.cell])
            elif op.kind == "add":
                form = "y + x" if op.form in _CHANGES_Y and op.cell not in owned else op.form
                values[op.cell] = SUMS[form](values[op.cell], values[op.other])
            else:
                value = values[op.cell]
                values[op.cell] = self.acts[op.index](value if op.cell in owned or not self.inplace else value.clone())
            owned.add(op.cell)


def adapted(x: Tensor) -> Tensor:
    """Returns what an adapter adds to a layer's output."""
    return 0.3 * x.roll(1, 1)


@dataclass(eq=False)
class Call:
    """A call of a layer whose solver runs further on.

    Attributes:
        layer: Its index.
        input: What the layer was given.
        recomputed: Whether it, or its norm, is in the checkpointed segment.
        diagonal: What its norm multiplied by.
        taken: Whether its solver has run.
    """

    layer: int
    input: Tensor
    recomputed: set[bool]
    diagonal: Tensor | None = None
    taken: bool = False


@dataclass
class Value:
    """A tensor, and the calls of layers that have come to it through norms and sums."""

    tensor: Tensor
    calls: tuple[Call, ...] = ()


@dataclass
class Reference:
    """What a converted network computes.

    Attributes:
        plain: The plain network.
        made: The converted one, for its constants.
        patterns: Of the layers that were converted, by name.
        recorded: The program that was recorded.
        outlets: For each layer with a solver behind a sum, the activation that it runs in.
        refusable: Whether a named error is as good as the number: the program does what was not recorded in a way that
            the network may refuse.
        refused: Whether there has to be a named error.
    """

    plain: Drawn
    made: Drawn
    patterns: dict[str, str]
    recorded: Program
    outlets: dict[int, int] = field(default_factory=dict)
    refusable: bool = False
    refused: bool = False

    def __post_init__(self) -> None:
        calls = [op.index for op in self.recorded.ops if op.kind == "act"]
        self._private = {index for index in calls if calls.count(index) == 1}
        carried: dict[int, set[int]] = {INPUT: set()}
        for op in self.recorded.ops:
            if op.kind == "layer":
                carried[op.cell] = {op.index} if self._waits(op.index) else set()
            elif op.kind == "add":
                carried[op.cell] = carried[op.cell] | carried[op.other]
            elif op.kind == "act":
                self.outlets |= dict.fromkeys(carried[op.cell], op.index)
                carried[op.cell] = set()

    def _pattern(self, layer: int) -> str | None:
        return self.patterns.get(f"layers.{layer}")

    def _waits(self, layer: int) -> bool:
        """Whether a layer's solver runs behind a sum."""
        return self._pattern(layer) in ("linear-skip-act", "linear-norm-skip-act")

    def run(self, x: Tensor) -> Tensor:
        """Returns what the converted network returns for its present program."""
        self.refusable = self.refused = False
        program, segment = self.made.program, self.made.segment
        values = {INPUT: Value(x)}
        for place, op in enumerate(program.ops):
            inside = segment is not None and segment.start <= place < segment.stop
            value = values.get(op.cell, values[INPUT])
            if op.kind == "layer":
                values[op.cell] = self._layer(op.index, values[op.other].tensor, inside)
            elif op.kind == "adapter":
                values[op.cell] = Value(value.tensor + adapted(values[op.other].tensor), value.calls)
                # Sums before a folded norm are followed where an adapter wraps the layer, or hooks into it.
                self.refusable |= self._pattern(op.index) == "linear-norm-act"
            elif op.kind == "norm":
                values[op.cell] = self._norm(op.index, value, inside)
            elif op.kind == "add":
                other = values[op.other]
                values[op.cell] = Value(value.tensor + other.tensor, (*value.calls, *other.calls))
            else:
                values[op.cell] = Value(self._act(op.index, value, inside))
        return torch.cat([values[cell].tensor for cell in program.returned])

    def _solve(self, layer: int, u: Tensor, c: Tensor, d: Tensor | None = None, act: Any = torch.relu) -> Tensor:
        return solved(self.made.layers[layer], self.plain.layers[layer], u, c, d, act)

    def _layer(self, layer: int, u: Tensor, inside: bool) -> Value:
        y = self.plain.layers[layer](u)
        pattern = self._pattern(layer)
        if pattern in ("linear", "linear-act"):
            return Value(self._solve(layer, u, y, act=torch.relu if pattern == "linear-act" else lambda v: v))
        return Value(y) if pattern is None else Value(y, (Call(layer, u, {inside}),))

    def _norm(self, layer: int, value: Value, inside: bool) -> Value:
        norm = self.plain.norms[layer]
        d, c = diagonal(norm, value.tensor), norm(value.tensor)
        for call in value.calls:
            call.recomputed.add(inside)
            if not self._waits(layer):
                self.refusable |= len(call.recomputed) > 1
                return Value(self._solve(layer, call.input, c, d))
            call.diagonal = d
        return Value(c, value.calls)

    def _act(self, act: int, value: Value, inside: bool) -> Tensor:
        here = [call for call in dict.fromkeys(value.calls) if self.outlets.get(call.layer) == act]
        if not here:
            # An activation that serves one layer alone may miss it.
            self.refusable |= act in self._private and act in self.outlets.values()
            # Without gradients, as in the first pass of a reentrant segment, nobody knows whether it is what another
            # layer waits for, hidden by some operation.
            segment = self.made.segment
            recorded = torch.is_grad_enabled() and not (inside and segment is not None and segment.reentrant)
            self.refusable |= act in self.outlets.values() and not recorded
            return torch.relu(value.tensor)
        waiting = [call for call in here if not call.taken]
        self.refused |= len(waiting) > 1
        self.refusable |= len(here) > 1
        call = waiting[0] if waiting else here[0]
        call.recomputed.add(inside)
        self.refusable |= call.taken or len(call.recomputed) > 1
        call.taken = True
        return torch.relu(self._solve(call.layer, call.input, value.tensor, call.diagonal))


@st.composite
def plans(draw: Any) -> Plan:
    """Draws a network of up to three layers."""
    count = draw(st.integers(1, 3))
    norms = draw(st.tuples(*[st.booleans()] * count))
    acts = draw(st.sampled_from([(0,) * count, tuple(range(count)), (0, 0, 1)[:count]]))
    return Plan(draw(st.booleans()), norms, acts, draw(st.booleans()), draw(st.integers(0, 99)))


@st.composite
def programs(draw: Any, plan: Plan, wild: bool) -> Program:
    """Draws a program.

    Args:
        draw: Hypothesis's.
        plan: The network that it is for.
        wild: Whether layers repeat, end without their activation or in another one's, have adapters, and run while
            others wait for their sums. A tame one goes through the layers one after the other.
    """
    count = draw(st.integers(1, 4)) if wild else len(plan.norms)
    ops: list[Op] = []
    finished, waiting = [INPUT], dict[int, list[Op]]()
    opened = 0
    while opened < count or waiting:
        choices = [*waiting] if waiting and not wild else [*waiting, *([INPUT] if opened < count else [])]
        cell = draw(st.sampled_from(choices or [INPUT]))
        if cell == INPUT:
            layer = draw(st.integers(0, len(plan.norms) - 1)) if wild else opened
            source = draw(st.sampled_from(finished[::-1])) if wild else finished[-1]
            first, *waiting[opened] = draw(_cell(plan, opened, layer, source, wild))
            ops.append(first)
            opened += 1
            continue
        op = waiting[cell].pop(0)
        if op.kind == "add":
            op = dataclasses.replace(op, other=draw(st.sampled_from(finished[::-1])))
        ops.append(op)
        if not waiting[cell]:
            del waiting[cell]
            finished.append(cell)
    cells = finished[1:]
    # The last one, and perhaps some before it.
    returned = [cell for cell in cells[:-1] if draw(st.booleans())] if wild else []
    return Program(tuple(ops), (*returned, cells[-1]))


@st.composite
def _cell(draw: Any, plan: Plan, cell: int, layer: int, source: int, wild: bool) -> list[Op]:
    """Draws the calls from a layer to its activation."""
    ops = [Op("layer", cell, layer, source)]
    if wild and draw(st.integers(0, 5)) == 0:
        ops.append(Op("adapter", cell, layer, source))
    if plan.norms[layer]:
        ops.append(Op("norm", cell, layer))
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2])) if wild else draw(st.sampled_from([1, 1, 0]))):
        ops.append(Op("add", cell, form=draw(st.sampled_from([*SUMS]))))
    own, others = plan.acts[layer], sorted(set(plan.acts))
    act = draw(st.sampled_from([own, own, own, None, *others])) if wild else own
    if act is not None or len(ops) == 1:
        ops.append(Op("act", cell, own if act is None else act))
    return ops


@st.composite
def segments(draw: Any, program: Program) -> Segment:
    """Draws a part of a program to be recomputed."""
    start = draw(st.integers(0, len(program.ops) - 1))
    return Segment(start, draw(st.integers(start + 1, len(program.ops))), draw(st.booleans()))
