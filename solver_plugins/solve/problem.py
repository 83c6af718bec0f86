"""The convex problem that a block of layers solves, and what is done to its solution.

    F(x) = 1/2 |A^T x - u|^2 - <b, x> + lam/2 |x|^2          minimise F(x) + g(x)              (eq. 5)

Formulation ``paper`` is exactly this, with the step ``t = 1/L``, ``L = lambda_max(A A^T) + lam``. Formulation
``normalized`` is the same problem with ``A/sqrt(L)``, ``sqrt(L) u`` and ``lam/L``: its Lipschitz constant is 1, its
step is the unit step, and so one iteration is the layer followed by its activation, for every prior. In both

    grad F(x) = s (A A^T + lam) x - c,     c = A u + b,     s t = 1/L,     (s, t) = (1/L, 1) or (1, 1/L).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from solver_plugins.operators import LinearOperator, autocast_off, match_dtype, product_dtype
from solver_plugins.prox import Prior, Step
from solver_plugins.solve.steps import times

Formulation = Literal["normalized", "paper"]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Iterates and constants are kept in float32 at least; only the products with ``A`` use a lower precision."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class BlockProblem:
    """One block problem per sample of a batch, ready to be solved.

    Attributes:
        operator: ``A``, with the exact adjoint for the input's size.
        input: ``u``.
        bias: ``b``, broadcastable to the output; a skip connection is part of it. None means zero.
        layer: Computes ``c = A u + b``, the plain layer's output. A sampling solver may never need it.
        dtype: The working precision (see :func:`working_dtype`).
        rounding: Relative rounding error of the products with ``A`` (that of half under autocast).
        prior: ``g``.
        smoothness: The constant ``L`` (with ``lam``) that sets the step; a positive 0-d tensor.
        lam: The strong convexity that is added to ``F``.
        formulation: See the module's docstring.
        gram: ``s A A^T`` as a matrix, where products with it are cheaper; see :mod:`solver_plugins.solve.paths`.
        known: Whether the layer's output is there already, or holds more than a bias per feature.
        result: The dtype of the result; None is that of the plain layer's output.
        gate: ``a`` of :class:`~solver_plugins.solve.Scale`: 0-d, or one number per output feature.
        start: ``v_1``, where that is not :meth:`first`: a sampled gradient's.
    """

    operator: LinearOperator
    input: Tensor
    bias: Tensor | None
    layer: Callable[[], Tensor]
    dtype: torch.dtype
    rounding: float
    prior: Prior
    smoothness: Tensor
    lam: Step
    formulation: Formulation
    gram: Tensor | None = None
    known: bool = False
    result: torch.dtype | None = None
    gate: Tensor | None = None
    start: Tensor | None = None
    _output: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """``c = A u + b``, in the working precision."""
        # Not functools.cached_property: its lock cannot be compiled.
        if self._output is None:
            self._output = self.layer().to(self.dtype)
        return self._output

    @property
    def product_dtype(self) -> torch.dtype:
        """The precision of the products with ``A``: that of the weight, or what autocast makes of it."""
        return product_dtype(self.operator.weight)

    @property
    def step(self) -> Step:
        """The base step ``t``; a schedule multiplies it."""
        return 1.0 if self.formulation == "normalized" else self.smoothness.reciprocal()

    def scaled(self, product: Tensor) -> Tensor:
        """Returns ``s * product`` in the working precision."""
        product = product.to(self.dtype)
        return product / self.smoothness if self.formulation == "normalized" else product

    def hessian(self, x: Tensor) -> Tensor:
        """Returns ``s (A A^T + lam) x``."""
        if self.gram is not None:
            product = functional.linear(match_dtype(x, self.gram), self.gram)
        else:
            # Scaled between the two products: A A^T x itself can overflow a half where the layer's output does not.
            product = self.operator.apply(self.scaled(self.operator.adjoint(x)))
        return product.to(self.dtype) + self.scaled(self.lam * x)

    def make_gram(self, cached: Tensor | None = None) -> Tensor:
        """Returns ``s A A^T`` of a matrix ``A``, in the precision of the products, given ``A A^T`` if it is known."""
        lowered = self.product_dtype
        with autocast_off(self.operator.weight.device):
            if cached is not None:
                return self.scaled(cached).to(lowered)
            matrix = self.operator.folded().weight
            if lowered == self.dtype:
                return self.scaled(matrix @ matrix.t())
            # Scaled before the product, in both factors, so that a half does not overflow.
            root = self.smoothness.rsqrt() if self.formulation == "normalized" else 1.0
            matrix = (matrix.to(self.dtype) * root).to(lowered)
            return matrix @ matrix.t()

    def gradient(self, x: Tensor | None) -> Tensor:
        """Returns ``grad F(x)``; None stands for ``x = 0``, where it costs nothing."""
        return -self.output if x is None else self.hessian(x) - self.output

    def sampled_gradient(self, x: Tensor | None, weights: Tensor) -> Tensor:
        """Returns the unbiased estimate ``A (w * (s A^T x - u)) - b + s lam x`` (eq. 25, with the bias unscaled).

        ``weights``, one per input feature, have mean one; None for ``x`` is zero.
        """
        residual = -self.input if x is None else self.scaled(self.operator.adjoint(x)) - self.input
        estimate = self.operator.apply(weights * residual).to(self.dtype)
        estimate = estimate if self.bias is None else estimate - self.bias
        return estimate if x is None else estimate + self.scaled(self.lam * x)

    def sampled_hessian(self, x: Tensor, weights: Tensor) -> Tensor:
        """Returns ``s (A diag(w) A^T + lam) x``, whose mean over the sampling is :meth:`hessian`."""
        product = self.operator.apply(weights * self.scaled(self.operator.adjoint(x)))
        return product.to(self.dtype) + self.scaled(self.lam * x)

    def descend(self, x: Tensor | None, gradient: Tensor, step: Step) -> Tensor:
        """Returns ``x - step * gradient``, the argument of the next proximal map."""
        move = times(gradient, step)
        return -move if x is None else x - move

    def first(self, step: Step) -> Tensor:
        """Returns ``descend(None, gradient(None), step)``, which for the unit step is the layer's output itself."""
        return times(self.output, step)

    def gated(self, v: Tensor) -> Tensor:
        """Returns ``v_1 + a (v - v_1)``: what a gate makes of an iteration after the first; exact at zero and one."""
        if self.gate is None:
            return v
        start = self.first(self.step) if self.start is None else self.start
        return torch.lerp(start, v, self._per_feature(self.gate))

    def _per_feature(self, values: Tensor) -> Tensor:
        return self.operator.per_feature(values) if values.dim() else values

    def objective(self, x: Tensor) -> Tensor:
        """Returns ``F(x) + g(x)`` of the problem actually solved, one number per sample.

        A gate adds ``sum_i (1 - a_i)/a_i (x_i^2/2 - c_i x_i + g_i(x_i))`` over the outputs that it does not close.
        """
        fitted, input = self.operator.adjoint(x).to(x.dtype), self.input.to(x.dtype)
        lam = self.lam
        if self.formulation == "normalized":
            root = self.smoothness.sqrt()
            fitted, input, lam = fitted / root, input * root, lam / self.smoothness
        dims = self.operator.problem_dims
        total = 0.5 * (fitted - input).square().sum(dims) + (0.5 * lam * x.square() + self.prior.g(x)).sum(dims)
        if self.gate is not None:
            gate = self._per_feature(self.gate)
            weight = torch.where(gate > 0, (1 - gate) / torch.where(gate > 0, gate, 1.0), 0.0)
            total = total + (weight * (0.5 * x.square() - self.output * x + self.prior.g(x))).sum(dims)
        return total if self.bias is None else total - (self.bias * x).sum(dims)

    def residual(self, x: Tensor) -> Tensor:
        """Returns ``|x - prox_{t g}(x - t grad F(x))| / max(|x|, |t c|)`` per sample: zero exactly at a minimiser.

        Relative to the problem's own scale: the iterate, or the first step from zero where the minimiser is zero.
        """
        moved = self.prior.prox(self.gated(self.descend(x, self.gradient(x), self.step)), self.step)
        dims = self.operator.problem_dims

        def size(t: Tensor) -> Tensor:
            return torch.linalg.vector_norm(t, dim=dims)

        scale = torch.maximum(size(x), size(self.first(self.step)))
        return size(x - moved) / scale.clamp_min(torch.finfo(x.dtype).tiny)


GateKind = Literal["scalar", "channel"]
Observer = Callable[[Tensor, int], tuple[Tensor, Tensor] | None]
"""Sees the argument of a solve and the dimension of its features; returns the gain and shift to use."""


@dataclass(frozen=True)
class Scale:
    """``(1 - blend) v_1 + blend (gain * v_T + shift)``, with a gate in every iteration of the solve.

    A gate ``a`` in [0, 1] makes each iteration ``v_{k+1} = v_1 + a (T(y_k) - v_1)``: at zero the block is the plain
    layer to the bit, at one the solver. Its ``proxgd`` is ``x <- prox(c + a (I - (A A^T + lam)/L) x)``, which minimises

        1/2 x^T ((A A^T + lam)/L + diag((1 - a)/a)) x - <c/a, x> + sum_i g_i(x_i)/a_i.

    Attributes:
        gain: One factor per output feature on the last argument; None for ones.
        shift: What is added to that; None for zeros.
        blend: A 0-d tensor; None is one.
        gate: ``a``, a 0-d tensor or one number per output feature, which may be trained; None is one.
        observer: Sees the last argument, and may choose gain and shift.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    blend: Tensor | None = None
    gate: Tensor | None = None
    observer: Observer | None = None

    @property
    def is_one(self) -> bool:
        """Whether it changes nothing of a result; a gate is part of the solve."""
        return self.gain is None and self.shift is None and self.blend is None

    @property
    def gate_kind(self) -> GateKind | None:
        """Whether there is one gate, or one per output feature; None for no gate."""
        return None if self.gate is None else "channel" if self.gate.dim() else "scalar"

    def observed(self, last: Callable[[], Tensor], dim: int) -> "Scale":
        """Returns the scale that an observer of the last argument chooses; this one if there is no observer."""
        if self.observer is None:
            return self
        gain, shift = self.observer(last(), dim) or (None, None)
        return Scale(gain, shift, self.blend, self.gate)

    def of(
        self, last: Tensor, first: Tensor | None, per_feature: Callable[[Tensor], Tensor], *, shifted: bool = True
    ) -> Tensor:
        """Returns the scaled result.

        Args:
            last: ``v_T``.
            first: ``v_1``, where there is a blend.
            per_feature: Views one number per feature so that it broadcasts along those of ``last``.
            shifted: Whether the shift is added: it is not part of a weight.
        """
        if self.gain is not None:
            last = last * per_feature(self.gain).to(last.dtype)
        if self.shift is not None and shifted:
            last = last + per_feature(self.shift).to(last.dtype)
        if self.blend is None:
            return last
        assert first is not None
        return torch.lerp(first, last, self.blend.to(last.dtype))
