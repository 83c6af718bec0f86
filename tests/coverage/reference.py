"""Compares every converted block with a reference that knows only the plain modules.

    v_1 = c,    x_k = act(v_k),    v_{k+1} = x_k - (A A^T + lam) x_k / (L + lam) + c

``A`` and ``A^T`` are the jvp and vjp of the plain layer, followed by its norm with fixed statistics; ``c`` is the
argument of the activation as the plain modules compute it; ``act`` is called as the model calls it. The block provides
its input, its output, its constant ``L`` and the solver's settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

from solver_plugins.blocks.fold import uses_batch
from solver_plugins.surgery import Block

Map = Callable[[Tensor], Tensor]


@dataclass
class Comparison:
    """How far the blocks of one forward pass are from their references.

    Attributes:
        errors: For each call of a block, the largest error in units of the reference's largest number.
        growth: For each call, the scale of its output over that of the plain one.
    """

    errors: dict[str, float] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """The block that is furthest from its reference, and how far; an error that is not finite is the worst."""
        return max(self.errors.items(), key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"))


def solve(c: Tensor, u: Tensor, chain: Map, act: Map, smoothness: Tensor, lam: float, iters: int) -> Tensor:
    """Returns the argument of the last activation after ``iters`` steps, ``v`` of the module's docstring."""
    with torch.enable_grad():
        start = u.detach().requires_grad_()
        image = chain(start)

    def hessian(x: Tensor) -> Tensor:
        (back,) = torch.autograd.grad(image, start, x, retain_graph=True)
        return jvp(chain, u.detach(), back) + lam * x

    v = c
    for _ in range(iters - 1):
        x = act(v.clone())
        v = x - hessian(x) / smoothness + c
    return v


def jvp(chain: Map, u: Tensor, tangent: Tensor) -> Tensor:
    """Returns the derivative of a chain at ``u`` along ``tangent``, in forward mode.

    The vjp of a vjp would give the same, but torch takes second derivatives of grouped convolutions group by group.
    Within the forward pass of an autograd.Function, as reversible networks have it, torch turns this mode off.
    """
    with forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
        derivative = forward_ad.unpack_dual(chain(forward_ad.make_dual(u.contiguous(), tangent))).tangent
    assert derivative is not None
    return derivative


class Watch:
    """Hooks on a converted model that compare every block in every forward pass, and keep the network's scale.

    Several iterations make a layer's output larger, and a deep network without norms would overflow. So each output is
    scaled back to the size of the plain one, by a constant, through which gradients pass. Blocks then see inputs like
    those of the plain model.

    Args:
        converted: The converted model.
        plain: A plain model of the same modules and Parameters.
        blocks: The converted blocks.
    """

    def __init__(self, converted: nn.Module, plain: nn.Module, blocks: Sequence[Block]):
        self.result = Comparison()
        self._plain = dict(plain.named_modules())
        self._inputs: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        modules = dict(converted.named_modules())
        for block in blocks:
            self._watch(modules, block)

    def remove(self) -> Comparison:
        """Takes the hooks off and returns what they saw."""
        for handle in self._handles:
            handle.remove()
        return self.result

    def _watch(self, modules: dict[str, nn.Module], block: Block) -> None:
        layer, outlet = modules[block.name], modules[block.outlet_name]

        def at_layer(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            self._inputs[block.name] = (_only(args, kwargs).detach(), output.detach())

        def before_outlet(module: nn.Module, args: Any, kwargs: Any) -> None:
            if block.name in self._inputs:
                # An activation in place would overwrite the sum.
                self._sums[block.name] = _only(args, kwargs).detach().clone()

        def at_outlet(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
            if block.outlet == "linear":
                return self._compare(block, layer, _only(args, kwargs).detach(), output)
            if block.name not in self._inputs:
                return None  # A shared activation that is called for another layer.
            u, y = self._inputs.pop(block.name)
            return self._compare(block, layer, u, output, y)

        if block.outlet != "linear":
            self._handles.append(layer.register_forward_hook(at_layer, with_kwargs=True))
        if block.outlet == "activation":
            self._handles.append(outlet.register_forward_pre_hook(before_outlet, with_kwargs=True))
        self._handles.append(outlet.register_forward_hook(at_outlet, with_kwargs=True))

    def _compare(self, block: Block, solver: Any, u: Tensor, output: Tensor, y: Tensor | None = None) -> Tensor:
        if output.numel() == 0:
            # A part of the model that nothing was routed to.
            self.result.errors.setdefault(block.name, 0.0)
            return output
        layer: Map = self._plain[block.name]
        chain = layer
        smoothness, config = solver.L, solver.solver.config
        if block.norm is not None:
            assert y is not None
            norm = self._plain[block.norm.name]
            mean, var = _statistics(norm, y)
            chain = _folded(layer, norm, mean, var)
            scale = (var + _eps(norm)).rsqrt()
            diagonal = scale if norm.weight is None else norm.weight * scale
            smoothness = solver._scaled_L(solver._kernel_at_rest(), smoothness, diagonal.detach(), uses_batch(norm))
        act = self._activation(block)
        with torch.no_grad():
            c = self._sums.pop(block.name) if block.outlet == "activation" else chain(u)
            v = solve(c, u, chain, act, smoothness.detach() + config.lam, config.lam, config.iters)
            inside = block.outlet == "activation" or (block.norm is not None and block.norm.holds_activation)
            expected, plain = (act(v.clone()), act(c.clone())) if inside else (v, c)
            scale = expected.abs().amax().clamp_min(1e-30)
            # NaN must not look like agreement.
            error = float((output.detach() - expected).abs().amax() / scale)
            name = block.name if block.name not in self.result.errors else f"{block.name} (again)"
            self.result.errors[name] = max(error, self.result.errors.get(name, 0.0)) if error == error else error
            growth = expected.square().mean().sqrt() / plain.square().mean().sqrt().clamp_min(1e-30)
            self.result.growth[name] = float(growth)
        return output / growth.clamp_min(1.0)

    def _activation(self, block: Block) -> Map:
        part = block.activation
        if part is None:
            return lambda x: x
        if part.name is not None:
            return self._plain[part.name]
        assert part.function is not None
        function, args, kwargs = part.function, part.args, part.kwargs
        return lambda x: function(x, *args, **kwargs)


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = (*args, *kwargs.values())[0]
    assert isinstance(given, Tensor)
    return given


def _statistics(norm: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and variance that a norm uses in its current mode: those of the batch, or the running ones."""
    if norm.running_var is None or (norm.training and isinstance(norm, _BatchNorm)):
        axes = (0, *range(2, y.dim()))
        return y.mean(axes), y.var(axes, correction=0)
    return norm.running_mean, norm.running_var


def _eps(norm: Any) -> float:
    """Returns what a norm adds to a variance; the frozen norms of DETR write it in their forward."""
    return float(getattr(norm, "eps", 1e-5))


def _folded(layer: Map, norm: Any, mean: Tensor, var: Tensor) -> Map:
    weight, bias = norm.weight, norm.bias
    return lambda u: nn.functional.batch_norm(layer(u), mean, var, weight, bias, False, 0.0, _eps(norm))
