"""What a network with solvers must compute, from plain modules alone: the reference for the tests of links.

    v_1 = c,    x_k = relu(v_k),    v_{k+1} = x_k - (A A^T + lam) x_k / (L + lam) + c

``A`` is the plain layer's weight, scaled row by row by the norm behind it; ``c`` is the argument of the activation as
the plain modules compute it. Only ``L`` and the diagonal that it belongs to are read from the converted layer.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from solver_plugins import convert_model, inspect_model
from solver_plugins.blocks.fold import uses_batch
from solver_plugins.blocks.outlet import folded_norm
from solver_plugins.errors import SolverPluginsError

ITERS, LAM = 3, 1e-3
SKIP = {"linear": "linear-skip-act", "conv": "linear-norm-skip-act"}
"""The pattern of a residual layer, by its kind."""
Join = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two residual layers and one ReLU for both (or one each); what is computed is one function, ``body(net, x)``."""

    def __init__(self, body: Any, kind: str = "linear", shared: bool = True, inplace: bool = False):
        super().__init__()
        for name in ("a", "b"):
            layer = nn.Linear(4, 4) if kind == "linear" else nn.Conv2d(3, 3, 3, padding=1, bias=False)
            setattr(self, name, layer)
            setattr(self, f"norm_{name}", nn.Identity() if kind == "linear" else lively(nn.BatchNorm2d(3)))
            if not shared:
                setattr(self, f"act_{name}", nn.ReLU(inplace))
        if shared:
            self.act = nn.ReLU(inplace)
        self.body, self.shared, self.flag = body, shared, False

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)

    def branch(self, name: str, x: Tensor) -> Tensor:
        """Returns what a layer and its norm make of ``x``."""
        return getattr(self, f"norm_{name}")(getattr(self, name)(x))

    def activate(self, name: str, x: Tensor) -> Tensor:
        """Calls the activation behind a layer's sum."""
        return (self.act if self.shared else getattr(self, f"act_{name}"))(x)


def lively(norm: Any) -> Any:
    """Gives a norm statistics, scales and shifts that are not the initial ones."""
    with torch.no_grad():
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(0, 0.3)
    return norm


def inputs(kind: str) -> Tensor:
    """Returns a batch for a :class:`Net`."""
    shape = (5, 4) if kind == "linear" else (4, 3, 5, 5)
    return torch.randn(shape, dtype=torch.float64)


def converted(plain: nn.Module, x: Any, iters: int = ITERS, **options: Any) -> nn.Module:
    """Returns a converted copy."""
    options = {"pattern": "all", **options}
    return convert_model(copy.deepcopy(plain), "proxgd", iters, example_inputs=x, **options)


def twins(body: Any, kind: str = "linear", **options: Any) -> tuple[Net, Net, Tensor]:
    """Returns a plain :class:`Net`, its converted copy with a solver behind each sum, and a batch."""
    plain, x = Net(body, kind, **options).double(), inputs(kind)
    assert patterns(plain, x) == dict.fromkeys("ab", SKIP[kind])
    return plain, converted(plain, x), x


def patterns(plain: nn.Module, x: Any) -> dict[str, str]:
    """Returns the pattern of every layer that would be converted, by name."""
    report = inspect_model(plain, "proxgd", pattern="all", example_inputs=x, lipschitz=False)
    return {row.name: row.pattern for row in report.rows if row.converted}


def diagonal(norm: Any, y: Tensor) -> Tensor:
    """Returns by what a norm multiplies each feature of its input ``y`` in its present mode."""
    if isinstance(norm, _BatchNorm) and norm.training:
        var = y.var((0, *range(2, y.dim())), correction=0)
        return norm.weight / torch.sqrt(var + norm.eps)
    one = torch.ones_like(y[:1])
    return (normed(norm, one) - normed(norm, torch.zeros_like(one))).transpose(0, 1).flatten(1)[:, 0]


def normed(norm: Any, y: Tensor) -> Tensor:
    """Returns what a norm computes, without the activation that timm's hold."""
    return nn.BatchNorm2d.forward(norm, y) if hasattr(norm, "act") else norm(y)


def gram(layer: Any, size: torch.Size, x: Tensor, d: Tensor | None) -> Tensor:
    """Returns ``A A^T x`` for a plain layer on inputs of this size, its rows scaled by ``d``."""
    if isinstance(layer, nn.Linear):
        scale: Any = 1.0 if d is None else d
        return scale * ((scale * x) @ layer.weight @ layer.weight.t())
    scale = 1.0 if d is None else d.reshape(-1, *[1] * (x.dim() - 2))
    how = (layer.stride, layer.padding, layer.dilation, layer.groups)
    back = torch.nn.grad.conv2d_input(size, layer.weight, scale * x, *how)
    return scale * torch.conv2d(back, layer.weight, None, *how)


def solved(
    solver: Any,
    layer: nn.Module,
    u: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    act: Callable[[Tensor], Tensor] = torch.relu,
    iters: int = ITERS,
    blend: float = 1.0,
) -> Tensor:
    """Returns what the activation is given after ``iters`` steps.

    Args:
        solver: The converted layer, for its constant.
        layer: The plain layer.
        u: The layer's input.
        c: What the activation would be given.
        d: By what the norm behind the layer multiplies each feature.
        act: The activation.
        iters: How many steps.
        blend: How much of the last step there is, beside the first.
    """
    smoothness = solver.L.detach().to(c.dtype)
    if d is not None:
        batch = uses_batch(folded_norm(solver.link))
        smoothness = solver._scaled_L(layer.weight, smoothness, d.detach(), batch)
    v = c
    for _ in range(iters - 1):
        x = act(v)
        v = x - (gram(layer, u.shape, x, d) + LAM * x) / (smoothness + LAM) + c
    return (1 - blend) * c + blend * v


def block(plain: Net, made: Net, name: str, u: Tensor, join: Join, iters: int = ITERS) -> Tensor:
    """Returns ``relu(join(branch(u)))`` with the solver that a :class:`Net` has there; ``join`` adds the skip."""
    layer, norm = getattr(plain, name), getattr(plain, f"norm_{name}")
    y = layer(u)
    c = join(norm(y))
    d = None if isinstance(norm, nn.Identity) else diagonal(norm, y)
    return torch.relu(solved(getattr(made, name), layer, u, c, d, iters=iters))


def results(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Returns output, gradients and norm statistics of one step, by name; a gradient that is missing is zero."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    output = run(x)
    cotangent = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    (output * cotangent).sum().backward()
    found = {"output": output.detach(), "input": torch.zeros_like(x) if x.grad is None else x.grad}
    for name, parameter in module.named_parameters():
        found[f"{name}.grad"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found |= {name: buffer.clone() for name, buffer in module.state_dict().items() if "running" in name}
    return found


def assert_same(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    """Asserts that two tensors, or two dictionaries of them, hold the same numbers, each up to the largest of them."""
    if isinstance(expected, Tensor):
        found, expected = {"output": found}, {"output": expected}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other, value = found[name].detach(), value.detach()
        assert other.shape == value.shape and torch.isfinite(other).all(), name
        error, size = float((other - value).abs().max()), float(value.abs().max())
        # A gradient that vanishes, as that of a bias before a norm, is rounding alone.
        assert error <= rtol * size + 1e-10, f"{name} is off by {error:.2g}; its largest number is {size:.2g}"


REMEDY = re.compile(r"revert_model|convert|exclude=|targets=|refresh_steps|checkpoint the|checkpoint both", re.I)


def assert_same_or_refused(
    run: Callable[[], Any], expected: Any, checkpointed: bool = False, rtol: float = 1e-9
) -> str | None:
    """Asserts that ``run()`` gives what is expected, or raises a named error that says what to do.

    Args:
        run: What is tested.
        expected: Tensor, or dictionary of tensors.
        checkpointed: Whether gradient checkpointing is the cause; an error that blames it wrongly helps nobody.
        rtol: See :func:`assert_same`.

    Returns:
        The error's message; None where the numbers are right.
    """
    try:
        found = run()
    except SolverPluginsError as error:
        assert_helpful(str(error), checkpointed)
        return str(error)
    assert_same(found, expected, rtol)
    return None


def assert_helpful(message: str, checkpointed: bool = False) -> None:
    """Asserts that an error says what to do, and blames checkpointing only where that is the cause."""
    assert REMEDY.search(message), f"does not say what to do: {message}"
    assert checkpointed or "checkpoint" not in message.lower(), f"blames checkpointing: {message}"
