"""The Lipschitz constant of a block: certified at rest, followed while the weights move.

Between two certificates every training forward takes three warm power steps. One is not enough: where Adam turns the
top singular direction, or a layer starts from zeros, a single step is too small by up to 10x and the solve blows up;
three stayed above half of the truth, the limit of convergence, in every run tried, and what they still gain is
extrapolated. They are taken only where the weights have moved, so a recomputed (checkpointed) forward and a further
micro-batch see the same constant. Nothing of it synchronises with the host.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from solver_plugins.errors import OptionError, SolverPluginsError, SolverPluginsWarning, warn
from solver_plugins.operators import Geometry, lipschitz_from_kernel, power_step, power_steps, start_vectors
from solver_plugins.solvers import working_dtype

WARM_UP = 40
"""Power steps behind a certificate: the vectors then start close to the top singular directions."""
STEP_BUFFERS = ("L", "power_vectors", "power_quotient", "power_ratio", "certified_quotient")


class TrackedStep(nn.Module):
    """Mixin that owns the buffers behind a step size. All are non-persistent: weights alone determine them.

    Attributes:
        L: ``lambda_max(A A^T)``, a 0-d tensor.
        power_vectors: Where the power iteration stands, one vector per frequency of a coarse grid.
        power_quotient: The quotient that these vectors gave. They give another one exactly if the weights have moved.
        power_ratio: Certified constant over power estimate, at the last certificate.
        certified_quotient: The quotient at the last certificate.
    """

    L: Tensor
    power_vectors: Tensor
    power_quotient: Tensor
    power_ratio: Tensor
    certified_quotient: Tensor
    geometry: Geometry

    def _kernel(self) -> Tensor:
        """Returns the layer's weight as a kernel ``[n2, n1/groups, *k]``."""
        raise TypeError(f"{type(self).__name__} does not say how its kernel is read.")

    def _register_step(self, kernel: Tensor) -> None:
        one = torch.ones((), dtype=working_dtype(kernel.dtype), device=kernel.device)
        self.register_buffer("L", one, persistent=False)
        self.register_buffer("power_vectors", start_vectors(kernel.detach(), self.geometry), persistent=False)
        for name in STEP_BUFFERS[2:]:
            self.register_buffer(name, torch.zeros_like(one), persistent=False)
        self.register_load_state_dict_post_hook(_certify_after_loading)
        if not kernel.is_meta:
            self.refresh_step()

    @torch.no_grad()
    def _current_L(self, kernel: Tensor) -> Tensor:
        """Returns the constant for this forward; in training the buffers follow the weights, too."""
        kernel = kernel.detach()
        (first, second, third), (_, vectors, _) = power_steps(kernel, self.geometry, self.power_vectors, 3)
        gain = (third / second.clamp_min(torch.finfo(third.dtype).tiny)).clamp(1.0, 2.0)
        estimate = third * gain.square() * self.power_ratio.clamp_min(1.0)
        moved = (first != self.power_quotient) & torch.isfinite(estimate)
        constant = torch.where(moved, estimate, self.L)
        if self.training:
            self.L.copy_(constant)
            self.power_vectors.copy_(torch.where(moved, vectors, self.power_vectors))
            self.power_quotient.copy_(torch.where(moved, third, self.power_quotient))
        return constant

    @torch.no_grad()
    def compute_step(self, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
        """Computes the buffers behind the step size without writing them; see :meth:`refresh_step`."""
        if method not in ("certified", "power"):
            raise OptionError(
                f"Expected method 'certified' or 'power'; found {method!r}. (An 'exact' constant holds for one input "
                "size only, and a block must be safe for all.)"
            )
        kernel = self._kernel().detach()
        constant = lipschitz_from_kernel(kernel, self.geometry, method=method, tolerance=tolerance)
        # From the same start each time: what a block computes depends on its weights, not on their history.
        quotients, steps = power_steps(kernel, self.geometry, start_vectors(kernel, self.geometry), WARM_UP)
        # The vectors one step back: the next step from them gives this quotient again, unless the weights have moved.
        quotient, vectors = quotients[-1], steps[-2]
        ratio = torch.where(quotient > 0, constant / quotient.clamp_min(torch.finfo(constant.dtype).tiny), 1.0)
        return {
            "L": constant,
            "power_vectors": vectors,
            "power_quotient": quotient,
            "power_ratio": ratio.clamp_min(1.0),
            "certified_quotient": quotient,
        }

    def write_step(self, values: dict[str, Tensor]) -> None:
        """Writes what :meth:`compute_step` computed, in place: compiled graphs hold these very buffers."""
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
        """Sets the mode; on leaving training, ``L`` is certified anew if the weights have moved.

        So a model in evaluation computes what it will compute after saving and loading its weights.
        """
        leaving = self.training and not mode
        super().train(mode)
        if leaving and "L" in self._buffers:
            self._certify_if_moved()
        return self

    def _certify_if_moved(self) -> None:
        kernel = self._kernel().detach()
        # Sharded (DTensor) weights have no values here, and weights that are not finite no constant: both keep L.
        if kernel.is_meta or hasattr(kernel, "device_mesh"):
            return
        quotient = power_step(kernel, self.geometry, self.power_vectors)[0]
        tracked = self.power_quotient != self.certified_quotient
        if bool((quotient != self.power_quotient) | tracked) and bool(torch.isfinite(kernel).all()):
            self.refresh_step()

    def reset_parameters(self) -> None:
        """Initialises the weights as the layer does, and certifies ``L`` for them."""
        initialise = getattr(super(), "reset_parameters", None)
        if initialise is not None:
            initialise()
        if "L" in self._buffers and not self._kernel().is_meta:
            self.refresh_step()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = {name: self._buffers[name] for name in STEP_BUFFERS if name in self._buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            # Constants stay in float32 at least: as a half, L would overflow or lose its certificate.
            if buffer is not None and after is not None and after.dtype.itemsize < 4:
                self._buffers[name] = buffer.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, value in state_dict.items():
            own = name.startswith(prefix) and name.removeprefix(prefix) in self._parameters
            if own and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                # As torch does for a wrong shape: report (the last argument collects) and leave this layer as it is.
                rest[-1].append(f"Expected finite weights for a solver block; found NaN or infinite ones in {name}.")
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _certify_after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    # A post hook, not part of the loading itself: a parametrised weight is only whole once its children have loaded.
    assert isinstance(module, TrackedStep)
    if module._kernel().is_meta:
        return
    try:
        module.refresh_step()
    except SolverPluginsError as error:
        warn(f"The step size of a loaded {type(module).__name__} is not certified: {error}", SolverPluginsWarning)
