"""The scalars of a solve: what its step is derived from, how it decays, and what an iteration multiplies by.

Every rule starts with the full step, so that one iteration stays the original block.

| rule | constant | factor at iteration k |
|---|---|---|
| ``constant`` | ``L`` | 1 |
| ``exp`` | ``L`` | ``decay^k``: the paper's choice for Prox-SG |
| ``bottou`` | ``L`` | ``1/(1 + t0 lam k)`` (Bottou 2012) |
| ``expected_smoothness`` | ``L_tau`` (Gower et al. 2018), guarded | 1 |

``1/L`` is only safe while the sample is large. ``1/L_tau`` never expands in the mean square. A *single* draw has the
Hessian ``A diag(w) A^T`` with ``lambda_max <= min(max_i(w_i) L, sum of the tau largest w_i |a_i|^2)``; half of that
bound is a floor on the constant, so that no realisation can overshoot: ``|1 - lambda/L_eff| <= 1`` on every direction.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solver_plugins.operators import expected_smoothness, is_eager
from solver_plugins.prox import Step

Factor = Callable[[int, Step], Step] | None
"""``f_k`` as a function of ``k`` and of the constant that sets the step; None is one."""
StepRule = Literal["constant", "exp", "bottou", "expected_smoothness"]

SMALLEST_CONSTANT = 1e-12
"""Floor on ``L``: zero weights and ``lam = 0`` must still give a finite step.

There ``A A^T x = 0``, so any step will do.
"""


def full_smoothness(lipschitz: Tensor, lam: Step) -> Tensor:
    """Returns ``lambda_max(A A^T) + lam`` (Lemma 2 with the omitted ``lam``), at least a tiny positive number."""
    return (lipschitz + lam).clamp_min(SMALLEST_CONSTANT)


def sampled_smoothness(
    lipschitz: Tensor, lam: Step, column_norms_sq: Tensor, tau: int, probabilities: Tensor | None = None
) -> Tensor:
    """Returns the guarded expected-smoothness constant of a sampling.

    Args:
        lipschitz: ``lambda_max(A A^T)``.
        lam: Strong convexity of ``F``.
        column_norms_sq: ``|a_i|^2``.
        tau: How many features are drawn.
        probabilities: Inclusion probabilities of a non-uniform sampling; None means ``tau/n1`` each.
    """
    n = column_norms_sq.numel()
    norms = column_norms_sq.to(lipschitz.dtype)
    if tau >= n:
        return full_smoothness(lipschitz, lam)
    if probabilities is None:
        mean_square = expected_smoothness(lipschitz, norms, n, tau)
        weighted, largest_weight = norms * (n / tau), torch.as_tensor(n / tau, dtype=norms.dtype, device=norms.device)
    else:
        weights = torch.where(norms > 0, 1 / probabilities.clamp_min(torch.finfo(norms.dtype).tiny), 0.0)
        weighted, largest_weight = norms * weights, weights.max()
        # tau draws with frequencies q = pi/tau: (1 - 1/tau) L + max_i |a_i|^2/(tau q_i).
        mean_square = (1 - 1 / tau) * lipschitz + weighted.max()
    realised = torch.minimum(largest_weight * lipschitz, weighted.topk(tau).values.sum())
    return full_smoothness(torch.maximum(mean_square, 0.5 * realised), lam)


def step_factor(rule: StepRule, iteration: int, *, decay: float, share: Step) -> Step:
    """Returns what the base step is multiplied by at ``iteration`` (counted from zero); ``share`` is ``lam/L``."""
    if iteration == 0 or rule in ("constant", "expected_smoothness"):
        return 1.0
    if rule == "exp":
        return decay**iteration
    # t0 lam is lam/L in both formulations.
    return 1 / (1 + iteration * share)


class Numbers:
    """The scalars of a solve: Python numbers where looking at them costs nothing, else 0-d tensors.

    Attributes:
        at_hand: Whether they are numbers.
        scale: ``s``.
        factors: ``f_k``.
        steps: ``t_k``.
        kept: ``1 - t_k s lam``.
    """

    def __init__(self, smoothness: Tensor, factor: Factor, iterations: int, *, unit: bool, lam: Step):
        self.at_hand = is_eager(smoothness.device) and type(smoothness) is Tensor
        constant: Step = float(smoothness) if self.at_hand else smoothness
        self.scale: Step = 1 / constant if unit else 1.0
        lam = float(lam) if self.at_hand else lam
        base: Step = 1.0 if unit else 1 / constant
        self.factors: list[Step] = [1.0 if factor is None else factor(k, constant) for k in range(iterations)]
        self.steps: list[Step] = [times(base, one) for one in self.factors]
        self.kept: list[Step] = [1 - step * (self.scale * lam) for step in self.steps]


def is_one(factor: Any) -> bool:
    """Whether a factor is the number one."""
    return isinstance(factor, float) and factor == 1.0


def times(one: Any, factor: Any) -> Any:
    """Returns ``factor * one``, without a pass over memory where the factor is the number one."""
    return one if factor.__class__ is float and factor == 1.0 else one * factor


def has_values(*tensors: Tensor | None) -> bool:
    """Whether there are plain values to compute with: nothing is recorded, compiled or transformed."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    there = [one for one in tensors if one is not None]
    # Of several gradients at once (is_grads_batched) none shows, but for this.
    plain = (
        type(one) in (Tensor, nn.Parameter) and not torch._C._functorch.is_legacy_batchedtensor(one) for one in there
    )
    return is_eager(there[0].device) and all(plain)
