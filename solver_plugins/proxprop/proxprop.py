"""ProxProp: listens to a model and replaces its gradients by the directions of implicit steps."""

import math
import re
import weakref
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from solver_plugins.errors import OptionError, did_you_mean, some, warn
from solver_plugins.operators.precision import autocast_off
from solver_plugins.proxprop.capture import CaptureState, Listener, Tally, keep_out_of_graphs
from solver_plugins.proxprop.choose import choose_layers
from solver_plugins.proxprop.errors import (
    ClosureError,
    DetachedError,
    JitterWarning,
    LayerNotRunError,
    OptimizerError,
    WrappedModelError,
)
from solver_plugins.proxprop.processes import Processes, Summary, check_summaries
from solver_plugins.proxprop.shared_weight import SharedWeight, shared_weights
from solver_plugins.proxprop.system import (
    StepReport,
    System,
    SystemSettings,
    batch_system,
    feature_system,
    matrix_free_system,
)
from solver_plugins.surgery.targets import Targets

GRAM_BYTES = 2**29
"""Conjugate gradients build no larger matrix than this (512 MiB); beyond it they work without a matrix."""


class ProxProp:
    """Multiplies the gradients of linear layers by ``(I/tau_theta + X^T X)^{-1}``, equation (13).

    ``X`` holds the inputs of a layer since its gradient was last empty: one row per sample and token (Linear) or per
    sample and place (convolutions, im2col), and a column of ones for a trainable bias. If layers share a weight, are
    called several times, run on micro-batches or in several processes, one ``X`` has all of these rows.

        prox = ProxProp(model, mode="cg3")
        prox.attach(optimizer)            # or, after every loss.backward(): prox.precondition()

    Forward values, state-dict and Parameters of the model do not change. Frozen weights are skipped, and so is the last
    layer: the one whose output gradient comes first in a backward pass. A model with several heads has several last
    layers; name the others in ``exclude``.

    Args:
        model: The model, before or after wrapping it in DistributedDataParallel or compiling it (without
            ``fullgraph=True``), and after sharding it with FSDP2's ``fully_shard``.
        mode: "exact" (Cholesky), or "cgN": N steps of conjugate gradients from zero, e.g. "cg3". As in the authors'
            code, every output of a Linear layer has its own step lengths, and a convolution has one for all outputs.
            With "cgN-joint", Linear layers have one for all outputs, too, which is less exact.
        tau_theta: Step size of the implicit step; a small one gives almost a multiple of the plain gradient.
        gram: "sum" as in the paper, or "mean": ``X^T X / N``, which makes ``tau_theta`` independent of the batch size.
        targets: The layers, as in PEFT: endings of names, a regular expression, or a function of name and module.
        exclude: Layers to leave out, in the same forms.
        skip_last: Whether the last layer keeps its plain gradient.
        process_group: The processes that train together; by default all.

    Attributes:
        layers: Names of the preconditioned layers.
        skipped: Why other linear layers are not preconditioned, by name.
        last_step: What the last call of :meth:`precondition` did, by layer.
        last_layers: Names of the last layers before the loss, which kept their plain gradient in that call.

    Raises:
        OptionError: If an option is out of range.
        TargetError: If a target matches no layer.
        UnsupportedLayerError: If a named layer, or no layer at all, can be preconditioned.
        WrappedModelError: If the model is in a wrapper that hides its layers.
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
        self.steps, self._joint = read_mode(mode)
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
        self._capture = CaptureState(self.skip_last)
        self._tallies = self._capture.tallies
        keep_out_of_graphs()
        self._handles: list[Any] = []
        for name, layer, rows in chosen.all:
            weight = layer._parameters.get("weight")
            sharded = weight if hasattr(weight, "full_tensor") else None
            tally = Tally(name, layer, rows, fold_limit=limit, parameter=sharded)
            self._tallies.append(tally)
            self._handles.append(layer.register_forward_hook(Listener(self._capture, tally), with_kwargs=True))
        self.layers = [tally.name for tally in self._tallies if tally.shape is not None]
        # If nobody holds the ProxProp any more, its hooks are removed.
        weakref.finalize(self, _remove, self._handles).atexit = False

    def precondition(self) -> dict[str, StepReport]:
        """Replaces the gradients of the layers by the directions of implicit steps; call it after ``backward()``.

        With several processes, all of them must call it, after gradients have been averaged or summed (as
        DistributedDataParallel does). It returns a :class:`StepReport` per layer.

        Raises:
            LayerNotRunError: If a layer has no inputs or no gradient.
            EmptyBatchError: If a layer ran on no samples.
            NonFiniteError: If activations or gradients are not finite.
            OverwrittenError: If an input was changed in place after the backward pass.
            ReplicaError: If the gradients of processes differ.
            DetachedError: After :meth:`detach`.
        """
        self._check_attached()
        processes = Processes(self._process_group)
        with torch.no_grad():
            last = tuple(sorted(set().union(*processes.exchange(self._capture.last))))
            weights = self._weights(last)
            summaries = processes.exchange([Summary.of(shared, processes.count) for shared in weights])
            check_summaries(weights, summaries)
            made = []
            for index, shared in enumerate(weights):
                with autocast_off(shared.weight.device):
                    made.append(self._system(shared, [one[index] for one in summaries], processes))
            report = {}
            for shared, system in zip(weights, made, strict=True):
                with autocast_off(shared.weight.device):
                    done = system.finish()
                if done.jitter:
                    warn(
                        f"The matrix of {shared.name} is not positive definite in {shared.dtype}: {done.jitter:.3g} "
                        "was added to its diagonal. Normalise the inputs of that layer, or use a smaller tau_theta.",
                        JitterWarning,
                    )
                report.update({tally.name: done for tally in shared.tallies})
        self.clear()
        self.last_step, self.last_layers = report, last
        return report

    def _check_attached(self) -> None:
        if not self._capture.active:
            raise DetachedError("This ProxProp has been detached from its model; make a new one.")

    def _trained(self) -> list[Tally]:
        """Returns the tallies of preconditioned layers whose weights are trained."""
        return [tally for tally in self._tallies if tally.shape is not None and tally.weight().requires_grad]

    def _weights(self, last: tuple[str, ...]) -> list[SharedWeight]:
        trained = self._trained()
        if any(tally.parameter is None and hasattr(tally.weight(), "full_tensor") for tally in trained):
            raise WrappedModelError(
                "The model has been sharded after this ProxProp was made, which replaced its Parameters. Call "
                "fully_shard first, then make the ProxProp (and the optimizer)."
            )
        # By weight, because a gradient that partly comes from the last layer has no rows of that part.
        plain = {id(tally.weight()) for tally in self._tallies if tally.name in last}
        weights = shared_weights([tally for tally in trained if id(tally.weight()) not in plain])
        if trained and not weights:
            found = ", ".join(name or "the model itself" for name in last)
            raise LayerNotRunError(
                f"Nothing to precondition: {found} is the last layer, which keeps its plain gradient (as do layers "
                "that share its weight). Pass skip_last=False to precondition it, too."
            )
        return weights

    def _system(self, shared: SharedWeight, summaries: list[Summary], processes: Processes) -> System:
        total = sum(one.rows for one in summaries)
        scale = float(total) if self.gram == "mean" else 1.0
        joint = self._joint or shared.rows.geometry.dims > 0
        settings = SystemSettings(self.steps, joint, scale / self.tau_theta, scale, total)
        folded = any(one.folded for one in summaries)
        size = min(total, shared.columns) ** 2 * shared.rows.groups * shared.dtype.itemsize
        if not folded and self.steps is not None and size > GRAM_BYTES:
            own = [call for tally in shared.tallies for call in tally.kept]
            return matrix_free_system(shared, settings, own, processes)
        if folded or total >= shared.rows.columns:
            return feature_system(shared, settings, processes)
        calls = []
        for index, (tally, bias) in enumerate(zip(shared.tallies, shared.bias_of, strict=True)):
            shapes = [one.shapes[index] for one in summaries]
            calls += processes.calls(tally.kept, shapes, bias, shared.weight.device)
        return batch_system(shared, settings, calls)

    def attach(self, optimizer: Optimizer) -> Self:
        """Preconditions before every ``optimizer.step()``, until :meth:`detach`.

        A GradScaler works as usual: it unscales first, and the inputs of steps that it skips are forgotten.

        Raises:
            OptimizerError: If the optimizer does not hold the weights of the layers.
            ClosureError: If it evaluates the model itself (LBFGS).
        """
        self._check_attached()
        inner = _stepping(optimizer)
        if isinstance(inner, LBFGS):
            raise ClosureError(
                "LBFGS runs the model inside its step, so there is no moment to precondition. Use an optimizer that "
                "takes one gradient per step."
            )
        held = {id(parameter) for one in inner.param_groups for parameter in one["params"]}
        missing = [tally.name for tally in self._trained() if id(tally.weight()) not in held]
        if missing:
            raise OptimizerError(
                f"Expected an optimizer that holds the weights of all layers; it does not hold those of "
                f"{some(missing, 5)}. Make it from the same model, or leave these layers out with exclude=; with "
                "several optimizers, make one ProxProp for each."
            )
        attached = [getattr(hook, "__self__", None) for hook in inner._optimizer_step_pre_hooks.values()]
        mine = {id(one.weight()) for one in self._tallies if one.shape}
        if any(other is self for other in attached):
            return self
        for other in attached:
            if isinstance(other, ProxProp) and any(id(one.weight()) in mine for one in other._tallies if one.shape):
                raise OptimizerError(
                    "Another ProxProp is attached to this optimizer for the same layers, which would be preconditioned "
                    "twice. Call detach() on it first (or run the cell that makes the optimizer again)."
                )
        self._handles.append(inner.register_step_pre_hook(self._before_step))
        return self

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch passes the optimizer itself as the first argument.
        closure = kwargs.get("closure", next((one for one in args if callable(one) and one is not optimizer), None))
        if closure is not None:
            raise ClosureError(
                "Expected optimizer.step() without a closure, which would run the model inside the step. Call "
                "loss.backward() before optimizer.step()."
            )
        still = all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if still and not any(tally.calls for tally in self._tallies):
            # torch's distributed checkpoints take an empty step before loading, to make the optimizer's state.
            return
        infinite: Tensor | None = getattr(optimizer, "found_inf", None)
        if infinite is not None and bool(infinite.any()):
            # With a GradScaler, a fused optimizer itself skips this step.
            self.clear()
            return
        # A fused optimizer divides by the GradScaler's factor itself, after us. All directions, also those of conjugate
        # gradients, are homogeneous in the gradient, so the division may come before or after.
        self.precondition()

    def clear(self) -> None:
        """Forgets the inputs so far, as after a step."""
        for tally in self._tallies:
            tally.clear()
        self._capture.last.clear()

    def detach(self) -> None:
        """Stops listening and removes all hooks from model and optimizers; a second call does nothing."""
        self._capture.active = False
        _remove(self._handles)
        self._handles.clear()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return (
            f"ProxProp({len(self.layers)} layers, mode={self.mode!r}, tau_theta={self.tau_theta}, gram={self.gram!r}, "
            f"skip_last={self.skip_last})"
        )


def read_mode(mode: str) -> tuple[int | None, bool]:
    """Returns the steps of conjugate gradients of a mode (None for "exact"), and whether they are joint."""
    if mode == "exact":
        return None, False
    match = re.fullmatch(r"cg([1-9]\d*)(-joint)?", mode) if isinstance(mode, str) else None
    if match is None:
        raise OptionError(
            "Expected mode 'exact', 'cgN' with N >= 1 steps of conjugate gradients ('cg3'), or 'cgN-joint' for one "
            f"step length per layer; found {mode!r}."
        )
    return int(match.group(1)), match.group(2) is not None


def _stepping(optimizer: Any) -> Optimizer:
    """Returns the optimizer that really steps, inside wrappers such as accelerate's, timm's Lookahead, or SAM."""
    inner, found = optimizer, optimizer
    while found is not None:
        inner = found
        held = (getattr(inner, name, None) for name in ("optimizer", "_base_optimizer", "base_optimizer"))
        found = next((one for one in held if isinstance(one, Optimizer)), None)
    if not isinstance(inner, Optimizer):
        raise OptimizerError(f"Expected a torch.optim.Optimizer; found {type(optimizer).__name__}.")
    if not getattr(type(inner).step, "hooked", False):
        raise OptimizerError(
            f"The step of {type(inner).__name__} runs no hooks, so nothing can be done before it. Call precondition() "
            "yourself, after backward()."
        )
    return inner


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
