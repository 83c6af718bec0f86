"""The Lipschitz constant of a block: certified at rest, followed while the weights move.

Between two certificates every training forward takes three warm power steps. One is not enough: where Adam turns the
top singular direction, or a layer starts from zeros, a single step is too small by up to 10x and the solve blows up.
What three steps still gain is extrapolated, a little of a generic direction is mixed in so that none is ever lost, and
the largest row is a floor. A solve converges above half of the true constant; training loops that were tried (SGD,
momentum, Adam, AdamW, weights of zero, sign flips) stayed above 0.59. Steps are taken only where the weights have
moved, so a recomputed (checkpointed) forward and a further micro-batch see the same constant, and nothing synchronises
with the host.

In evaluation the constant is certified again as soon as the weights have moved, so that a model computes what it will
compute after saving and loading; on an accelerator, where looking would stall, only ``eval()`` looks.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from solver_plugins.blocks.shell import Shell
from solver_plugins.errors import OptionError, SolverPluginsError, SolverPluginsWarning, warn
from solver_plugins.operators import (
    Geometry,
    WarmSteps,
    at_rest,
    is_eager,
    is_faked,
    lipschitz_from_kernel,
    power_quotient,
    power_steps,
    start_vectors,
    warm_steps,
)
from solver_plugins.solve import working_dtype

WARM_UP = 16
"""Power steps behind a certificate: the vectors then start close to the top singular directions."""
GENERIC_SHARE = 0.02
"""How much of a generic direction is mixed into the vectors; costs 0.04% of the estimate."""
STEP_BUFFERS = ("L", "power_vectors", "power_quotient", "power_ratio", "certified_quotient")
KEPT_BUFFERS = (*STEP_BUFFERS, "diagonal_reference", "residual", "channel_gain", "channel_shift", "blend")
"""All buffers that keep their precision when the weights lose theirs."""


class TrackedStep(Shell):
    """Mixin that owns the buffers behind a step size. All are non-persistent: weights alone determine them.

    Attributes:
        L: ``lambda_max(A A^T)``, a 0-d tensor.
        power_vectors: Where the power iteration stands, one vector per frequency of a coarse grid.
        power_quotient: The quotient that these vectors gave; they give another one, beyond rounding, if the weights
            have moved.
        power_ratio: Certified constant over power estimate, at the last certificate.
        certified_quotient: The quotient at the last certificate.
        certify_in_evaluation: Whether ``eval()`` certifies (default). Set to False on this class if it is called every
            few steps on a model with many convolutions, where a certificate takes seconds.
    """

    certify_in_evaluation: ClassVar[bool] = True
    L: Tensor
    power_vectors: Tensor
    power_quotient: Tensor
    power_ratio: Tensor
    certified_quotient: Tensor
    geometry: Geometry

    def _kernel(self) -> Tensor:
        """Returns the layer's weight as a kernel ``[n2, n1/groups, *k]``."""
        raise TypeError(f"{type(self).__name__} does not say how its kernel is read.")

    def _kernel_at_rest(self) -> Tensor:
        """Returns the weight outside of a forward pass, where looking must change nothing."""
        with at_rest(self):
            return self._kernel()

    def _reference(self) -> Tensor | None:
        """Returns the diagonal that ``L`` belongs to, where a norm is folded into the map; see ``rescaled_bound``."""
        return None

    def _new_reference(self, kernel: Tensor) -> dict[str, Tensor]:
        """Returns the diagonal that a new certificate is made for, under the name of its buffer."""
        return {}

    def _register_step(self, kernel: Tensor) -> None:
        one = torch.ones((), dtype=working_dtype(kernel.dtype), device=kernel.device)
        self.register_buffer("L", one, persistent=False)
        self.register_buffer("power_vectors", start_vectors(kernel.detach(), self.geometry), persistent=False)
        for name in STEP_BUFFERS[2:]:
            self.register_buffer(name, torch.zeros_like(one), persistent=False)
        self.register_load_state_dict_post_hook(certify_after_loading)
        if not kernel.is_meta:
            self.refresh_step()

    def _forget_step(self) -> None:
        hooks = self._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if hook is certify_after_loading]:
            del hooks[key]

    @torch.no_grad()
    def _current_L(self, kernel: Tensor, gram: Tensor | None = None) -> Tensor:
        """Returns the constant for this forward; in training the buffers follow the weights, too.

        Args:
            kernel: The weight.
            gram: ``A A^T``, where this forward has computed it already.
        """
        kernel = kernel.detach()
        looking = not self.training and kernel.device.type == "cpu" and not torch.compiler.is_compiling()
        if looking and self.certify_in_evaluation:
            self.certify_if_moved()
            return self.L
        steps = warm_steps(kernel, self.geometry, self.power_vectors, GENERIC_SHARE, self._reference(), gram)
        if isinstance(steps.largest, float) or (is_eager(kernel.device) and type(steps.largest) is Tensor):
            return self._followed_at_once(steps)
        first, second, third, largest = map(torch.as_tensor, (*steps.quotients, steps.largest))
        vectors = self.power_vectors[..., : steps.vectors.shape[-1]]
        gain = (third / second.clamp_min(torch.finfo(third.dtype).tiny)).clamp(1.0, 2.0)
        estimate = torch.maximum(torch.maximum(second, third) * gain.square(), largest)
        estimate = estimate * self.power_ratio.clamp_min(1.0)
        moved = _differ(first, self.power_quotient) & torch.isfinite(estimate)
        constant = torch.where(moved, estimate, self.L)
        if self.training:
            self.L.copy_(constant)
            vectors.copy_(torch.where(moved, steps.vectors, vectors))
            self.power_quotient.copy_(torch.where(moved, third, self.power_quotient))
        return constant

    def _followed_at_once(self, steps: WarmSteps) -> Tensor:
        """Does the same with numbers, where looking at them costs nothing: there are many, and each is quick."""
        first, second, third = map(float, steps.quotients)
        quotient, precision = float(self.power_quotient), torch.finfo(self.L.dtype)
        gain = min(max(third / max(second, precision.tiny), 1.0), 2.0)
        estimate = max(max(second, third) * gain**2, float(steps.largest)) * max(float(self.power_ratio), 1.0)
        # Not a NaN, which every comparison denies.
        still = abs(first - quotient) <= 64 * precision.eps * abs(quotient)
        if still or not estimate <= precision.max:
            return self.L.clone()
        if not self.training:
            return torch.full_like(self.L, estimate)
        self.L.fill_(estimate)
        self.power_vectors[..., : steps.vectors.shape[-1]].copy_(steps.vectors)
        self.power_quotient.fill_(third)
        return self.L.clone()

    @torch.no_grad()
    def compute_step(self, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
        """Computes the buffers behind the step size without writing them; see :meth:`refresh_step`."""
        if method not in ("certified", "power"):
            raise OptionError(
                f"Expected method 'certified' or 'power'; found {method!r}. (An 'exact' constant holds for one input "
                "size only, and a block must be safe for all.)"
            )
        kernel = _gathered(self._kernel_at_rest().detach())
        reference = self._new_reference(kernel)
        diagonal = next(iter(reference.values()), None)
        # From the same start each time: what a block computes depends on its weights, not on their history.
        start = start_vectors(kernel, self.geometry)
        constant = lipschitz_from_kernel(kernel, self.geometry, method=method, diagonal=diagonal, tolerance=tolerance)
        quotients, steps = power_steps(kernel, self.geometry, start, WARM_UP, diagonal, GENERIC_SHARE)
        # The vectors before the last step: a step from them gives this quotient again, unless the weights have moved.
        quotient, vectors = quotients[-1], steps[-2]
        best = torch.maximum(quotient, _largest_row(kernel, diagonal))
        ratio = torch.where(best > 0, constant / best.clamp_min(torch.finfo(constant.dtype).tiny), 1.0)
        return {
            "L": constant,
            "power_vectors": vectors,
            "power_quotient": quotient,
            "power_ratio": ratio.clamp_min(1.0),
            "certified_quotient": quotient,
            **reference,
        }

    def write_step(self, values: dict[str, Tensor]) -> None:
        """Writes what :meth:`compute_step` computed, in place: compiled graphs hold these very buffers."""
        self._drop_gram()
        with torch.no_grad():
            for name, value in values.items():
                buffer = getattr(self, name)
                if buffer.is_meta:
                    # Weights that were assigned to a block made on the meta device: there is no place to write to.
                    self._buffers[name] = value.clone()
                else:
                    buffer.copy_(value)

    def refresh_step(self, method: str = "certified", tolerance: float = 0.1) -> Tensor:
        """Recomputes ``L`` from the weights and returns it.

        Args:
            method: "certified" (never below the truth, for any input size) or "power" (a lower bound).
            tolerance: How far above the truth a certified constant may be.

        Raises:
            WeightError: If the weights are not finite; nothing is changed then.
            OptionError: If the method is another one.
        """
        self.write_step(self.compute_step(method, tolerance))
        return self.L

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; for evaluation ``L`` is certified anew if the weights have moved."""
        super().train(mode)
        if mode:
            self._drop_gram()
        if not mode and "L" in self._buffers and self.certify_in_evaluation:
            self.certify_if_moved()
        return self

    def _drop_gram(self) -> None:
        """Forgets what was kept for evaluation: the weights are, or will be, others."""
        collapsed = vars(self).get("collapsed")
        if collapsed is not None:
            collapsed.drop()
        if self._buffers.get("gram") is not None:
            self._buffers["gram"] = None

    def certify_if_moved(self) -> None:
        """Certifies ``L`` anew if the weights, or a folded norm, are not those of the last certificate."""
        kernel = self._kernel_at_rest().detach()
        if not self._in_reach(kernel):
            return
        moved = _differ(self._quotient(kernel), self.power_quotient)
        moved = moved | _differ(self.power_quotient, self.certified_quotient)
        for name, value in self._new_reference(kernel).items():
            moved = moved | _differ(value, getattr(self, name)).any()
        # Weights that are not finite have no constant, and keep the one they had.
        if bool(moved) and bool(torch.isfinite(kernel).all()):
            self.refresh_step()

    def _in_reach(self, kernel: Tensor) -> bool:
        """Whether the weights have values (not meta, not a shard, not faked) on the device of the buffers.

        While a model moves to another device, a layer and the host of its solver stand apart for a moment.
        """
        without = kernel.is_meta or self.L.is_meta or hasattr(kernel, "device_mesh") or is_faked()
        return not without and kernel.device == self.L.device

    def _quotient(self, kernel: Tensor) -> Tensor:
        return power_quotient(kernel, self.geometry, self.power_vectors, self._reference())

    def reset_parameters(self) -> None:
        """Initialises the weights as the layer does, and certifies ``L`` for them."""
        initialise = getattr(super(), "reset_parameters", None)
        if initialise is not None:
            initialise()
        if "L" in self._buffers and not self._kernel_at_rest().is_meta:
            self.refresh_step()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._drop_gram()
        before = {name: buffer for name, buffer in self._buffers.items() if name in KEPT_BUFFERS and buffer is not None}
        kernel = self._kernel_at_rest().detach()
        known = "L" in before and self._in_reach(kernel)
        settled = known and not bool(_differ(self._quotient(kernel), self.power_quotient))
        certified = known and not bool(_differ(self.power_quotient, self.certified_quotient))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            # Constants stay in float32 at least: as a half, L would overflow or lose its certificate.
            if after is not None and after.dtype.itemsize < 4:
                self._buffers[name] = buffer.to(after.device)
        dtype = kernel.dtype
        kernel = self._kernel_at_rest().detach()
        rounded = kernel.dtype.itemsize < dtype.itemsize
        if known and rounded and self._in_reach(kernel) and bool(torch.isfinite(kernel).all()):
            # Rounded weights are others: what is computed from now on is what will be computed after loading them.
            self.refresh_step()
        elif settled and self._in_reach(kernel):
            # The same weights in another dtype or on another device round differently, and have not moved.
            self.power_quotient.copy_(self._quotient(kernel))
            if certified:
                self.certified_quotient.copy_(self.power_quotient)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self._parameters:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and not value.is_meta and not bool(torch.isfinite(value).all()):
                # As torch does for a wrong shape: report (the last argument collects) and leave this layer as it is.
                found = f"found NaN or infinite ones in {prefix}{name}"
                rest[-1].append(f"Expected finite weights for a solver block; {found}.")
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)


def certify_after_loading(module: nn.Module, incompatible_keys: Any = None) -> None:
    """Certifies ``L`` of a block that has just been loaded, unless a part of it still has no values."""
    # A post hook, not part of the loading itself: a parametrised weight is only whole once its children have loaded.
    assert isinstance(module, TrackedStep)
    module._drop_gram()
    kernel = module._kernel_at_rest()
    if kernel.is_meta or any(value.is_meta for value in module._new_reference(kernel).values()):
        return
    try:
        module.refresh_step()
    except SolverPluginsError as error:
        warn(f"The step size of a loaded {type(module).__name__} is not certified: {error}", SolverPluginsWarning)


def _gathered(kernel: Tensor) -> Tensor:
    """Returns a whole kernel where there are shards of it (FSDP2): all processes certify, or none does."""
    return kernel.full_tensor() if hasattr(kernel, "full_tensor") else kernel


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether two quotients are of different weights: more apart than another order of summation puts them."""
    return ~((one - other).abs() <= 64 * torch.finfo(one.dtype).eps * other.abs())


def _largest_row(kernel: Tensor, diagonal: Tensor | None) -> Tensor:
    """Returns the largest diagonal entry of ``A A^T``: a lower bound that no stale vector can miss."""
    rows = kernel.flatten(1).to(working_dtype(kernel.dtype)).square().sum(1)
    return (rows if diagonal is None else rows * diagonal.square()).amax()
