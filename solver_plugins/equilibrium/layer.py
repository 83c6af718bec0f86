"""One layer of an equilibrium network."""

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from solver_plugins.equilibrium.activations import allowed_activation
from solver_plugins.equilibrium.norms import certified_norm, check_norm, initialise_, project_, rescaled_kernel
from solver_plugins.equilibrium.problem import Unit
from solver_plugins.errors import OptionError, ShapeError, did_you_mean
from solver_plugins.operators import geometry_of, operator_from_kernel, read_layer
from solver_plugins.prox.activations import Activation

Constraint = Literal["aol", "none"]


class OptEqLayer(nn.Module):
    """The unit layer ``f(z, x) = a W^T s(W z + U x + b) + (1 - a) z`` of equation (5).

    With ``|W| <= 1`` it is a mixture of the identity and the proximal map of a convex function (Theorem 1). The step
    ``a`` belongs to the network (:class:`DeepOptEq`) and is 1 by default.

    Args:
        W: A Linear or Conv2d without bias from the state ``z`` to the hidden features; its weights are initialised
            again.
        U: A Linear or Conv2d from the input ``x`` to the hidden features, with or without the bias ``b``.
        activation: ``s``: monotone with slopes in [0, 1], as a module, function or name ("relu", "tanh", ...).
        constraint: How ``|W|`` stays bounded. "aol": by construction, whatever training does to the weight (see
            :func:`~solver_plugins.equilibrium.norms.rescaled_kernel`). "none": by its initialisation, as in the paper,
            and by :meth:`project` if you call it.
        norm: The bound, in (0, 1]. Below 1 there is exactly one equilibrium.

    Raises:
        NotProximalError: If the activation is not allowed.
        OptionError: If the constraint is unknown, or the norm is out of range.
        ShapeError: If ``W`` has a bias, or the two layers do not fit.
    """

    weights_read_directly: ClassVar[tuple[str, ...]] = ("W",)
    """Layers that are never called, so hooks on them never run (ProxProp skips them)."""

    def __init__(
        self,
        W: nn.Linear | nn.Conv2d,
        U: nn.Linear | nn.Conv2d,
        *,
        activation: Activation = "relu",
        constraint: Constraint = "aol",
        norm: float = 0.9,
    ) -> None:
        super().__init__()
        if constraint not in get_args(Constraint):
            raise OptionError(
                f"Unknown constraint {constraint!r}.{did_you_mean(str(constraint), get_args(Constraint))}"
            )
        check_norm(norm)
        self.prior = allowed_activation(activation)
        # Optimizers have to find a module with its own parameters (PReLU).
        self.activation = activation if isinstance(activation, nn.Module) else None
        _check_layers(W, U)
        self.W, self.U = W, U
        self.constraint, self.norm = constraint, float(norm)
        initialise_(W, norm)
        self._geometry = geometry_of(W)
        if constraint == "aol":
            # Raises an error for an unsupported convolution now, not in the first forward pass.
            with torch.no_grad():
                rescaled_kernel(W.weight, self._geometry, norm)

    @classmethod
    def linear(
        cls, state: int, inputs: int, hidden: int | None = None, *, device: Any = None, **options: Any
    ) -> "OptEqLayer":
        """Makes a layer of vectors: ``W`` is ``hidden x state`` (square by default), ``U`` is ``hidden x inputs``.

        ``options`` are those of the constructor, and ``dtype``.
        """
        made = {"device": device, "dtype": options.pop("dtype", None)}
        hidden = state if hidden is None else hidden
        return cls(nn.Linear(state, hidden, bias=False, **made), nn.Linear(inputs, hidden, **made), **options)

    @classmethod
    def conv2d(
        cls,
        state: int,
        inputs: int,
        hidden: int | None = None,
        *,
        kernel_size: int = 3,
        inject_size: int | None = None,
        stride: int = 1,
        device: Any = None,
        **options: Any,
    ) -> "OptEqLayer":
        """Makes a layer of feature maps; ``z`` and ``x`` have the same height and width.

        ``state``, ``inputs`` and ``hidden`` (by default ``state``) count channels. ``kernel_size``, an odd number, is
        that of ``W``, ``inject_size`` that of ``U``. With a ``stride`` of both, hidden features have a lower resolution
        than the state. ``options`` are those of the constructor, and ``dtype``.
        """
        made = {"device": device, "dtype": options.pop("dtype", None)}
        hidden = state if hidden is None else hidden
        inject_size = kernel_size if inject_size is None else inject_size
        for size in (kernel_size, inject_size):
            if size % 2 == 0:
                raise OptionError(f"Expected an odd kernel size, whose output has the input's size; found {size}.")
        W = nn.Conv2d(state, hidden, kernel_size, stride, kernel_size // 2, bias=False, **made)
        return cls(W, nn.Conv2d(inputs, hidden, inject_size, stride, inject_size // 2, **made), **options)

    @property
    def state_features(self) -> int:
        """Length, or number of channels, of ``z``."""
        return self.W.weight.shape[1]

    def kernel(self) -> Tensor:
        """Returns the weight that the layer applies, after the constraint."""
        if self.constraint == "aol":
            return rescaled_kernel(self.W.weight, self._geometry, self.norm)
        return self.W.weight

    def certified_norm(self) -> Tensor:
        """Returns a certified upper bound on ``|W|``, for every input size, as a 0-d tensor."""
        return certified_norm(self.kernel().detach(), self._geometry)

    @torch.no_grad()
    def project(self) -> Tensor:
        """Scales ``W`` so that its certified norm is at most ``norm``; returns the norm that it had.

        If the constraint holds by construction, ``W`` stays unchanged.
        """
        return self.certified_norm() if self.constraint == "aol" else project_(self.W, self.norm)

    def unit(self, x: Tensor, dtype: torch.dtype | None = None) -> Unit:
        """Returns the unit for an input, a map of ``z`` alone; ShapeError if ``U x`` and ``W z`` differ in size."""
        dtype = dtype or torch.promote_types(self.W.weight.dtype, torch.float32)
        kernel = self.kernel().to(dtype)
        space = tuple(x.shape[-self._geometry.dims :]) if self._geometry.dims else ()
        operator = operator_from_kernel(kernel, self._geometry, (self.state_features, *space))
        offset = self._injected(x.to(dtype), dtype)
        expected = operator.output_shape
        if tuple(offset.shape[-len(expected) :]) != expected:
            raise ShapeError(
                f"Expected U x of shape (..., {', '.join(map(str, expected))}), as W z has; found "
                f"{tuple(offset.shape)}. Give U the stride and padding of W."
            )
        return Unit(operator, offset, self.prior)

    def forward(self, z: Tensor, x: Tensor, alpha: float = 1.0) -> Tensor:
        return self.unit(x, z.dtype).step(z, alpha)

    def extra_repr(self) -> str:
        return f"activation={self.prior!r}, constraint={self.constraint!r}, norm={self.norm:g}"

    def _injected(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.U.weight.dtype == dtype:
            return self.U(x)
        # The weights are in half precision; the solve runs in float32, because its tolerance is below their rounding.
        wide = {name: parameter.to(dtype) for name, parameter in self.U.named_parameters()}
        return torch.func.functional_call(self.U, wide, (x,))


def _check_layers(W: nn.Module, U: nn.Module) -> None:
    if W.bias is not None:
        raise ShapeError("Expected W without a bias: the bias b belongs to U.")
    hidden, found = read_layer(W)[0].shape[0], read_layer(U)[0].shape[0]
    if hidden != found or geometry_of(W).dims != geometry_of(U).dims:
        raise ShapeError(
            f"Expected W and U of one kind with the same number of outputs; found {type(W).__name__} with {hidden} and "
            f"{type(U).__name__} with {found}."
        )
