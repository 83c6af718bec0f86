"""The shell that turns a layer into a solver block without ceasing to be that layer."""

import types
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from solver_plugins.blocks.run import (
    Activation,
    OutputKind,
    check_combination,
    make_solver,
    run_block,
)
from solver_plugins.errors import NoMinimizerError, SolverPluginsError, UnsupportedLayerError
from solver_plugins.operators import (
    Geometry,
    LinearOperator,
    lipschitz_from_kernel,
    operator_from_kernel,
    power_step,
    reader_for,
    start_vectors,
)
from solver_plugins.prox import prox_for
from solver_plugins.solvers import Diagnostics, Solver, working_dtype

STEP_BUFFERS = ("L", "power_vectors", "power_ratio", "weight_fingerprint")
WARM_UP = 40
"""Power steps after a certified refresh, so that the vectors start close to the top singular directions."""
STALE = 1.1
"""In evaluation a Lipschitz constant this much too small is stale and replaced for the call. Less does no harm: the
iteration converges for every ``L`` above half of the true one."""


class SolverBlock(nn.Module):
    """Mixin in front of a layer class: the layer's output becomes the argument of the last proximal map of a solve.

    The block *is* its layer: the same class (``isinstance``), the same Parameter objects, state-dict keys, hooks and
    flags. With ``output="argument"`` (default) ``activation(block(x))`` is the solver's result, and at one iteration
    ``block(x)`` is the plain layer's output; the activation stays where it is. With ``output="value"`` the block
    applies the activation itself.

    ``L = lambda_max(A A^T)`` is a non-persistent buffer. It is computed with a certificate at construction, after
    loading weights and by :func:`refresh_steps`; in between, every training forward follows the weights by one warm
    power step. That step is taken only when the weights have changed, so a recomputed (checkpointed) forward and a
    further micro-batch see the same ``L``. Nothing of it synchronises with the host.
    """

    layer_class: ClassVar[type[nn.Module]]
    reader: "ClassVar[staticmethod[[nn.Module], tuple[Tensor, Geometry]]]"

    L: Tensor
    power_vectors: Tensor
    power_ratio: Tensor
    weight_fingerprint: Tensor
    weight: Tensor
    bias: Any
    solver: Solver
    geometry: Geometry
    output: OutputKind

    def __init_subclass__(cls, layer_class: type[nn.Module] | None = None, **keywords: Any):
        """Declares the plain class that a block class stands for, and how its weights are read."""
        super().__init_subclass__(**keywords)
        if layer_class is not None:
            cls.layer_class = layer_class
            cls.reader = staticmethod(reader_for(layer_class))
            _BLOCK_CLASSES[layer_class] = cls

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        activation: Activation = None,
        solver: str | Solver = "proxsg",
        iters: int | None = None,
        *,
        output: OutputKind = "argument",
        **options: Any,
    ) -> Self:
        """Makes a block out of a layer, around the very same Parameters.

        Args:
            layer: The layer; it is left as it is and shares its Parameters with the block.
            activation: What follows the layer: a module, a function, a prior or a prior's name; None is the identity.
            solver: A registered name (see :func:`solver_plugins.list_solvers`), or a ready solver.
            iters: How many proximal steps (10 by default).
            output: "argument" of the activation (default), or its "value".
            **options: Options of the solver (``p``, ``lam``, ``formulation``, ...); an unknown one raises.
        """
        if isinstance(layer, SolverBlock):
            raise UnsupportedLayerError(
                f"{type(layer).__name__} is a solver block already; make the new one from the plain layer."
            )
        if "forward" in vars(layer):
            raise UnsupportedLayerError(
                f"This {type(layer).__name__} carries a forward of its own on the instance (an accelerate hook?), "
                f"which would "
                "hide the solver; remove it first (accelerate.hooks.remove_hook_from_module)."
            )
        made = block_class(type(layer))
        if not issubclass(made, cls):
            raise UnsupportedLayerError(
                f"{cls.__name__} is made from a layer of its own kind; found {type(layer).__name__}."
            )
        block: Self = made.__new__(made)
        nn.Module.__init__(block)
        for name, value in vars(layer).items():
            # Dictionaries of parameters, buffers, submodules and hooks become the block's own; their contents are
            # shared.
            block.__dict__[name] = value.copy() if isinstance(value, dict) else value
        block._set_up(activation, make_solver(solver, iters, options), output)
        return block

    def _set_up(self, activation: Activation, solver: Solver, output: OutputKind) -> None:
        prior = prox_for(activation)
        kernel, geometry = type(self).reader(self)
        self.geometry = geometry
        in_features = kernel.shape[1] * geometry.groups
        check_combination(solver, prior, output, kernel.shape[0], in_features, geometry)
        self.solver, self.output = solver, output
        self.prior = prior
        if output == "value" and isinstance(activation, nn.Module):
            # The block applies it, so the block owns it: its parameters train, move and save with the block.
            self.activation = activation
        dtype = working_dtype(kernel.dtype)
        vectors = start_vectors(kernel.detach(), geometry)
        self.register_buffer("L", torch.ones((), dtype=dtype, device=kernel.device), persistent=False)
        self.register_buffer("power_vectors", vectors, persistent=False)
        self.register_buffer("power_ratio", torch.ones_like(self.L), persistent=False)
        self.register_buffer("weight_fingerprint", torch.zeros_like(self.L), persistent=False)
        if not kernel.is_meta:
            self.refresh_step()
            self._check_rank(kernel)

    def _kernel(self) -> Tensor:
        return type(self).reader(self)[0]

    def _check_rank(self, kernel: Tensor) -> None:
        """Implicit gradients with ``lam = 0`` need full row rank, which is known for a linear layer only."""
        if not self.solver.implicit or self.solver.config.lam > 0:
            return
        if kernel.dim() == 2 and int(torch.linalg.matrix_rank(kernel.detach().double())) == kernel.shape[0]:
            return
        raise NoMinimizerError(
            f"gradient='implicit' with lam=0 needs a linear map of full row rank; {type(self).__name__} with a weight "
            f"of shape "
            f"{tuple(kernel.shape)} is not known to be one. Use lam > 0 (default 1e-3)."
        )

    def forward(self, input: Tensor) -> Tensor:
        """Returns the solve's result (see the class's docstring)."""
        return self._run(input)[0]

    def diagnose(self, input: Tensor, generator: torch.Generator | None = None) -> Diagnostics:
        """Runs the block on ``input`` in its present mode and returns objective and residual per iteration.

        Args:
            input: The layer's input.
            generator: Source of a sampling solver's draws; the global one by default.
        """
        with torch.no_grad():
            diagnostics = self._run(input, generator, diagnose=True)[1]
        assert diagnostics is not None
        return diagnostics

    def operator(self, input_shape: torch.Size | tuple[int, ...], diagonal: Tensor | None = None) -> LinearOperator:
        """Returns the layer as a linear operator on inputs of one shape."""
        return operator_from_kernel(self._kernel(), self.geometry, input_shape, diagonal=diagonal)

    def _run(
        self, input: Tensor, generator: torch.Generator | None = None, diagnose: bool = False
    ) -> tuple[Tensor, Diagnostics | None]:
        operator = self.operator(input.shape)
        return run_block(
            self.solver,
            self.prior,
            operator,
            input,
            self.bias,
            lambda: super(SolverBlock, self).forward(input),
            self._current_L(),
            output=self.output,
            training=self.training,
            generator=generator,
            diagnose=diagnose,
        )

    @torch.no_grad()
    def _current_L(self) -> Tensor:
        """Returns the constant for this forward, after following the weights where they have moved."""
        kernel = self._kernel().detach()
        estimate, vectors = power_step(kernel, self.geometry, self.power_vectors)
        estimate = estimate * self.power_ratio
        if not self.training:
            # Evaluation leaves no trace, yet must not diverge on weights that were changed behind the block's back.
            return torch.where(estimate > STALE * self.L, estimate, self.L)
        fingerprint = self._fingerprint(kernel)
        moved = (fingerprint != self.weight_fingerprint) & torch.isfinite(estimate)
        self.L.copy_(torch.where(moved, estimate, self.L))
        self.power_vectors.copy_(torch.where(moved, vectors, self.power_vectors))
        self.weight_fingerprint.copy_(torch.where(moved, fingerprint, self.weight_fingerprint))
        return self.L.clone()

    def _fingerprint(self, kernel: Tensor) -> Tensor:
        """A number that changes with the weights: comparing tensor versions would break compiled graphs."""
        return kernel.to(self.L.dtype).square().sum()

    @torch.no_grad()
    def compute_step(self, method: str = "certified", tolerance: float = 0.1) -> dict[str, Tensor]:
        """Computes the buffers behind the step size without writing them; see :meth:`refresh_step`."""
        kernel = self._kernel().detach()
        constant = lipschitz_from_kernel(kernel, self.geometry, method=method, tolerance=tolerance).to(self.L)
        vectors = self.power_vectors
        if not bool(torch.isfinite(vectors).all()) or not bool(vectors.any()):
            vectors = start_vectors(kernel, self.geometry)
        for _ in range(WARM_UP):
            estimate, vectors = power_step(kernel, self.geometry, vectors)
        ratio = torch.where(estimate > 0, constant / estimate.clamp_min(torch.finfo(constant.dtype).tiny), 1.0)
        return {
            "L": constant,
            "power_vectors": vectors,
            "power_ratio": ratio.clamp_min(1.0),
            "weight_fingerprint": self._fingerprint(kernel),
        }

    def write_step(self, values: dict[str, Tensor]) -> None:
        """Writes what :meth:`compute_step` computed, in place: compiled graphs hold these very buffers."""
        with torch.no_grad():
            for name, value in values.items():
                getattr(self, name).copy_(value)

    def refresh_step(self, method: str = "certified", tolerance: float = 0.1) -> Tensor:
        """Recomputes ``L`` from the weights and returns it.

        Args:
            method: "certified" (never below the truth, for any input size) or "power" (a lower bound).
            tolerance: How far above the truth a certified constant may be.

        Raises:
            WeightError: If the weights are not finite; nothing is changed then.
        """
        self.write_step(self.compute_step(method, tolerance))
        return self.L

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = {name: self._buffers[name] for name in STEP_BUFFERS if name in self._buffers}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            # Constants stay in float32 at least: as a half, L would overflow or lose its certificate.
            if buffer is not None and after is not None and after.dtype.itemsize < 4:
                self._buffers[name] = buffer.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.weight.is_meta:
            return
        try:
            self.refresh_step()
        except SolverPluginsError as error:
            # The last argument collects what load_state_dict reports in its own error.
            args[-1].append(str(error))

    def extra_repr(self) -> str:
        """Returns the layer's own line, with activation and solver."""
        return f"{super().extra_repr()}, activation={self.prior!r}, output={self.output!r}, solver={self.solver!r}"


_BLOCK_CLASSES: dict[type[nn.Module], type[SolverBlock]] = {}


def block_class(layer_class: type[nn.Module]) -> type[SolverBlock]:
    """Returns the class of the block that a layer of ``layer_class`` becomes: always a subclass of ``layer_class``.

    torch's own layers have named classes; one for a subclass of them, or for another library's layer, is made once.
    """
    known = _BLOCK_CLASSES.get(layer_class)
    if known is not None:
        return known
    named = (_BLOCK_CLASSES[base] for base in layer_class.__mro__ if base in _BLOCK_CLASSES)

    def reduce(self: SolverBlock, protocol: Any) -> tuple[Any, ...]:
        # A made class has no importable name; pickle and deepcopy make it again from the layer's.
        return _blank_block, (layer_class,), self.__getstate__()

    members = {
        "__doc__": f"``{layer_class.__name__}`` as a solver block.",
        "__module__": __name__,
        "__reduce_ex__": reduce,
    }
    bases = (next(named, SolverBlock), layer_class)
    return types.new_class(
        f"Solver{layer_class.__name__}", bases, {"layer_class": layer_class}, lambda body: body.update(members)
    )


def _blank_block(layer_class: type[nn.Module]) -> SolverBlock:
    made = block_class(layer_class)
    return made.__new__(made)
