"""What a solver is: a config, and one iteration rule as ``init`` and ``step``.

A new solver is one file: derive a config and a final class, write ``step``, decorate with ``@register_solver``.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pydantic
import torch
from torch import Tensor

from solver_plugins.config import StrictConfig
from solver_plugins.errors import OptionError
from solver_plugins.operators import LinearOperator, tau_nice_indices, tau_nice_masks, tau_of
from solver_plugins.prox import Prior, Step
from solver_plugins.solve.problem import BlockProblem, Formulation
from solver_plugins.solve.recursion import Recursion, Samples
from solver_plugins.solve.steps import StepRule, full_smoothness, step_factor


class SolverConfig(StrictConfig):
    """Options that every solver has."""

    iters: int = pydantic.Field(
        10, ge=1, description="How many proximal steps are taken; 10 is the paper's choice, 1 is the original block."
    )
    lam: float | None = pydantic.Field(
        1e-3,
        ge=0,
        description="Strong convexity added to F (the paper's 1e-3), so that a minimiser exists; null: "
        "lambda_max(A A^T)/iters, with which the minimiser is no larger than what iters steps of proxgd may reach.",
    )
    lam_relative: float | None = pydantic.Field(
        None, gt=0, description="lam in units of lambda_max(A A^T), which differs between layers; instead of 'lam'."
    )
    formulation: Formulation = pydantic.Field(
        "normalized", description="'normalized': one iteration is the block exactly; 'paper': step 1/L."
    )

    @pydantic.model_validator(mode="after")
    def _one_lam(self) -> "SolverConfig":
        # By value: a config that was saved and read again sets every field.
        if self.lam_relative is not None and self.lam != type(self).model_fields["lam"].default:
            raise ValueError(
                f"expected 'lam' or 'lam_relative'; found both, lam={self.lam}, lam_relative={self.lam_relative}. Drop "
                "one of them."
            )
        return self

    @property
    def is_regularised(self) -> bool:
        """Whether ``F`` is strongly convex whatever the weights are."""
        return self.share is not None or self.lam != 0

    @property
    def share(self) -> float | None:
        """``lam`` in units of ``lambda_max(A A^T)``; None where ``lam`` is a number of its own."""
        return 1 / self.iters if self.lam is None and self.lam_relative is None else self.lam_relative


class DeterministicConfig(SolverConfig):
    """Options of the solvers that use full gradients only."""

    hints: ClassVar[Mapping[str, str]] = {
        "p": "This solver does not sample: a dropout layer in front of the block stays in the model, unchanged.",
        "eval_mode": "This solver is deterministic, in training too.",
        "memory": "This solver has no backward pass of its own; gradient='implicit' keeps no iterates.",
    }

    gradient: Literal["unrolled", "implicit"] = pydantic.Field(
        "unrolled", description="'implicit' differentiates the minimiser and needs enough iters to reach it."
    )
    implicit_tol: float = pydantic.Field(
        1e-4, gt=0, description="Largest residual of an implicit solve, forward and backward; above it, unroll."
    )
    implicit_iters: int = pydantic.Field(
        100, ge=1, description="Conjugate-gradient steps of the implicit backward; 100 suffice at a condition of 1e3."
    )
    path: Literal["auto", "loop", "two_step", "gram", "collapsed"] = pydantic.Field(
        "auto",
        description="How A A^T x is computed; 'auto' counts multiply-adds. 'loop': two steps, plain autograd; "
        "'collapsed': all iterations as one product, where there is no prior.",
    )


class KernelConfig(DeterministicConfig):
    """Options of the deterministic solvers whose backward pass is written by hand."""

    memory: Literal["auto", "full", "low"] = pydantic.Field(
        "auto",
        description="'auto' keeps the iterates for the backward pass, and A^T x where that fits; 'full' keeps all of "
        "that, 'low' nothing: what is not kept is computed again.",
    )

    @pydantic.model_validator(mode="after")
    def _memory_needs_a_kernel(self) -> "KernelConfig":
        if self.memory == "low" and (self.gradient == "implicit" or self.path == "loop"):
            raise ValueError(
                "option 'memory' only acts with gradient='unrolled' and a path other than 'loop'; found "
                f"gradient={self.gradient!r}, path={self.path!r}. An implicit gradient keeps no iterates anyway."
            )
        return self


ACCELERATED_LAM: float | None = pydantic.Field(
    None,
    ge=0,
    description="Strong convexity added to F; null: lambda_max(A A^T)/iters. With a smaller one, such as the paper's "
    "1e-3, training can diverge at rates at which as many iterations of proxgd train.",
)
"""The field ``lam`` of accelerated solvers.

The minimiser of ``F`` with ``lam = L/iters`` moves by at most ``(L + lam)/lam = iters + 1`` times as much as the plain
layer's output. After ``iters`` steps of ``proxgd`` it is ``iters`` times at most, whatever ``lam`` is. An accelerated
solver comes near the minimiser in a few steps, and without a bound it multiplies outputs and gradients by far more.
"""


class SamplingConfig(SolverConfig):
    """Options of the solvers that draw features at random."""

    hints: ClassVar[Mapping[str, str]] = {
        "gradient": "A sampled solve does not converge to a fixed point, so it is always unrolled.",
    }

    per_sample: bool = pydantic.Field(
        True, description="Draw for each sample, as nn.Dropout does; False draws one set for the whole batch."
    )
    eval_mode: Literal["deterministic", "stochastic"] = pydantic.Field(
        "deterministic", description="In eval mode: full gradients with the training steps, or keep sampling (paper)."
    )
    step: StepRule = pydantic.Field("expected_smoothness", description="Step-size rule.")
    decay: float = pydantic.Field(
        0.9, gt=0, le=1, description="Factor per iteration of step='exp'; 0.9 leaves 39% of the step at iteration ten."
    )
    path: Literal["auto", "loop"] = pydantic.Field(
        "auto", description="How iterates are computed; 'loop': as they are written, with plain autograd."
    )

    @pydantic.model_validator(mode="after")
    def _decay_needs_exp(self) -> "SamplingConfig":
        # By value: a config that was saved and read again sets every field.
        if self.step != "exp" and self.decay != type(self).model_fields["decay"].default:
            raise ValueError(f"option 'decay' only acts with step='exp'; found step={self.step!r}. Drop one of them.")
        return self


class RateConfig(SamplingConfig):
    """Options of the solvers that replace a dropout rate."""

    p: float = pydantic.Field(
        0.5, ge=0, lt=1, description="Dropout rate in [0, 1); tau = round((1 - p) n) features are drawn. Paper: 0.5."
    )


@dataclass(frozen=True)
class Draws:
    """A source of randomness; the global one unless a generator is given.

    Blocks use the global one: a private generator breaks a compiled graph and draws other masks when a checkpointed
    segment is recomputed.
    """

    generator: torch.Generator | None = None


@dataclass(frozen=True)
class State:
    """Where a solve stands after an iteration.

    Attributes:
        v: The argument of the proximal map that ends the iteration; the map itself is left to the next one, or to the
            activation that follows the block.
        step: The step ``t`` of that map: the iterate is ``x = prox_{t g}(v)``.
    """

    v: Tensor
    step: Step


class Solver(abc.ABC):
    """An iteration rule with its options; subclasses are final and registered by ``@register_solver``.

    Attributes:
        name: The registered name.
        tags: Words to filter by: "deterministic" or "sampling", and others.
        Config: The options' model.
        samples: What is drawn at random: nothing, input features, or output features.
        stays_at_step: Every state's step is the problem's, so that its ``v`` is a fixed point at convergence.
        implicit: Whether gradients are those of the minimiser instead of the iterations.
        samples_in_evaluation: Whether evaluation is stochastic, too.
        path: Which path of :mod:`solver_plugins.solve.paths` is asked for.
        memory: What is kept for a backward pass.
        low_memory: Whether the backward pass computes iterates again.
        shares_sample: Whether the whole batch shares one sample.
        uniform: Whether all features are equally likely to be sampled.

    A solver that only writes ``step`` is run as it is written, and differentiated by autograd. One whose iterations
    are of the form in :mod:`solver_plugins.solve.recursion` may declare them, too, and takes the fast paths.
    """

    name: ClassVar[str]
    tags: ClassVar[tuple[str, ...]]
    Config: ClassVar[type[SolverConfig]]
    samples: ClassVar[Literal["nothing", "inputs", "outputs"]]
    stays_at_step: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any):
        """Forgets what a class declares where a subclass of it takes other steps."""
        super().__init_subclass__(**keywords)
        if "step" in vars(cls) and "recursion" not in vars(cls):
            cls.recursion = None  # type: ignore[assignment]

    def __init__(self, config: Any):
        self.config = config
        self.implicit = getattr(config, "gradient", "unrolled") == "implicit"
        self.samples_in_evaluation = getattr(config, "eval_mode", "deterministic") == "stochastic"
        # Read here: a compiler cannot follow pydantic to a field that may be missing.
        self.path: str = getattr(config, "path", "auto")
        self.memory: str = getattr(config, "memory", "full")
        self.low_memory = self.memory == "low"
        self.shares_sample = not getattr(config, "per_sample", True)
        self.uniform = getattr(config, "sampling", "uniform") == "uniform"

    @classmethod
    def from_options(cls, **options: Any) -> "Solver":
        """Makes the solver from its options.

        Raises:
            OptionError: For an unknown option or a bad value.
        """
        return cls(cls.Config.parse(options, owner=f"solver {cls.name!r}"))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.config.options().items())
        return f"{type(self).__name__}({options})"

    def check_prior(self, prior: Prior) -> None:
        """Raises OptionError if the solver cannot work with this prior."""
        if prior.unit_step_only and self.config.formulation == "paper":
            raise OptionError(
                f"The prior {prior.name!r} is only known at the unit step, and formulation='paper' takes the step 1/L; "
                "use formulation='normalized'."
            )
        if (prior.learnable or prior.opaque) and self.low_memory:
            raise OptionError(
                f"The prior {prior.name!r} has, or may have, parameters that are trained through every iterate, so "
                "that memory='low' is not possible; use memory='full', or an activation without parameters."
            )

    @property
    def needs_constant(self) -> bool:
        """Whether the solve uses ``L`` at all: one normalized iteration is the plain layer, whatever ``L`` is."""
        return self.config.iters > 1 or self.config.formulation == "paper"

    def lam(self, lipschitz: Tensor) -> Step:
        """Returns ``lam``, given ``lambda_max(A A^T)``."""
        share = self.config.share
        found: Step = self.config.lam if share is None else share * lipschitz
        return found

    def smoothness(self, operator: LinearOperator, lipschitz: Tensor) -> Tensor:
        """Returns the constant whose inverse is the step (see :mod:`solver_plugins.solve.steps`)."""
        return full_smoothness(lipschitz, self.lam(lipschitz))

    @property
    def recursion(self) -> Recursion | None:
        """What :meth:`step` does, declared for the kernel; None where nothing is declared."""
        return None

    @abc.abstractmethod
    def init(self, problem: BlockProblem) -> Any:
        """Returns the state before the first iteration (None where ``x_0 = 0`` says it all)."""

    @abc.abstractmethod
    def step(self, problem: BlockProblem, state: Any, iteration: int, draws: Draws | None) -> Any:
        """Takes one iteration, which ends at the argument of a proximal map.

        Args:
            problem: The problem.
            state: The state before.
            iteration: Counted from zero.
            draws: Where random numbers come from; None asks for full gradients instead of sampled ones.
        """

    def gated(self, problem: BlockProblem, state: Any) -> Any:
        """Returns the state after an iteration, with a gate on its ``v``: ``v_1 + a (v - v_1)``.

        A solver whose states hold more than that of the new iterate gates its own ``v`` before, and says so here.
        """
        return replace(state, v=problem.gated(state.v))

    def value(self, problem: BlockProblem, state: Any) -> Tensor:
        """Returns the iterate ``x``."""
        return problem.prior.prox(state.v, state.step)

    def argument(self, problem: BlockProblem, state: Any) -> Tensor:
        """Returns ``v`` with ``activation(v) = x``, for an activation that stays outside of the block."""
        return problem.prior.argument(state.v, state.step)


class SamplingSolver(Solver):
    """What all solvers that draw input or output features have in common."""

    def check_prior(self, prior: Prior) -> None:
        super().check_prior(prior)
        if prior.unit_step_only and self.config.step in ("exp", "bottou"):
            raise OptionError(
                f"The prior {prior.name!r} is only known at the unit step, and step={self.config.step!r} takes smaller "
                "ones; use step='constant' or 'expected_smoothness'."
            )

    def tau(self, features: int) -> int:
        """Returns how many of the features are drawn: as many as a dropout rate ``p`` keeps, or a single one."""
        return tau_of(self.config.p, features) if isinstance(self.config, RateConfig) else 1

    @property
    def recursion(self) -> Recursion | None:
        """The steps; what is drawn comes with :meth:`draw`."""
        return Recursion(self.factor if self.decays else None)

    @property
    def decays(self) -> bool:
        """Whether steps become smaller."""
        return self.config.step in ("exp", "bottou")

    def factor(self, iteration: int, smoothness: Step) -> Step:
        """Returns what the step of an iteration is multiplied by, given the constant that sets it."""
        config = self.config
        # A step that decays starts at 1/L, L = lambda_max + lam.
        relative = config.share
        share = config.lam / smoothness if relative is None else relative / (1 + relative)
        return step_factor(config.step, iteration, decay=config.decay, share=share)

    def step_at(self, problem: BlockProblem, iteration: int) -> Step:
        """Returns the step ``t_k`` of an iteration."""
        return problem.step * self.factor(iteration, problem.smoothness)

    def thins(self, operator: LinearOperator) -> bool:
        """Whether a sample leaves features out."""
        features = operator.out_features if self.samples == "outputs" else operator.in_features
        return self.tau(features) < features

    def draw(self, problem: BlockProblem, draws: Draws, *, indices: bool) -> Samples:
        """Draws all that a solve needs, for the kernel; on the CPU the same as :meth:`step` draws.

        Args:
            problem: The problem.
            draws: Where random numbers come from.
            indices: Whether samples of the inputs are indices of columns, else masks.
        """
        features = problem.operator.in_features
        tau, count = self.tau(features), self.config.iters
        if not indices:
            return Samples(self.masks(problem, draws, count), features / tau)
        device = problem.input.device
        return Samples(tau_nice_indices(count, features, tau, device=device, generator=draws.generator), features / tau)

    def batch_shape(self, tensor: Tensor, operator: LinearOperator) -> tuple[int, ...]:
        """Returns how many independent draws to make: one per problem, or a single one for all of them."""
        return tuple(tensor.shape[: tensor.dim() - len(operator.problem_dims)]) if self.config.per_sample else ()

    def masks(self, problem: BlockProblem, draws: Draws, count: int) -> Tensor:
        """Draws tau-nice masks of zeros and ones (Definition 3.1), in bytes, that broadcast along what is sampled.

        On the CPU one call for all iterations draws the same as one for each.
        """
        operator, u = problem.operator, problem.input
        features = operator.out_features if self.samples == "outputs" else operator.in_features
        shape, source = self.batch_shape(u, operator), draws.generator
        drawn = tau_nice_masks(count, shape, features, self.tau(features), device=u.device, generator=source)
        return operator.per_feature(drawn)
