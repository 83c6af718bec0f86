"""Gradients of equilibria: against finite differences, against unrolled ones, under every mode; failures are loud."""

import copy
import tracemalloc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solver_plugins.equilibrium import DeepOptEq, DivergenceError, OptEqLayer
from solver_plugins.equilibrium.problem import Jacobian
from solver_plugins.errors import DoubleBackwardError, NotConvergedWarning
from tests.equilibrium.small import DOUBLE, conv_network, inputs, network
from tests.gloo import in_two_processes

VARIANTS = {
    "one layer": lambda **o: (network(1, activation="tanh", **o), inputs(3, 5)),
    "three layers": lambda **o: (network(3, activation="tanh", **o), inputs(3, 5)),
    "relu": lambda **o: (network(2, **o), inputs(3, 5)),
    "prelu": lambda **o: (network(2, activation=nn.PReLU(dtype=DOUBLE), **o), inputs(3, 5)),
    "conv": lambda **o: (conv_network(1, **o), inputs(2, 2, 4, 3)),
    "deep conv, aol": lambda **o: (conv_network(2, constraint="aol", **o), inputs(2, 2, 4, 3)),
    "appended l1": lambda **o: (network(2, regularizer="l1", lam=0.1, **o), inputs(3, 5)),
    "appended, one layer": lambda **o: (network(1, regularizer="half_squared", lam=0.3, **o), inputs(3, 5)),
    "appended decorrelation": lambda **o: (network(2, regularizer="decorrelation", lam=0.02, **o), inputs(6, 5)),
}


def loss_of(model, x):
    return (model(x) * inputs(*model(x).shape, seed=7)).sum() + model(x).square().sum() / 2


def gradients(model, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss_of(model, x), [x, *model.parameters()])


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS.keys())
def test_implicit_equals_converged_unrolled(make):
    implicit, x = make()
    unrolled, _ = make(solver="fixed_point", gradient="unrolled", iters=300)
    for found, expected in zip(gradients(implicit, x), gradients(unrolled, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS.keys())
def test_implicit_equals_finite_differences(make):
    """Along one random direction of input and parameters together; a backbone sees the gradient of the input."""
    model, x = make()
    found = gradients(model, x)
    directions = [inputs(*tensor.shape, seed=20 + n) for n, tensor in enumerate(found)]
    slope = sum((a * b).sum() for a, b in zip(found, directions, strict=True))

    def at(step):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, direction in zip(moved.parameters(), directions[1:], strict=True):
                parameter.add_(step * direction)
            return loss_of(moved, x + step * directions[0])

    h = 1e-6
    difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    torch.testing.assert_close(slope.detach(), difference, rtol=1e-6, atol=1e-7)


def test_gradients_reach_a_backbone():
    torch.manual_seed(0)
    backbone = nn.Linear(4, 5, dtype=DOUBLE)
    x = inputs(3, 4)
    grads = []
    for options in ({}, {"solver": "fixed_point", "gradient": "unrolled", "iters": 300}):
        model = nn.Sequential(backbone, nn.Tanh(), network(2, **options))
        grads.append(torch.autograd.grad(model(x).square().sum(), list(backbone.parameters())))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_one_layer_is_solved_by_cg_in_few_products_and_does_not_depend_on_alpha():
    found = []
    for alpha in (0.3, 1.0):
        model, x = network(1, alpha=alpha, state=30, hidden=40, tol=1e-12), inputs(3, 5)
        equilibrium = model.solve(x)
        found.append(torch.autograd.grad(equilibrium.value.square().sum(), list(model.parameters())))
        assert 3 <= equilibrium.backward.products <= 30 and equilibrium.backward.residual <= 1e-12
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_second_derivatives_are_right_or_refused():
    model, x = network(2, activation="tanh"), inputs(2, 5).requires_grad_()
    with pytest.raises(DoubleBackwardError, match="gradient='unrolled'"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    for solver in ("fixed_point", "anderson"):
        unrolled = network(2, activation="tanh", solver=solver, gradient="unrolled", iters=4)
        assert torch.autograd.gradgradcheck(unrolled, (x,), atol=1e-5)


@pytest.mark.parametrize("solver", ["anderson", "fista", "fixed_point", "sam"])
def test_unrolled_gradients_are_those_of_the_iterations(solver):
    model = network(
        1, activation="tanh", solver=solver, gradient="unrolled", iters=6, regularizer="half_squared", lam=0.2
    )
    assert torch.autograd.gradcheck(model, (inputs(2, 5).requires_grad_(),), atol=1e-6)


@pytest.mark.parametrize("layers", [1, 3])
def test_gradients_do_not_depend_on_the_batch(layers):
    model, x = network(layers, tol=1e-3, activation="tanh"), inputs(4, 5) * 10.0 ** torch.arange(-2, 2)[:, None]
    x.requires_grad_()
    (together,) = torch.autograd.grad(model(x).square().sum(), x)
    for row in range(4):
        (alone,) = torch.autograd.grad(model(x[row : row + 1]).square().sum(), x)
        torch.testing.assert_close(together[row], alone[row], rtol=1e-9, atol=1e-12)


def test_tiny_gradients_survive_float32():
    model = DeepOptEq([OptEqLayer.linear(6, 5) for _ in range(2)], tol=1e-6, iters=50)
    x = torch.randn(3, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    (tiny,) = torch.autograd.grad(model(x).sum() * 1e-30, x)
    torch.testing.assert_close(tiny * 1e30, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_half_precision(gradient):
    torch.manual_seed(0)
    model = DeepOptEq([OptEqLayer.conv2d(6, 4, 8), OptEqLayer.conv2d(6, 4, 8)], gradient=gradient)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
        torch.testing.assert_close(found, expected)  # float32 inside: tolerances lie below bfloat16's rounding.
        from_half = model(x.bfloat16())
    assert from_half.dtype == torch.bfloat16
    torch.testing.assert_close(from_half.float(), expected, rtol=2e-2, atol=2e-2)
    from_half.float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    half = copy.deepcopy(model).bfloat16()
    found = half(x.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=5e-2, atol=5e-2)
    found.float().sum().backward()
    assert half.layers[0].W.weight.grad.dtype == torch.bfloat16


def saved_bytes(gradient, iters):
    """What autograd keeps between forward and backward."""
    kept = {}
    model = network(
        2, state=40, hidden=40, gradient=gradient, iters=iters, solver="fixed_point", tol=0.0, implicit_tol=1.0
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t) is None or t, lambda t: t):
        model(inputs(8, 5))
    return sum(tensor.nbytes for tensor in kept.values())


def test_implicit_memory_does_not_grow_with_the_iterations():
    assert saved_bytes("implicit", 50) == saved_bytes("implicit", 5)
    assert saved_bytes("unrolled", 50) > 5 * saved_bytes("unrolled", 5)


def test_python_keeps_nothing_per_iteration():
    peaks = []
    for iters in (10, 200):
        model, x = network(2, iters=iters, tol=0.0, implicit_tol=1.0), inputs(4, 5)
        model(x)
        tracemalloc.start()
        model(x)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


@pytest.mark.parametrize("make", [lambda: (network(3), inputs(3, 5)), lambda: (conv_network(3), inputs(2, 2, 4, 3))])
def test_weights_get_their_gradient_from_the_product_that_confirms_the_residual(make, monkeypatch):
    """No evaluation is recorded, and no pass is made beyond the products that the report counts."""
    model, x = make()
    calls = []
    pull = Jacobian.pull
    monkeypatch.setattr(Jacobian, "pull", lambda self, y: calls.append(y) or pull(self, y))
    found = model.solve(x)
    found.value.square().sum().backward()
    assert len(calls) == found.backward.products > 3
    assert found.backward.residual <= 1e-13


def test_frozen_weights_get_no_gradient_and_the_others_keep_theirs():
    model, x = network(2), inputs(3, 5)
    model(x).square().sum().backward()
    frozen = network(2)
    frozen.layers[0].W.requires_grad_(False)
    frozen(x).square().sum().backward()
    assert frozen.layers[0].W.weight.grad is None
    for a, b in ((frozen.layers[1].W, model.layers[1].W), (frozen.layers[0].U, model.layers[0].U)):
        assert torch.equal(a.weight.grad, b.weight.grad)


def test_weights_that_change_before_the_backward_are_refused():
    model = network(2)
    loss = model(inputs(3, 5)).sum()
    with torch.no_grad():
        model.layers[1].W.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_follows_may_work_in_place():
    model, x = conv_network(2), inputs(2, 2, 4, 3)
    expected = torch.autograd.grad((model(x) - 0.01).relu().sum(), list(model.parameters()))
    found = torch.autograd.grad(model(x).sub_(0.01).relu_().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_backward_under_autocast_keeps_its_precision():
    torch.manual_seed(0)
    model = DeepOptEq([OptEqLayer.linear(6, 5, constraint="none") for _ in range(2)], tol=1e-6, iters=50)
    x = torch.randn(3, 5)
    inside = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model.zero_grad()
            model(x).square().sum().backward()
        inside.append(model.layers[0].W.weight.grad.clone())
    torch.testing.assert_close(inside[1], inside[0], rtol=1e-4, atol=1e-6)


def test_a_solve_that_did_not_converge_is_unrolled_with_a_warning():
    model, x = network(2, iters=2, tol=1e-10, implicit_tol=1e-6), inputs(3, 5)
    with pytest.warns(NotConvergedWarning, match="unrolled instead"):
        found = gradients(model, x)
    expected = gradients(network(2, iters=2, gradient="unrolled"), x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.warns(NotConvergedWarning, match="residual is about"), torch.no_grad():
        model(x)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_backward_that_did_not_converge_is_unrolled_with_a_warning(layers):
    model, x = network(layers, implicit_iters=2, implicit_tol=1e-6, iters=300), inputs(3, 5)
    equilibrium = model.solve(x)
    with pytest.warns(NotConvergedWarning, match="implicit backward"):
        found = torch.autograd.grad(equilibrium.value.square().sum(), list(model.parameters()))
    converged = network(layers)
    expected = torch.autograd.grad(converged(x).square().sum(), list(converged.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_divergence_names_layer_and_residual(gradient):
    model, x = network(2, gradient=gradient, iters=30), inputs(3, 5).abs()
    with torch.no_grad():
        model.layers[1].W.weight.copy_(torch.eye(8, 6) * 3)
    with pytest.raises(DivergenceError, match=r"residual is .*layers\.1 has \|W\| of 3"):
        model(x)
    with torch.no_grad(), pytest.raises(DivergenceError, match=r"layers\.1"):
        model(x)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_numbers_that_are_not_finite_are_named(gradient):
    model, x = network(2, gradient=gradient), inputs(3, 5)
    x[1, 2] = torch.nan
    with pytest.raises(DivergenceError, match=r"The input of layers\.0"):
        model(x)
    with torch.no_grad():
        model.layers[1].U.bias[0] = torch.inf
    with pytest.raises(DivergenceError, match=r"layers\.1\.U\.bias holds numbers"):
        model(inputs(3, 5))


def test_no_gradient_is_asked_for_and_none_is_kept():
    model, x = network(2), inputs(3, 5)
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(x), network(2)(x).detach())
    torch.testing.assert_close(model.eval()(x), network(2)(x))


@pytest.mark.parametrize("solver", ["fixed_point", "anderson"])
def test_unrolled_compiles_as_one_graph(solver):
    model = network(2, gradient="unrolled", iters=4, solver=solver, activation="tanh")
    x = inputs(3, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def replica(rank):
    found = []
    for gradient in ("implicit", "unrolled"):
        model = DistributedDataParallel(network(2, gradient=gradient, activation="tanh", iters=60))
        model(inputs(4, 5)[2 * rank : 2 * rank + 2]).square().mean().backward()
        found.append([parameter.grad.tolist() for parameter in model.parameters()])
    return found


def test_two_processes_have_the_gradient_of_the_whole_batch():
    model = network(2, activation="tanh", iters=60)
    model(inputs(4, 5)).square().mean().backward()
    for process in in_two_processes(replica):
        for grads in process:
            for found, parameter in zip(grads, model.parameters(), strict=True):
                torch.testing.assert_close(torch.tensor(found, dtype=DOUBLE), parameter.grad, rtol=1e-7, atol=1e-9)
