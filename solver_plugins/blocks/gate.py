"""The scale of a block: gains, shifts, a blend with the plain layer, and gates.

Gates are trained numbers in [0, 1] between a layer and its solver, one per output channel or one for all.

At zero a block is the plain layer to the bit, at one the solver; :class:`~solver_plugins.solve.Scale` says what lies in
between. A gate is a Parameter of its layer, so that optimizers, checkpoints, DDP, FSDP2 and averages of the weights
treat it as one. It is kept in [0, 1] by projections: of the Parameter after every step of a ``torch.optim.Optimizer``
that trains it, and of its value in every pass, with a gradient that passes wherever a step points inwards. (That of
``clamp`` is zero at zero, so that a gate which starts there would never move.)
"""

import numbers
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from solver_plugins.blocks.stepsize import TrackedStep
from solver_plugins.errors import OptionError
from solver_plugins.prox import Prior
from solver_plugins.solve import GateKind, Observer, Scale, Solver, check_gate

GATE = "solver_gate"
"""The name of the Parameter on its layer."""

SCALE_BUFFERS = ("channel_gain", "channel_shift", "blend")
_LIVING: "weakref.WeakSet[Gated]" = weakref.WeakSet()
"""All blocks with a gate; where Parameters are replaced (FSDP2), their blocks stay."""
_HOOKS: list[Any] = []


def check_blend(blend: Any) -> None:
    """Raises OptionError for a blend that is not a number in [0, 1]."""
    number = isinstance(blend, numbers.Real) and not isinstance(blend, bool)
    if not number or not 0 <= blend <= 1:
        raise OptionError(f"Expected a blend in [0, 1]; found {blend!r}.")


class _Projected(torch.autograd.Function):
    """The nearest number in [0, 1]. Gradients pass, but for those that lead on from outside of it.

    At zero and one they pass in both directions: the projection comes after the step, when the gradients of several
    processes and passes have been added up.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor) -> Tensor:
        return gate.clamp(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate,) = ctx.saved_tensors
        # A step goes against the gradient.
        outwards = ((gate < 0) & (grad > 0)) | ((gate > 1) & (grad < 0))
        return grad.masked_fill(outwards, 0.0)


class Gated(TrackedStep):
    """Mixin that owns the scale of a block, and its gate.

    Attributes:
        channel_gain: One factor per output feature on the solver's argument, from :func:`solver_plugins.calibrate`;
            None for ones.
        channel_shift: What is added to that, one number per output feature; None for zeros.
        blend: ``a`` in ``(1 - a) v_1 + a v_K``, between the first iterate and the last; None for one.
        observer: Looks at solves while a model is calibrated.
        gate_kind: "channel" or "scalar"; None where there is no gate.
    """

    channel_gain: Tensor | None
    channel_shift: Tensor | None
    blend: Tensor | None
    observer: Observer | None
    gate_kind: GateKind | None
    solver: Solver
    prior: Prior

    @property
    def computes_its_layer(self) -> bool:
        """Whether evaluation computes just what the plain layer does: after one iteration, or closed."""
        config, gate = self.solver.config, self.gate
        if config.formulation != "normalized" or self.solver.samples_in_evaluation:
            return False
        if self.blend is not None and not self.blend.is_meta and float(self.blend) == 0:
            return True
        closed = gate is not None and not gate.is_meta and not bool(gate.any())
        return self.channel_gain is None and self.channel_shift is None and (config.iters == 1 or closed)

    def set_scale(self, gain: Tensor | None, shift: Tensor | None = None) -> None:
        """Sets factors on the solver's argument and what is added to it; None for ones, and for zeros."""
        count = self._kernel_at_rest().shape[0]
        for name, row in (("gains", gain), ("shifts", shift)):
            if row is not None and (row.shape != (count,) or not bool(torch.isfinite(row).all())):
                raise OptionError(f"Expected {count} finite {name}, one per output feature; found {tuple(row.shape)}.")
        self.channel_gain = None if gain is None else gain.detach().to(self.L)
        self.channel_shift = None if shift is None else shift.detach().to(self.L)

    def set_blend(self, blend: float) -> None:
        """Sets how much of the solver there is: 0 is the original layer, 1 the solver."""
        check_blend(blend)
        if self.blend is not None and not self.blend.is_meta:
            # In place: a compiled graph holds this buffer, and a schedule may change it at every step.
            self.blend.fill_(blend)
        else:
            self.blend = None if blend == 1 else torch.full_like(self.L, blend)

    def set_gate(self, kind: GateKind | None, values: Tensor | None = None) -> None:
        """Gives the block a gate, closed unless its numbers are given, or takes its gate away.

        OptionError if a gate does not go with the block's solver and prior, or there are more or fewer numbers.
        """
        self._parameters.pop(GATE, None)
        self.gate_kind = kind
        if kind is None:
            return
        check_gate(self.solver, self.prior, kind)
        kernel = self._kernel_at_rest()
        # Not 0-d, which cannot be sharded; in the dtype of the weights, as sharding needs it.
        made = torch.zeros(len(kernel) if kind == "channel" else 1, dtype=kernel.dtype, device=kernel.device)
        if values is not None and values.shape != made.shape:
            raise OptionError(f"Expected {len(made)} numbers for a {kind} gate; found {tuple(values.shape)}.")
        self.register_parameter(GATE, nn.Parameter(made if values is None else made.copy_(values.clamp(0, 1))))
        self._follow()

    @property
    def gate(self) -> nn.Parameter | None:
        """The Parameter; None where there is no gate."""
        return self._parameters.get(GATE)

    def _scale(self) -> Scale:
        # One iteration has none; a calibration looks at it.
        gate: Tensor | None = self.gate if self.solver.config.iters > 1 else None
        if gate is not None:
            if self.training or (torch.is_grad_enabled() and gate.requires_grad):
                gate = _Projected.apply(gate)
            gate = gate.reshape(()) if self.gate_kind == "scalar" else gate
        # A schedule may write to the buffer between this pass and its backward pass.
        blend = self.blend.clone() if self.blend is not None and torch.is_grad_enabled() else self.blend
        return Scale(self.channel_gain, self.channel_shift, blend, gate=gate, observer=self.observer)

    def train(self, mode: bool = True) -> Any:
        """Sets the mode; for evaluation the gate is projected, whatever has trained it."""
        _project(self._parameters.get(GATE))
        return super().train(mode)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.gate is not None:
            self._follow()

    def _follow(self) -> None:
        _LIVING.add(self)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_post_hook(_project_after_step))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        missing: list[str] = rest[2]
        # The weights of a plain model: the gate stays what it is.
        if self.gate is not None and prefix + GATE in missing:
            missing.remove(prefix + GATE)
        _project(self.gate)


@torch.no_grad()
def _project(gate: Tensor | None) -> None:
    """Puts a gate that has left [0, 1] back."""
    if gate is not None and not gate.is_meta:
        gate.clamp_(0, 1)


def _project_after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Keeps the gates that an optimizer has moved in [0, 1]."""
    if len(_LIVING) == 0:
        return
    trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for block in list(_LIVING):
        # A layer that was reverted has none any more.
        gate = block._parameters.get(GATE)
        if gate is not None and id(gate) in trained:
            _project(gate)


def gates_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the gates of a converted model by Parameter name; an empty dict if it has none."""
    blocks = ((name, module.gate) for name, module in model.named_modules() if isinstance(module, Gated))
    return {f"{name}.{GATE}" if name else GATE: gate for name, gate in blocks if gate is not None}


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, gate_rate: float = 10.0
) -> list[dict[str, Any]]:
    """Returns parameter groups for your own optimizer: gates get their own learning rate and no weight decay.

    Args:
        model: A converted model, wrapped or not.
        lr: The learning rate of the weights.
        weight_decay: The weight decay of the weights; biases and norms (all one-dimensional Parameters) have none.
        gate_rate: The learning rate of gates is ``gate_rate * lr``. They move between 0 and 1, weights by much less.
    """
    gates = gates_of(model)
    known = {id(one) for one in gates.values()}
    rest = [one for one in model.parameters() if one.requires_grad and id(one) not in known]
    groups = [
        {"params": [one for one in rest if one.dim() > 1], "lr": lr, "weight_decay": weight_decay},
        {"params": [one for one in rest if one.dim() <= 1], "lr": lr, "weight_decay": 0.0},
        {"params": [one for one in gates.values() if one.requires_grad], "lr": gate_rate * lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def separate_gates(model: nn.Module, optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Moves the gates of a model from an optimizer's groups into one of their own, at ``rate`` times its learning rate.

    Call it before the optimizer's first step, and before a schedule is made for it. Gates are never decayed.
    """
    gates = {id(one): one for one in gates_of(model).values()}
    found = [one for group in optimizer.param_groups for one in group["params"] if id(one) in gates]
    if not found:
        return
    lr = optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if id(one) not in gates]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    optimizer.add_param_group({"params": found, "lr": rate * lr, "weight_decay": 0.0})
