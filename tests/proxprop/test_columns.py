"""One run of conjugate gradients per output, as in the authors' code: https://github.com/tfrerix/proxprop.

The reference solves for the updated weights, as theirs does, and starts at the weights; ProxProp solves for the
direction, and starts at zero.
"""

import pytest
import torch
from torch import Tensor, nn

from solver_plugins import ProxProp
from solver_plugins.proxprop import proxprop
from tests.proxprop.cases import LAYERS, D, make
from tests.proxprop.dense import conjugate_gradients, exact, flat, matrix_of

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def updated_weights(x: Tensor, z: Tensor, theta: Tensor, tau_theta: float, steps: int, aliased: bool) -> Tensor:
    """Returns ``argmin |X t - Z|^2/2 + |t - theta|^2/(2 tau_theta)`` after some steps from theta, by columns of ``Z``.

    In the authors' code the first direction and the residual are one tensor, so that updating the residual in place
    also moves the direction (``aliased``); and 1e-6 is added to denominators, which is left out here.
    """
    t = theta.clone()
    for column in range(z.shape[1]):
        residual = x.T @ z[:, column] + theta[:, column] / tau_theta
        residual = residual - x.T @ (x @ t[:, column]) - t[:, column] / tau_theta
        p = residual
        for step in range(steps):
            product = x.T @ (x @ p) + p / tau_theta
            alpha = (residual @ residual) / (p @ product)
            t[:, column] += alpha * p
            new = residual - alpha * product
            if aliased and step == 0:
                p = new
            p = new + p * (new @ new) / (residual @ residual)
            residual = new
    return t


def theirs(layer: nn.Linear, x: Tensor, d: Tensor, tau_theta: float, steps: int, aliased: bool = False) -> Tensor:
    """Returns the direction for weight and bias, one column per output."""
    ones, theta = torch.ones(len(x), 1, **D), torch.cat([layer.weight.detach().T, layer.bias.detach()[None]])
    z = layer(x).detach() - d
    return theta - updated_weights(torch.cat([x, ones], 1), z, theta, tau_theta, steps, aliased)


def ours(rows: int, mode: str, **options) -> tuple[nn.Linear, Tensor, Tensor, Tensor, object]:
    """Returns the layer, its input, the gradient of its output, the direction by columns, and the report."""
    torch.manual_seed(rows)
    layer, x = nn.Linear(7, 9, **D), torch.randn(rows, 7, **D)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(9, 2, **D))
    with ProxProp(model, mode, **options) as prox:
        y = layer(x)
        y.retain_grad()
        model[1:](y).square().sum().backward()
        report = prox.precondition()["0"]
    return layer, x, y.grad, torch.cat([layer.weight.grad.T, layer.bias.grad[None]]), report


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize(("rows", "space"), [(4, "batch"), (20, "features"), (20, "matrix-free")])
def test_cg_is_the_authors_without_its_aliasing(rows, space, steps, monkeypatch):
    if space == "matrix-free":
        monkeypatch.setattr(proxprop, "GRAM_BYTES", 0)
    layer, x, d, found, report = ours(rows, f"cg{steps}", tau_theta=0.7)
    assert (report.space, report.iterations) == (space, steps)
    torch.testing.assert_close(found, theirs(layer, x, d, 0.7, steps), **CLOSE)


@pytest.mark.parametrize("rows", [4, 20])
def test_one_step_length_for_all_outputs_is_another_direction(rows):
    layer, x, d, found, _ = ours(rows, "cg1-joint")
    apart = (found - theirs(layer, x, d, 1.0, 1)).norm() / found.norm()
    assert apart > 0.05


@pytest.mark.parametrize("rows", [4, 20])
def test_own_step_lengths_are_more_exact(rows):
    """Every output has its own Krylov space, which the joint one only combines: the energy error is smaller."""
    _, x, d, found, _ = ours(rows, "cg2")
    joint = ours(rows, "cg2-joint")[3]
    wide = torch.cat([x, torch.ones(rows, 1, **D)], 1)
    M = torch.eye(8, **D) + wide.T @ wide
    solution = torch.linalg.solve(M, wide.T @ d)

    def error(direction: Tensor) -> float:
        return float(((direction - solution) * (M @ (direction - solution))).sum())

    assert error(found) < 0.99 * error(joint)


def test_the_aliased_code_takes_no_second_step_of_conjugate_gradients():
    """``P = R; R -= alpha A P`` moves P, too: the first step is right, the second one is not conjugate to it."""
    layer, x, d, _, _ = ours(20, "cg1")
    right, aliased = ([theirs(layer, x, d, 1.0, steps, alias) for steps in (1, 2)] for alias in (False, True))
    torch.testing.assert_close(aliased[0], right[0], **CLOSE)
    assert (aliased[1] - right[1]).norm() > 0.01 * right[1].norm()
    wide = torch.cat([x, torch.ones(20, 1, **D)], 1)
    M = torch.eye(8, **D) + wide.T @ wide
    for found, conjugate in ((right, True), (aliased, False)):
        first, second = found[0][:, 0], found[1][:, 0] - found[0][:, 0]
        cosine = (first @ M @ second) / ((first @ M @ first) * (second @ M @ second)).sqrt()
        assert (cosine.abs() < 1e-12) == conjugate


@pytest.mark.parametrize("name", [name for name in LAYERS if "conv" in name][::4])
def test_convolutions_have_one_step_length(name):
    model, inputs = make(name)
    A = matrix_of(model.layer, inputs, [name for name, _ in model.layer.named_parameters()])
    with ProxProp(model, "cg2") as prox:
        model(*inputs).sum().backward()
        g = flat([parameter.grad for parameter in model.layer.parameters()])
        prox.precondition()
    found = flat([parameter.grad for parameter in model.layer.parameters()])
    torch.testing.assert_close(found, conjugate_gradients(A, g, 1.0, 2), **CLOSE)


@pytest.mark.parametrize("rows", [4, 20])
def test_outputs_of_any_scale(rows):
    """Gradients of one output are 1e-30 times those of another, and those of a third are zero."""
    layer, x = nn.Linear(7, 3), torch.randn(rows, 7)
    model = nn.Sequential(layer, nn.Linear(3, 1))
    scales = torch.tensor([1.0, 1e-30, 0.0])
    with ProxProp(model, "cg50") as prox:
        model[1](layer(x) * scales).sum().backward()
        g = flat([layer.weight.grad.div(scales[:, None]).nan_to_num(), layer.bias.grad.div(scales).nan_to_num()])
        prox.precondition()
    found = torch.cat([layer.weight.grad.T, layer.bias.grad[None]])
    A = matrix_of(layer, [x], ["weight", "bias"]).double()
    expected = exact(A, g.double(), 1.0)
    expected = torch.cat([expected[:21].reshape(3, 7).T, expected[None, 21:]])
    assert not found[:, 2].any()
    for column in (0, 1):
        scaled = found[:, column].double() / scales[column]
        torch.testing.assert_close(scaled, expected[:, column], rtol=1e-3, atol=1e-5)
