"""The front door: listens to a model, and turns its gradients into the directions of implicit steps."""

import math
import re
import weakref
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from solver_plugins.errors import OptionError, did_you_mean, warn
from solver_plugins.operators.precision import autocast_off
from solver_plugins.proxprop.capture import Ears, Listener, Tally, keep_out_of_graphs
from solver_plugins.proxprop.choose import choose_layers
from solver_plugins.proxprop.errors import (
    ClosureError,
    DetachedError,
    EmptyBatchError,
    JitterWarning,
    LayerNotRunError,
    OptimizerError,
    OverwrittenError,
    ReplicaError,
    WrappedModelError,
)
from solver_plugins.proxprop.processes import Processes, shapes_of
from solver_plugins.proxprop.system import (
    StepReport,
    System,
    Task,
    batch_system,
    feature_system,
    matrix_free_system,
)
from solver_plugins.proxprop.unit import Call, Unit, group
from solver_plugins.surgery.targets import Targets

GRAM_BYTES = 2**29
"""Conjugate gradients build no matrix larger than this (512 MiB): they go without."""


class ProxProp:
    """Multiplies the gradients of linear layers by ``(I/tau_theta + X^T X)^{-1}``, equation (13).

    ``X`` holds the inputs that a layer saw since its gradient was last empty: one row per sample and token (Linear) or
    per sample and place (convolutions, im2col), and a column of ones for a trainable bias. Layers that share a weight,
    are called several times, run on micro-batches or in several processes have all of these rows in one ``X``.

        prox = ProxProp(model, mode="cg3")
        prox.attach(optimizer)            # or, after every loss.backward(): prox.precondition()

    Forward values, state-dict and Parameters of the model stay as they are. Frozen weights are left alone, and so is
    the last layer: the one whose output's gradient comes first in a backward pass. A model with several heads has
    several last layers; name the others in ``exclude``.

    Args:
        model: The model, before or after wrapping it in DistributedDataParallel or compiling it (not with
            ``fullgraph=True``), after sharding it with FSDP2's ``fully_shard``.
        mode: "exact" (Cholesky), or "cgN": N steps of conjugate gradients from zero, e.g. "cg3".
        tau_theta: Step size of the implicit step: the smaller, the closer to a multiple of the plain gradient.
        gram: "sum" as in the paper, or "mean": ``X^T X / N``, so that ``tau_theta`` does not depend on the batch size.
        targets: Which layers, as in PEFT: ends of names, a regular expression, or a function of name and module.
        exclude: Which of them not.
        skip_last: Whether the last layer keeps its plain gradient.
        process_group: The processes that train together; all of them by default.

    Attributes:
        layers: Names of the layers listened to.
        skipped: Why other linear layers are not, by name.
        last_step: What the last call of :meth:`precondition` did, by layer.
        last_layers: Names of the layers that kept their plain gradient in it, as the last ones before the loss.

    Raises:
        OptionError: For an option out of range.
        TargetError: For a target that names no layer.
        UnsupportedLayerError: For a named layer that cannot be preconditioned, or none at all.
        WrappedModelError: For a model in a wrapper that hides its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: str = "exact",
        tau_theta: float = 1.0,
        gram: Literal["sum", "mean"] = "sum",
        targets: Targets | None = None,
        exclude: Targets | None = None,
        skip_last: bool = True,
        *,
        process_group: Any = None,
    ):
        self.steps = cg_steps(mode)
        if isinstance(tau_theta, bool) or not isinstance(tau_theta, (int, float)) or not (0 < tau_theta < math.inf):
            raise OptionError(f"Expected tau_theta to be a positive number; found {tau_theta!r}.")
        if gram not in ("sum", "mean"):
            raise OptionError(f"Unknown gram {gram!r}.{did_you_mean(str(gram), ('sum', 'mean'))}")
        if not isinstance(skip_last, bool):
            raise OptionError(f"Expected skip_last to be True or False; found {skip_last!r}.")
        self.mode, self.tau_theta, self.gram, self.skip_last = mode, float(tau_theta), gram, skip_last
        self._process_group = process_group
        chosen = choose_layers(model, targets, exclude)
        self.skipped = chosen.skipped
        self.last_step: dict[str, StepReport] = {}
        self.last_layers: tuple[str, ...] = ()
        limit = GRAM_BYTES if self.steps is not None else 2**62
        self._ears = Ears(self.skip_last)
        self._tallies = self._ears.tallies
        keep_out_of_graphs()
        self._handles: list[Any] = []
        for name, layer, rows in chosen.all:
            weight = layer._parameters.get("weight")
            sharded = weight if hasattr(weight, "full_tensor") else None
            tally = Tally(name, layer, rows, keeps=rows is not None, fold_limit=limit, parameter=sharded)
            self._tallies.append(tally)
            self._handles.append(layer.register_forward_hook(Listener(self._ears, tally), with_kwargs=True))
        self.layers = [tally.name for tally in self._tallies if tally.keeps]
        # A ProxProp that nobody holds any more leaves no hooks behind.
        weakref.finalize(self, _remove, self._handles).atexit = False

    def precondition(self) -> dict[str, StepReport]:
        """Replaces the gradients of the layers by the directions of implicit steps; call it after ``backward()``.

        With several processes, all of them must call it, with gradients that have been averaged or summed (as
        DistributedDataParallel does).

        Returns:
            What was done, by layer; see :class:`StepReport`.

        Raises:
            LayerNotRunError: If a layer has no inputs or no gradient.
            EmptyBatchError: If a layer ran on no samples.
            NonFiniteError: If activations or gradients are not finite.
            OverwrittenError: If the memory of an input was written to after the backward pass.
            ReplicaError: If the gradients of processes differ.
            DetachedError: After :meth:`detach`.
        """
        if not self._ears.active:
            raise DetachedError("This ProxProp has been detached from its model; make a new one.")
        processes = Processes(self._process_group)
        with torch.no_grad():
            last = tuple(sorted(set().union(*processes.exchange(self._ears.last))))
            units = self._units(processes, last)
            summaries = processes.exchange([_summary(unit, processes.count) for unit in units])
            _check_replicas(units, summaries)
            made = []
            for index, unit in enumerate(units):
                with autocast_off(unit.weight.device):
                    made.append(self._system(unit, [one[index] for one in summaries], processes))
            report = {}
            for unit, system in zip(units, made, strict=True):
                with autocast_off(unit.weight.device):
                    done = system.finish()
                if done.jitter:
                    warn(
                        f"The matrix of {unit.name} is not positive definite in {unit.dtype}: {done.jitter:.3g} was "
                        "added to its diagonal. Normalise the inputs of that layer, or take a smaller tau_theta.",
                        JitterWarning,
                    )
                report.update({tally.name: done for tally in unit.tallies})
        self.clear()
        self.last_step, self.last_layers = report, last
        return report

    def _units(self, processes: Processes, last: tuple[str, ...]) -> list[Unit]:
        kept = [tally for tally in self._tallies if tally.keeps and tally.weight().requires_grad]
        if any(tally.parameter is None and hasattr(tally.weight(), "full_tensor") for tally in kept):
            raise WrappedModelError(
                "The model has been sharded after this ProxProp was made, which replaced its Parameters. Call "
                "fully_shard first, then make the ProxProp (and the optimizer)."
            )
        # By weight: a gradient that is in part the last layer's has no rows of that part.
        plain = {id(tally.weight()) for tally in self._tallies if tally.name in last}
        units = group([tally for tally in kept if id(tally.weight()) not in plain])
        if kept and not units:
            found = ", ".join(name or "the model itself" for name in last)
            raise LayerNotRunError(
                f"Nothing to precondition: {found} is the last layer, which keeps its plain gradient (as do layers "
                "that share its weight). Pass skip_last=False to precondition it, too."
            )
        return units

    def _system(self, unit: Unit, summaries: list["_Summary"], processes: Processes) -> System:
        total = sum(one[1] for one in summaries)
        task = Task(self.steps, 1 / self.tau_theta, 1.0, total)
        if self.gram == "mean":
            task = Task(self.steps, total / self.tau_theta, float(total), total)
        folded = any(one[2] for one in summaries)
        size = min(total, unit.columns) ** 2 * unit.rows.groups * unit.dtype.itemsize
        if not folded and self.steps is not None and size > GRAM_BYTES:
            return matrix_free_system(unit, task, _calls(unit), processes)
        if folded or total >= unit.rows.columns:
            return feature_system(unit, task, processes)
        calls = []
        for index, (tally, bias) in enumerate(zip(unit.tallies, unit.bias_of, strict=True)):
            shapes = [one[3][index] for one in summaries]
            calls += [Call(record, bias) for record in processes.records(tally.records, shapes, unit.weight)]
        return batch_system(unit, task, calls)

    def attach(self, optimizer: Optimizer) -> Self:
        """Preconditions before every ``optimizer.step()``, until :meth:`detach`.

        A GradScaler's ``step`` may be used as always: it unscales first, and steps that it skips are forgotten.

        Raises:
            OptimizerError: If the optimizer does not hold the weights of the layers.
            ClosureError: If it evaluates the model itself (LBFGS).
        """
        if not self._ears.active:
            raise DetachedError("This ProxProp has been detached from its model; make a new one.")
        inner = _stepping(optimizer)
        if isinstance(inner, LBFGS):
            raise ClosureError(
                "LBFGS runs the model inside of its step, so there is no moment to precondition at. Use an optimizer "
                "that takes one gradient per step."
            )
        held = {id(parameter) for one in inner.param_groups for parameter in one["params"]}
        missing = [
            tally.name
            for tally in self._tallies
            if tally.keeps and tally.weight().requires_grad and id(tally.weight()) not in held
        ]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise OptimizerError(
                f"Expected an optimizer that holds the weights of all layers; it does not hold those of {shown}. Make "
                "it from the same model, or leave these layers out with exclude=; with several optimizers, make one "
                "ProxProp for each."
            )
        attached = [getattr(hook, "__self__", None) for hook in inner._optimizer_step_pre_hooks.values()]
        mine = {id(tally.weight()) for tally in self._tallies if tally.keeps}
        for other in attached:
            if other is self:
                return self
            if isinstance(other, ProxProp) and any(id(one.weight()) in mine for one in other._tallies if one.keeps):
                raise OptimizerError(
                    "Another ProxProp is attached to this optimizer for the same layers, which would be preconditioned "
                    "twice. Call detach() on it first (or run the cell that makes the optimizer again)."
                )
        self._handles.append(inner.register_step_pre_hook(self._before_step))
        return self

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch hands the optimizer itself on as the first argument.
        closure = kwargs.get("closure", next((one for one in args if callable(one) and one is not optimizer), None))
        if closure is not None:
            raise ClosureError(
                "Expected optimizer.step() without a closure: with one, the model runs inside of the step. Call "
                "loss.backward() before optimizer.step()."
            )
        still = all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if still and not any(tally.calls for tally in self._tallies):
            # torch's distributed checkpoints take an empty step before loading, to make the optimizer's state.
            return
        infinite: Tensor | None = getattr(optimizer, "found_inf", None)
        if infinite is not None and bool(infinite.any()):
            # A GradScaler leaves it to a fused optimizer to skip this step.
            self.clear()
            return
        # A fused optimizer divides by the GradScaler's factor itself, after us. Directions are homogeneous in the
        # gradient, conjugate gradients' included, so that the factor may be taken out before or after.
        self.precondition()

    def clear(self) -> None:
        """Forgets the inputs heard so far, as after a step."""
        for tally in self._tallies:
            tally.clear()
        self._ears.last.clear()

    def detach(self) -> None:
        """Stops listening and removes everything that was put on model and optimizers; a second call does nothing."""
        self._ears.active = False
        _remove(self._handles)
        self._handles.clear()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        return (
            f"ProxProp({len(self.layers)} layers, mode={self.mode!r}, tau_theta={self.tau_theta}, gram={self.gram!r}, "
            f"skip_last={self.skip_last})"
        )


_Summary = tuple[int, int, bool, list[Any], bool, float, bool]
"""Calls, rows, whether a Gram matrix was made, shapes of kept calls per layer, whether there is a gradient, a probe,
whether an input was overwritten."""


def cg_steps(mode: str) -> int | None:
    """Returns how many steps of conjugate gradients a mode takes; None for "exact".

    Raises:
        OptionError: If it is no mode.
    """
    if mode == "exact":
        return None
    match = re.fullmatch(r"cg([1-9]\d*)", mode) if isinstance(mode, str) else None
    if match is None:
        raise OptionError(
            f"Expected mode 'exact', or 'cgN' with N >= 1 steps of conjugate gradients ('cg3'); found {mode!r}."
        )
    return int(match.group(1))


def _stepping(optimizer: Any) -> Optimizer:
    """Returns the optimizer that really steps, inside of wrappers such as accelerate's, timm's Lookahead, or SAM.

    Raises:
        OptimizerError: If there is none, or its step runs no hooks.
    """
    inner: Any = optimizer
    while True:
        held = [getattr(inner, name, None) for name in ("optimizer", "_base_optimizer", "base_optimizer")]
        found = next((one for one in held if isinstance(one, Optimizer)), None)
        if found is None:
            break
        inner = found
    if not isinstance(inner, Optimizer):
        raise OptimizerError(f"Expected a torch.optim.Optimizer; found {type(optimizer).__name__}.")
    if not getattr(type(inner).step, "hooked", False):
        raise OptimizerError(
            f"The step of {type(inner).__name__} runs no hooks, so that nothing can be done before it. Call "
            "precondition() yourself, after backward()."
        )
    return inner


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _calls(unit: Unit) -> list[Call]:
    pairs = zip(unit.tallies, unit.bias_of, strict=True)
    return [Call(record, bias) for tally, bias in pairs for record in tally.records]


def _summary(unit: Unit, processes: int) -> _Summary:
    present = unit.weight.grad is not None
    # A sharded gradient has been reduced by whoever sharded it.
    compare = processes > 1 and present and not unit.sharded
    return (
        sum(tally.calls for tally in unit.tallies),
        sum(tally.rows for tally in unit.tallies),
        any(tally.gram is not None for tally in unit.tallies),
        [shapes_of(tally.records) for tally in unit.tallies],
        present,
        float(unit.probed_gradient().double().norm()) if compare else 0.0,
        any(tally.overwritten or any(one.overwritten for one in tally.records) for tally in unit.tallies),
    )


def _check_replicas(units: list[Unit], summaries: list[list[_Summary]]) -> None:
    """Raises, in all processes alike, if any unit cannot be preconditioned."""
    if len({len(one) for one in summaries}) > 1:
        raise ReplicaError("Expected every process to train the same layers; their numbers differ.")
    silent, empty, apart, overwritten = [], [], [], []
    for index, unit in enumerate(units):
        theirs = [one[index] for one in summaries]
        probes = [one[5] for one in theirs]
        if not sum(one[0] for one in theirs) or not all(one[4] for one in theirs):
            silent.append(unit.name)
        elif not sum(one[1] for one in theirs):
            empty.append(unit.name)
        elif max(probes) - min(probes) > 1e-3 * max(probes):
            apart.append(unit.name)
        elif any(one[6] for one in theirs):
            overwritten.append(unit.name)
    if silent:
        raise LayerNotRunError(
            f"Expected every layer to have run since its gradient was last empty, and to have a gradient; "
            f"{', '.join(silent[:5])}{f' and {len(silent) - 5} more' if len(silent) > 5 else ''} did not or have none. "
            "No gradient was changed. Call precondition() once per step, after backward(). A layer that the loss does "
            "not use, or whose weight is read without calling it (nn.MultiheadAttention.out_proj), belongs into "
            "exclude=; a model that was compiled and run before ProxProp was made must be compiled again."
        )
    if empty:
        raise EmptyBatchError(f"Expected at least one sample; {', '.join(empty)} ran on none. No gradient was changed.")
    if overwritten:
        raise OverwrittenError(
            f"The inputs of {', '.join(overwritten)} have been written over between backward() and precondition(). No "
            "gradient was changed. Do not reuse one tensor for several micro-batches."
        )
    if apart:
        raise ReplicaError(
            f"Expected the same gradients in all processes; those of {', '.join(apart)} differ. No gradient was "
            "changed. Wrap the model in DistributedDataParallel, or reduce the gradients before precondition()."
        )
