"""Networks whose output is an equilibrium."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solver_plugins.equilibrium.backward import Adjoint, BackwardReport, with_gradient
from solver_plugins.equilibrium.errors import DivergenceError
from solver_plugins.equilibrium.layer import OptEqLayer
from solver_plugins.equilibrium.problem import EquilibriumProblem, Regularization, may_look
from solver_plugins.equilibrium.regularizers import FeatureRegularizer, make_regularizer
from solver_plugins.equilibrium.solvers import EQUILIBRIUM_SOLVERS, Run, settle, unroll
from solver_plugins.errors import InputError, NotConvergedWarning, OptionError, ShapeError, warn
from solver_plugins.operators import lipschitz_from_kernel
from solver_plugins.operators.precision import autocast_off
from solver_plugins.solve import with_adjoint


@dataclass(frozen=True)
class Equilibrium:
    """An equilibrium and how it was found; numbers per sample have the shape of the input's batch.

    Attributes:
        value: ``z``.
        residual: ``|T(z) - z| / |T(z)|`` at the last point where the map was evaluated.
        iterations: Evaluations of the map until the sample was done.
        contraction: The mean factor per iteration by which ``|T(z) - z|`` changed; below 1 it converges.
        evaluations: Evaluations of the map for the whole batch, without the start of several layers (a part of one).
        backward: How the implicit backward went, once it has run.
    """

    value: Tensor
    residual: Tensor
    iterations: Tensor
    contraction: Tensor
    evaluations: int
    backward: BackwardReport = field(default_factory=BackwardReport)


class DeepOptEq(nn.Module):
    """The equilibrium ``z = f_L o ... o f_1(z, x)`` of layers ``f_l = a W_l^T s(W_l z + U_l x + b_l) + (1 - a) z``.

    Equations (4) and (5). ``forward(x)`` returns ``z``, a vector or feature maps of the size of ``x``. With one layer,
    ``z`` minimises the convex ``h`` of Theorem 1 (:func:`~solver_plugins.equilibrium.objective`), and ``a`` is only a
    step. Solves run in float32 at least, even under autocast, because half precision cannot reach the tolerances.

    Args:
        layers: The layers; all have the same state.
        alpha: ``a`` in (0, 1].
        solver: A registered solver: "anderson", "fixed_point", "fista" (one layer), "sam".
        regularizer: A feature regulariser: a registered name, ``{"name": ..., ...}`` with its parameters, or an
            instance. With ``solver="sam"`` it chooses among fixed points (section 4.2). With other solvers its
            proximal map is appended to the layers (section 4.1).
        lam: Weight of the regulariser.
        **options: Options of the solver: ``iters``, ``tol``, ``gradient``, ``implicit_iters``, ``implicit_tol``, ...

    Raises:
        OptionError: If an option is unknown, out of range, or incompatible with another one.
        ShapeError: If the layers have different states.
    """

    residual: Tensor

    def __init__(
        self,
        layers: Iterable[OptEqLayer],
        alpha: float = 0.8,
        *,
        solver: str = "anderson",
        regularizer: str | Mapping[str, Any] | FeatureRegularizer | None = None,
        lam: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not len(self.layers) or not all(isinstance(layer, OptEqLayer) for layer in self.layers):
            raise OptionError(
                f"Expected one OptEqLayer or more; found {[type(layer).__name__ for layer in self.layers]}."
            )
        states = [(layer.state_features, layer._geometry.dims) for layer in self._layers()]
        if len(set(states)) > 1:
            raise ShapeError(f"Expected layers with one state; found states of {', '.join(str(n) for n, _ in states)}.")
        if not 0 < alpha <= 1:
            raise OptionError(f"Expected alpha in (0, 1]; found {alpha!r}.")
        if not (math.isfinite(lam) and lam >= 0):
            raise OptionError(f"Expected lam of 0 or more; found {lam!r}.")
        self.alpha, self.lam = float(alpha), float(lam)
        made = EQUILIBRIUM_SOLVERS.get(solver)
        if made.one_layer_only and len(self.layers) > 1:
            raise OptionError(
                f"Solver {solver!r} minimises a function, which only a single layer has; found {len(self.layers)} "
                "layers. Use 'anderson'."
            )
        self.solver = made.from_options(**options)
        self.regularizer = None if regularizer is None else make_regularizer(regularizer)
        self.register_buffer("residual", torch.zeros((), dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the equilibrium ``z`` for inputs ``x``: ``[..., inputs]``, or ``[..., channels, height, width]``.

        Raises:
            DivergenceError: If none is found because ``|W| > 1``, or because numbers are not finite.
        """
        return self.solve(x).value

    def solve(self, x: Tensor) -> Equilibrium:
        """Returns the equilibrium and how it was found; arguments and errors as in :meth:`forward`."""
        first = self._layers()[0]
        rank = first._geometry.dims + 1
        self._check_input(x, rank)
        batch = x.shape[: x.ndim - rank]
        with autocast_off(x.device):
            flat = x.reshape(-1, *x.shape[x.ndim - rank :])
            order = torch.preserve_format
            if self._turns(flat):
                order = _order_of(flat)
                flat = flat.contiguous(memory_format=torch.channels_last)
            problem = self.problem(flat)
            report = BackwardReport()
            if problem.units[0].offset.numel():
                value, run = self._run(problem, report)
            else:
                value = problem.image(None)
                none = value.new_zeros(0)
                run = Run(value, none, none, none, none, 1)
        value = value.to(x.dtype, memory_format=order).reshape(batch + value.shape[1:])
        count = math.prod(batch)
        residual, iterations, contraction = (
            tensor.expand(count).reshape(batch) for tensor in (run.residual, run.iterations, run.contraction)
        )
        return Equilibrium(value, residual, iterations, contraction, run.evaluations, report)

    def problem(self, x: Tensor) -> EquilibriumProblem:
        """Returns the fixed-point problem of a batch ``x``, with one batch dimension, as a pure map."""
        regularization = None
        # A regulariser of the batch only acts in training, because a prediction must not depend on its neighbours.
        if self.regularizer is not None and (self.training or not self.regularizer.of_batch):
            regularization = Regularization(self.regularizer, self.lam)
        units = tuple(layer.unit(x) for layer in self._layers())
        appended, chosen = (None, regularization) if self.solver.chooses else (regularization, None)
        return EquilibriumProblem(units, self.alpha, appended, chosen)

    def certified_norms(self) -> dict[str, Tensor]:
        """Returns a certified upper bound on ``|W|`` of every layer, by name."""
        return {f"layers.{index}": layer.certified_norm() for index, layer in enumerate(self._layers())}

    def project(self) -> dict[str, Tensor]:
        """Scales every ``W`` to a certified norm within its bound; returns the norms that they had, by name."""
        return {f"layers.{index}": layer.project() for index, layer in enumerate(self._layers())}

    def extra_repr(self) -> str:
        regularizer = "" if self.regularizer is None else f", regularizer={self.regularizer!r}, lam={self.lam:g}"
        return f"alpha={self.alpha:g}, solver={self.solver!r}{regularizer}"

    def _layers(self) -> list[OptEqLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _check_input(self, x: Tensor, rank: int) -> None:
        if x.ndim < rank:
            kind = "(..., features)" if rank == 1 else "(..., channels, height, width)"
            raise ShapeError(f"Expected an input of shape {kind}; found {tuple(x.shape)}.")
        weight = self._layers()[0].W.weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InputError(f"Expected an input of {weight.dtype}, as the weights are; found {x.dtype}.")

    def _run(self, problem: EquilibriumProblem, report: BackwardReport) -> tuple[Tensor, Run]:
        config: Any = self.solver.config
        if config.gradient == "unrolled":
            run = unroll(self.solver, problem)
            self._inspect(problem, run, expects_convergence=False)
            return run.value, run
        record = torch.is_grad_enabled()
        # Under torch.compile autograd handles the weights, because our own autograd function would have to be traced.
        explicit = problem.explicit and not torch.compiler.is_compiling()
        with torch.no_grad():
            solved = problem.prepared() if explicit else problem
            start = solved.start()
        how: Literal["jacobian", "graph"] = "jacobian" if explicit else "graph"
        run = settle(self.solver, solved, start=start, record=how if record else None)
        converged = self._inspect(problem, run, expects_convergence=True)
        if not record:
            return run.value, run
        if not converged:
            run = unroll(self.solver, problem)
            return run.value, run
        jacobian = run.jacobian
        assert jacobian is not None
        adjoint = Adjoint(config, report, type(self).__name__)
        if explicit:
            return with_gradient(run.value, problem, jacobian, adjoint), run
        return with_adjoint(run.value, lambda w: adjoint.solve(jacobian, w)), run

    def _turns(self, x: Tensor) -> bool:
        """Whether the solve uses feature maps with channels last; see :meth:`EquilibriumProblem.prepared`."""
        if x.ndim != 4 or x.device.type != "cpu" or torch.compiler.is_compiling() or self.regularizer is not None:
            return False
        priors = (layer.prior for layer in self._layers())
        config: Any = self.solver.config
        return config.gradient == "implicit" and not any(prior.learnable or prior.opaque for prior in priors)

    def _inspect(self, problem: EquilibriumProblem, run: Run, expects_convergence: bool) -> bool:
        """Stores the residual, raises if the solve diverged, and returns whether its gradient may be implicit."""
        config: Any = self.solver.config
        if torch.compiler.is_exporting():
            # A program has nobody to report a residual to.
            return True
        with torch.no_grad():
            worst = run.residual.amax()
            self.residual.copy_(worst)
            if not may_look():
                return True
            grew = (run.last > 1.01 * run.first).any()
            residual, grown = torch.stack([worst, grew.to(worst.dtype)]).tolist()
        if residual <= config.implicit_tol:
            return True
        # Norms are only computed when something is wrong.
        large = self._large_norms() if grown or not math.isfinite(residual) or expects_convergence else ""
        if not math.isfinite(residual) or (grown and large):
            cause = self._cause(problem) or large or "The map overflows. "
            raise DivergenceError(
                f"Expected an iteration that settles; after {run.evaluations} evaluations its residual is "
                f"{residual:.3g} (|T(z) - z| relative to |T(z)|). {cause}"
                "Keep |W| <= 1: constraint='aol', project_weights(model), or a smaller step size of the optimizer."
            )
        if expects_convergence:
            fallback = "; this gradient is unrolled instead" if torch.is_grad_enabled() else ""
            warn(
                f"{type(self).__name__}: after {run.evaluations} evaluations the residual is about {residual:.0e}, "
                f"above implicit_tol={config.implicit_tol:.0e}{fallback}. {large}Raise iters, lower the norm of W, or "
                "use gradient='unrolled'.",
                NotConvergedWarning,
            )
        return not expects_convergence

    def _cause(self, problem: EquilibriumProblem) -> str:
        for index, (layer, unit) in enumerate(zip(self._layers(), problem.units, strict=True)):
            for name, parameter in layer.named_parameters():
                if not torch.isfinite(parameter).all():
                    return f"layers.{index}.{name} holds numbers that are not finite. "
            if not torch.isfinite(unit.offset).all():
                return f"The input of layers.{index}, U x + b, holds numbers that are not finite. "
        return ""

    def _large_norms(self) -> str:
        found = []
        for index, layer in enumerate(self._layers()):
            kernel = layer.kernel().detach()
            if torch.isfinite(kernel).all():
                norm = float(lipschitz_from_kernel(kernel, layer._geometry, method="power").sqrt())
                if norm > 1.001:
                    found.append(f"layers.{index} has |W| of {norm:.3g}")
        return f"{', '.join(found)}, and at most 1 is needed. " if found else ""


def _order_of(x: Tensor) -> torch.memory_format:
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def project_weights(model: nn.Module) -> dict[str, Tensor]:
    """Scales every ``W`` of every equilibrium in a model to a certified norm within its bound.

    It returns the norms that the layers had, by name. With ``constraint="none"``, call it after optimizer steps:
    ``optimizer.register_step_post_hook(lambda *_: project_weights(model))``.
    """
    return {name: layer.project() for name, layer in model.named_modules() if isinstance(layer, OptEqLayer)}
