"""Solvers behind a norm or a skip connection: linear -> norm (-> add) -> activation as one block (appendix J).

The argument of the activation is only known at its end, so the solver sits there: in the norm, or in the activation
module after a sum. It reads the weights of its linear layer, and takes that layer's input and output from a tap.

A norm over the batch scales the rows of ``A`` by ``d = gamma / sqrt(var + eps)``: batch statistics in training, running
ones in evaluation. ``L`` is certified for a reference diagonal and scaled by ``max_i (d_i / dbar_i)^2``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from solver_plugins.blocks.made import made_class, take_off
from solver_plugins.blocks.run import check_combination, check_rank, run_block
from solver_plugins.blocks.stepsize import STEP_BUFFERS, TrackedStep
from solver_plugins.blocks.tap import Tap, install_tap, remove_tap
from solver_plugins.errors import SolverPluginsError, UnsupportedLayerError
from solver_plugins.operators import operator_from_kernel, rescaled_bound
from solver_plugins.operators.layers import read_layer
from solver_plugins.prox import Prior
from solver_plugins.solvers import Solver, working_dtype

Role = Literal["norm", "norm-activation", "activation"]
RESERVED = {*STEP_BUFFERS, "diagonal_reference", "residual", "geometry", "solver", "prior", "role", "linear", "norm"}
SMALL_ROW = 0.05
"""A reference row is at least this share of the largest, so that a scale near zero may grow without voiding ``L``."""


@dataclass(frozen=True)
class Partner:
    """Another module of the model, by its place: whatever stands there when it is needed, also after a replacement."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The module that is there now."""
        found = self.parent._modules[self.name]
        assert found is not None
        return found


def partner_of(name: str, modules: dict[str, nn.Module]) -> Partner:
    """Returns the place of the module of this name in a model, given its modules by name."""
    parent, _, child = name.rpartition(".")
    return Partner(modules[parent], child)


class ChainBlock(TrackedStep):
    """Mixin in front of the norm or activation at the end of a chain.

    Attributes:
        role: What the module does itself: the "norm" (the activation follows), both ("norm-activation", as timm's
            BatchNormAct2d), or the "activation" (after a norm and a skip).
        linear: The linear layer.
        norm: The norm, if there is one and it is another module.
    """

    solver: Solver
    prior: Prior
    role: Role
    linear: Partner
    norm: Partner | None
    diagonal_reference: Tensor
    residual: Tensor

    @classmethod
    def class_for(cls, plain: type[nn.Module]) -> "type[ChainBlock]":
        """Returns the class of a host of this kind."""
        return made_class(cls, plain, "Solver")

    def _kernel(self) -> Tensor:
        return read_layer(self.linear.module)[0]

    def _norm_module(self) -> nn.Module | None:
        if self.role != "activation":
            return self
        return None if self.norm is None else self.norm.module

    def _reference(self) -> Tensor | None:
        return None if self._norm_module() is None else self.diagonal_reference

    def _new_reference(self, kernel: Tensor) -> dict[str, Tensor]:
        norm = self._norm_module()
        if norm is None:
            return {}
        size = running_diagonal(norm, working_dtype(kernel.dtype)).abs()
        largest = size.amax()
        # Scales of zero (a residual branch that starts closed) say nothing of what they will be: assume ones.
        return {"diagonal_reference": torch.where(largest > 0, size.clamp_min(SMALL_ROW * largest), 1.0)}

    def forward(self, input: Tensor) -> Tensor:
        """Returns what the module returned, with the solver's argument in place of the activation's."""
        layer = self.linear.module
        taken = layer.tap.take() if isinstance(layer, Tap) else None
        if taken is None:
            raise SolverPluginsError(
                "A solver behind a norm or a skip ran without its linear layer: expected that layer to be called just "
                "before, in the same forward pass."
            )
        u, y = taken
        if self.role == "activation":
            return super().forward(self._solve(input, u, y))
        if self.role == "norm":
            return self._solve(super().forward(input), u, y)
        inner: Any = self
        return inner.act(inner.drop(self._solve(nn.BatchNorm2d.forward(inner, input), u, y)))

    def _solve(self, c: Tensor, u: Tensor, y: Tensor) -> Tensor:
        kernel = self._kernel()
        norm = self._norm_module()
        constant = self._current_L(kernel) if self.solver.needs_constant else self.L
        diagonal = None
        if norm is not None:
            diagonal = diagonal_of(norm, y, constant.dtype)
            constant = rescaled_bound(constant, diagonal.detach(), self.diagonal_reference)
        operator = operator_from_kernel(kernel, self.geometry, u.shape, diagonal=diagonal)
        additive = c - operator.apply(u) if self.solver.samples == "inputs" else None
        return run_block(
            self.solver,
            self.prior,
            operator,
            u,
            None,
            lambda: c,
            constant,
            additive=additive,
            dtype=c.dtype,
            residual=self.residual if self.solver.implicit else None,
            training=self.training,
        )[0]

    def extra_repr(self) -> str:
        """Returns the module's own line, with activation and solver."""
        return f"{super().extra_repr()}, activation={self.prior!r}, solver={self.solver!r}"


def running_diagonal(norm: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns ``gamma / sqrt(var + eps)`` with the running variance (ones where none is kept)."""
    bn: Any = norm
    var = torch.ones(bn.num_features, device=_device(bn)) if bn.running_var is None else bn.running_var
    scale = torch.rsqrt(var.to(dtype) + bn.eps)
    return scale if bn.weight is None else scale * bn.weight.detach().to(dtype)


def diagonal_of(norm: nn.Module, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the diagonal that the norm applies to ``y`` in its present mode, differentiable."""
    bn: Any = norm
    if isinstance(norm, nn.SyncBatchNorm) and norm.training:
        raise UnsupportedLayerError(
            "A solver is folded with this norm, which has become a SyncBatchNorm since: its statistics are spread over "
            "processes. Keep BatchNorm in converted blocks, or leave blocks with norms out of the conversion."
        )
    if bn.training or bn.running_var is None:
        var = y.to(dtype).var((0, *range(2, y.dim())), correction=0)
    else:
        var = bn.running_var.to(dtype)
    scale = torch.rsqrt(var + bn.eps)
    return scale if bn.weight is None else scale * bn.weight.to(dtype)


def _device(module: nn.Module) -> torch.device | None:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)


def install_chain(
    host: nn.Module, role: Role, linear: Partner, norm: Partner | None, prior: Prior, solver: Solver
) -> ChainBlock:
    """Turns the end of a chain into a solver where it stands, and taps its linear layer.

    Raises:
        SolverPluginsError: If it cannot be one; both modules are as they were then.
    """
    folded = host if role != "activation" else None if norm is None else norm.module
    if folded is not None and (not isinstance(folded, _BatchNorm) or isinstance(folded, nn.SyncBatchNorm)):
        raise UnsupportedLayerError(
            f"Expected a BatchNorm of one process, which is a diagonal; found {type(folded).__name__}."
        )
    if isinstance(host, TrackedStep) or "forward" in vars(host) or RESERVED & vars(host).keys():
        raise UnsupportedLayerError(
            f"This {type(host).__name__} hosts a solver, a forward of its own, or one of its names already."
        )
    kernel, geometry = read_layer(linear.module)
    check_combination(solver, prior, "argument", kernel.shape[0], kernel.shape[1] * geometry.groups, geometry)
    check_rank(solver, prior, kernel)
    host.__class__ = ChainBlock.class_for(type(host))
    block: ChainBlock = host  # type: ignore[assignment]
    install_tap(linear.module)
    try:
        block.role, block.linear, block.norm = role, linear, norm
        block.geometry, block.solver, block.prior = geometry, solver, prior
        for name, value in block._new_reference(kernel).items():
            block.register_buffer(name, value, persistent=False)
        block._register_step(kernel)
        if solver.implicit:
            block.register_buffer("residual", torch.zeros_like(block.L), persistent=False)
    except BaseException:
        remove_chain(block)
        raise
    return block


def remove_chain(block: ChainBlock) -> nn.Module:
    """Makes host and linear layer plain again, where they stand."""
    layer = block.linear.module
    if isinstance(layer, Tap):
        remove_tap(layer)
    for name in RESERVED:
        if name in vars(block) or name in block._buffers:
            delattr(block, name)
    block._forget_step()
    return take_off(block)
