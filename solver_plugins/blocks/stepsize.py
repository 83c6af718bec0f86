"""The Lipschitz constant of a block: certified at rest, followed while the weights move.

Between two certificates every training forward takes three warm power steps, and more after a jump of the weights; see
:mod:`solver_plugins.operators.tracking`. A solve converges above half of the true constant. Steps are taken only where
the weights have moved, so a recomputed (checkpointed) forward and a further micro-batch see the same constant, and
nothing synchronises with the host.

In evaluation the constant is certified again as soon as the weights have moved, so that a model computes what it will
compute after saving and loading; on an accelerator, where looking would stall, only ``eval()`` looks. One look serves
everything that evaluation keeps: the constant, the Gram matrix and the collapsed weight.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from solver_plugins.blocks.shell import Refusing
from solver_plugins.errors import OptionError, SolverPluginsError, SolverPluginsWarning, WeightError, warn
from solver_plugins.operators import (
    Geometry,
    at_rest,
    follow,
    image_of,
    is_eager,
    is_faked,
    lipschitz_from_kernel,
    power_steps,
    rescaled_bound,
    start_vectors,
)
from solver_plugins.solve import Solver, working_dtype

WARM_UP = 16
"""Power steps behind a certificate: the vectors then start close to the top singular directions."""
JUMP = 0.2
"""Weights that turned by more than this share are new to the vectors, which then take more steps."""
BATCH_ROUNDS = 1
"""How often three power steps are taken for the scales of a batch; tests/blocks/test_step_truth.py checks it."""
STEP_BUFFERS = ("L", "power_vectors", "power_ratio", "image", "certified_L", "followed")
KEPT_BUFFERS = (*STEP_BUFFERS, "diagonal_reference", "residual", "channel_gain", "channel_shift", "blend")
"""All buffers that keep their precision when the weights lose theirs."""


class TrackedStep(Refusing):
    """Mixin that owns the buffers behind a step size. All are non-persistent: weights alone determine them.

    Attributes:
        L: ``lambda_max(A A^T)``, a 0-d tensor.
        power_vectors: Where the power iteration stands, one vector per frequency of a coarse grid.
        power_ratio: Certified constant over power estimate, at the last certificate.
        image: ``A r`` of the weights that ``L`` belongs to, for a fixed vector ``r``: it tells whether they have moved.
        certified_L: The constant at the last certificate.
        followed: 1 if ``L`` has followed the weights since then, else 0.
        certify_in_evaluation: Whether ``eval()`` certifies (default). Set to False on this class if it is called every
            few steps on a model with many convolutions, where a certificate takes seconds.
    """

    certify_in_evaluation: ClassVar[bool] = True
    L: Tensor
    power_vectors: Tensor
    power_ratio: Tensor
    image: Tensor
    certified_L: Tensor
    followed: Tensor
    geometry: Geometry

    kernel_reader: "ClassVar[staticmethod[[nn.Module], tuple[Tensor, Geometry]]]"
    solver: Solver

    def _kernel(self) -> Tensor:
        """Returns the layer's weight as a kernel ``[n2, n1/groups, *k]``."""
        return type(self).kernel_reader(self)[0]

    def _kernel_at_rest(self) -> Tensor:
        """Returns the weight outside of a forward pass, where looking must change nothing."""
        with at_rest(self):
            return self._kernel()

    def _reference(self) -> Tensor | None:
        """Returns the diagonal that ``L`` belongs to, where a norm is folded into the map; see ``rescaled_bound``."""
        return self._buffers.get("diagonal_reference")

    def _new_reference(self, kernel: Tensor) -> dict[str, Tensor]:
        """Returns the diagonal that a new certificate is made for, under the name of its buffer."""
        return {}

    def _register_step(self, kernel: Tensor) -> None:
        one = torch.ones((), dtype=working_dtype(kernel.dtype), device=kernel.device)
        self.register_buffer("L", one, persistent=False)
        self.register_buffer("power_vectors", start_vectors(kernel.detach(), self.geometry), persistent=False)
        self.register_buffer("image", one.new_zeros(kernel.shape[0]), persistent=False)
        for name in ("power_ratio", "certified_L", "followed"):
            self.register_buffer(name, torch.ones_like(one), persistent=False)
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

        ``gram`` is ``A A^T``, where this forward has computed it already.
        """
        kernel = kernel.detach()
        at_hand = is_eager(kernel.device) and type(kernel) is Tensor
        if at_hand and not self.training and self.certify_in_evaluation:
            self.certify_if_moved()
            return self.L.clone()
        if not self.training and torch.compiler.is_exporting():
            # The weights of an exported program are those of this moment, and eval() has certified their constant.
            return self.L
        image = image_of(kernel)
        change = _change(image, self.image)
        still = _within_rounding(change)
        if at_hand and still:
            return self.L.clone()
        if at_hand and not self.training:
            self._drop_gram()
        constant, vectors = self._estimate(kernel, image, self._reference(), gram)
        moved = ~still & torch.isfinite(constant)
        constant = torch.where(moved, constant, self.L)
        # A transform of torch.func computes for weights that are not the block's own.
        if self.training and not torch._C._are_functorch_transforms_active():
            known = self.power_vectors[..., : vectors.shape[-1]]
            known.copy_(torch.where(moved, vectors, known))
            self.image.copy_(torch.where(moved, image, self.image))
            self.followed.copy_(torch.where(moved, 1.0, self.followed))
            self.L.copy_(constant)
        return constant

    def _estimate(
        self, kernel: Tensor, image: Tensor, diagonal: Tensor | None, gram: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the constant of ``diag(d) A`` by power steps from where they stand, and where they stand then."""
        jumped = False
        if is_eager(kernel.device) and type(kernel) is Tensor:
            # A common factor leaves singular vectors where they are.
            known = self.image
            factor = torch.dot(image, known) / torch.dot(known, known).clamp_min(torch.finfo(known.dtype).tiny)
            jumped = not _change(image, factor * known) <= JUMP
        estimate, vectors = follow(kernel, self.geometry, self.power_vectors, diagonal, gram, patient=jumped)
        return torch.as_tensor(estimate, dtype=self.L.dtype, device=self.L.device) * self.power_ratio, vectors

    @torch.no_grad()
    def _scaled_L(self, kernel: Tensor, constant: Tensor, diagonal: Tensor, batch: bool) -> Tensor:
        """Returns the constant of ``diag(d) A`` for a folded norm, from that of ``A`` with the certified scales.

        It depends on the weights and the batch alone, so a recomputed forward sees the same number. ``batch``: ``d`` is
        of this batch, which the certified scales may be far from.
        """
        reference = self._reference()
        assert reference is not None
        bound = rescaled_bound(constant, diagonal, reference)
        if not batch:
            return bound
        # As many steps in a compiled graph as without one, so that both take the same step size.
        found, _ = follow(kernel.detach(), self.geometry, self.power_vectors, diagonal, rounds=BATCH_ROUNDS)
        estimate = torch.as_tensor(found, dtype=self.L.dtype, device=self.L.device) * self.power_ratio
        return torch.where(torch.isfinite(estimate), torch.minimum(estimate, bound), bound)

    @torch.no_grad()
    def compute_step(self, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
        """Computes the buffers behind the step size without writing them; see :meth:`refresh_step`."""
        if method not in ("certified", "power"):
            raise OptionError(
                f"Expected method 'certified' or 'power'; found {method!r}. (An 'exact' constant holds for one input "
                "size only, and a block must be safe for all.)"
            )
        kernel: Any = self._kernel_at_rest().detach()
        if hasattr(kernel, "full_tensor"):
            # Where there are shards of it (FSDP2) all processes certify, or none does.
            kernel = kernel.full_tensor()
        reference = self._new_reference(kernel)
        diagonal = next(iter(reference.values()), None)
        # From the same start each time: what a block computes depends on its weights, not on their history.
        start = start_vectors(kernel, self.geometry)
        constant = lipschitz_from_kernel(kernel, self.geometry, method=method, diagonal=diagonal, tolerance=tolerance)
        vectors = power_steps(kernel, self.geometry, start, WARM_UP, diagonal, share=True)[1][-1]
        estimate = torch.as_tensor(follow(kernel, self.geometry, vectors, diagonal)[0]).to(constant)
        ratio = torch.where(estimate > 0, constant / estimate.clamp_min(torch.finfo(constant.dtype).tiny), 1.0)
        return {
            "L": constant,
            "power_vectors": vectors,
            "power_ratio": ratio.clamp_min(1.0),
            "image": image_of(kernel),
            "certified_L": constant,
            "followed": torch.zeros_like(constant),
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
        """Recomputes ``L`` from the weights and returns it; arguments and errors are those of ``refresh_steps``."""
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
        """Certifies ``L`` anew if the weights, or a folded norm, are not those of the last certificate.

        What else was kept for evaluation is dropped then.
        """
        kernel = self._kernel_at_rest().detach()
        if not self._in_reach(kernel):
            return
        image = image_of(kernel)
        same = torch.equal(image, self.image) and not bool(self.followed)
        for name, value in self._new_reference(kernel).items():
            same = same and bool(_within_rounding(_change(value, getattr(self, name))))
        # Weights that are not finite have no constant, and keep the one they had.
        if same:
            return
        self._drop_gram()
        if not bool(torch.isfinite(image).all()):
            return
        try:
            self.refresh_step()
        except WeightError:
            if self.solver.needs_constant:
                raise

    @torch.no_grad()
    def origin(self) -> tuple[str, Tensor | None]:
        """Returns where ``L`` comes from, and what it would be now over what it was at the last certificate.

        It is "certified", "followed" by power steps since then, "stale" (the weights have moved; the next forward pass
        updates it), or "unknown" (the weights have no values on this device).
        """
        kernel = self._kernel_at_rest().detach()
        if not self._in_reach(kernel):
            return "unknown", None
        image, origin, constant = image_of(kernel), "followed", self.L
        if not _within_rounding(_change(image, self.image)):
            origin, constant = "stale", self._estimate(kernel, image, self._reference())[0]
        elif not self.followed and all(
            _within_rounding(_change(value, getattr(self, name))) for name, value in self._new_reference(kernel).items()
        ):
            origin = "certified"
        return origin, constant / self.certified_L if self.certified_L > 0 else None

    def _in_reach(self, kernel: Tensor) -> bool:
        """Whether the weights have values (not meta, not a shard, not faked) on the device of the buffers.

        While a model moves to another device, a layer and the host of its solver stand apart for a moment.
        """
        without = kernel.is_meta or self.L.is_meta or hasattr(kernel, "device_mesh") or is_faked()
        return not without and kernel.device == self.L.device

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
        settled = known and bool(_within_rounding(_change(image_of(kernel), self.image)))
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
            self.image.copy_(image_of(kernel))
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


def _change(new: Tensor, old: Tensor) -> Tensor:
    """Returns how far apart two vectors are, in units of the second; NaN where there is one."""
    apart, size = (new - old).abs().amax(), old.abs().amax()
    return apart / size.clamp_min(torch.finfo(size.dtype).tiny)


def _within_rounding(change: Tensor) -> Tensor:
    """Whether it is no more than what another order of summation makes; not where there is a NaN."""
    return change <= 64 * torch.finfo(change.dtype).eps
