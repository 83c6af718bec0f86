"""Directions against dense formulas, for every layer and geometry, in float64."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from solver_plugins import ProxProp
from solver_plugins.proxprop import proxprop, rows
from tests.proxprop.cases import LAYERS, D, make
from tests.proxprop.dense import conjugate_gradients, exact, flat, matrix_of

# torch says that it copies its input for an even kernel; that is what this case is here for.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def direction(model, inputs, **options):
    """Returns A, the plain gradient, and what ProxProp makes of it, all flat."""
    names = [name for name, parameter in model.layer.named_parameters() if parameter.requires_grad]
    A = matrix_of(model.layer, inputs, names)
    model.zero_grad()
    with ProxProp(model, **options) as prox:
        model(*inputs).sum().backward()
        gradients = flat([getattr(model.layer, name).grad for name in names])
        report = prox.precondition()
    return A, gradients, flat([getattr(model.layer, name).grad for name in names]), report["layer"]


@pytest.mark.parametrize("gram", ["sum", "mean"])
@pytest.mark.parametrize("name", LAYERS)
def test_exact_equals_the_dense_formula(name, gram):
    model, inputs = make(name)
    A, g, found, report = direction(model, inputs, tau_theta=0.7, gram=gram)
    assert report.space == ("batch" if "few rows" in name or name in BATCH else "features")
    scale = 1.0 if gram == "sum" else 1 / report.rows
    torch.testing.assert_close(found, exact(A, g, 0.7, scale), **CLOSE)


# Cases that have fewer rows than columns without their names saying so.
BATCH = {
    "linear, no bias",
    "linear, few tokens",
    "linear, one sample",
    "linear, called twice",
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_cg_equals_dense_cg_on_all_parameters(name, steps):
    model, inputs = make(name)
    A, g, found, _ = direction(model, inputs, tau_theta=1.3, mode=f"cg{steps}-joint")
    torch.testing.assert_close(found, conjugate_gradients(A, g, 1.3, steps), **CLOSE)


@pytest.mark.parametrize("name", LAYERS)
def test_cg_without_a_matrix(name, monkeypatch):
    monkeypatch.setattr(proxprop, "GRAM_BYTES", 0)
    model, inputs = make(name)
    A, g, found, report = direction(model, inputs, tau_theta=1.3, mode="cg3-joint", gram="mean")
    assert report.space == "matrix-free"
    torch.testing.assert_close(found, conjugate_gradients(A, g, 1.3, 3, 1 / report.rows), **CLOSE)


@pytest.mark.parametrize("name", [name for name in LAYERS if "conv" in name])
def test_small_pieces_change_nothing(name, monkeypatch):
    """As if im2col did not fit into memory: one sample and one channel at a time."""
    monkeypatch.setattr(rows, "PIECE_BYTES", 1)
    monkeypatch.setattr("solver_plugins.proxprop.gram.PIECE_BYTES", 1)
    model, inputs = make(name)
    A, g, found, _ = direction(model, inputs)
    torch.testing.assert_close(found, exact(A, g, 1.0), **CLOSE)


@pytest.mark.parametrize("name", ["linear, few rows", "conv2d, few rows", "conv2d, groups", "linear, many rows"])
def test_cg_equals_exact_at_convergence(name):
    model, inputs = make(name)
    A, g, found, report = direction(model, inputs, mode="cg500")
    assert report.iterations < 500
    torch.testing.assert_close(found, exact(A, g, 1.0), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["exact", "cg2-joint"])
@pytest.mark.parametrize("name", ["linear, few rows", "linear, called twice", "conv2d, few rows", "conv2d"])
def test_gradients_that_are_more_than_the_layers(name, mode):
    """A penalty on the weights is part of the gradient, and not of the form X^T D."""
    model, inputs = make(name)
    A = matrix_of(model.layer, inputs, ["weight", "bias"])
    with ProxProp(model, mode) as prox:
        (model(*inputs).sum() + model.layer.weight.square().sum()).backward()
        g = flat([model.layer.weight.grad, model.layer.bias.grad])
        prox.precondition()
    expected = exact(A, g, 1.0) if mode == "exact" else conjugate_gradients(A, g, 1.0, 2)
    torch.testing.assert_close(flat([model.layer.weight.grad, model.layer.bias.grad]), expected, **CLOSE)


@pytest.mark.parametrize("factor", [0.25, 65536.0])
def test_scaled_gradients(factor):
    """Directions are homogeneous: a factor on the gradient is a factor on the direction."""
    model, inputs = make("linear, few rows")
    A = matrix_of(model.layer, inputs, ["weight", "bias"])
    with ProxProp(model, "cg2-joint") as prox:
        model(*inputs).sum().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        g = flat([model.layer.weight.grad, model.layer.bias.grad])
        assert prox.precondition()["layer"].space == "batch"
    expected = conjugate_gradients(A, g, 1.0, 2)
    torch.testing.assert_close(flat([model.layer.weight.grad, model.layer.bias.grad]), expected, **CLOSE)


def test_the_paper_spelled_out():
    """The update of (11), minimised by its own normal equations (44), is theta - tau V."""
    fc, head, x = nn.Linear(4, 3, bias=False, **D), nn.Linear(3, 2, **D), torch.randn(5, 4, **D)
    model = nn.Sequential(fc, nn.Tanh(), head)
    tau, tau_theta = 0.3, 2.0
    with ProxProp(model, tau_theta=tau_theta) as prox:
        z = fc(x)
        z.retain_grad()
        head(torch.tanh(z)).square().sum().backward()
        prox.precondition()
    a, target = x.T, (z - tau * z.grad).detach().T
    updated = (target @ a.T + fc.weight.detach() / tau_theta) @ torch.linalg.inv(
        a @ a.T + torch.eye(4, **D) / tau_theta
    )
    torch.testing.assert_close(fc.weight.detach() - tau * fc.weight.grad, updated, **CLOSE)


@pytest.mark.parametrize(("penalty", "accuracy"), [(0.0, 1e-4), (1e-2, 1e-3)])
def test_large_activations_in_float32(penalty, accuracy):
    """Activations of 1e3 shrink the direction by 1e8: rounding errors of the gradient must not come through."""

    def run(model, x):
        with ProxProp(model) as prox:
            hidden = torch.tanh(model[0](x) / 1e3)
            (model[1](hidden).sum() + penalty * model[0].weight.square().sum()).backward()
            prox.precondition()
        return flat([model[0].weight.grad, model[0].bias.grad]).double()

    model = nn.Sequential(nn.Linear(300, 20), nn.Linear(20, 1))
    x = 1e3 * torch.randn(2, 300)
    wide = copy.deepcopy(model).double()
    found, expected = run(model, x), run(wide, x.double())
    assert (found - expected).norm() < accuracy * expected.norm()


@given(st.data())
def test_hypothesis_any_shape(data):
    n1, n2 = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    batch, steps = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    layer = nn.Linear(n1, n2, bias=data.draw(st.booleans()), **D)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(n2, 2, **D))
    x = torch.randn(batch, n1, **D)
    names = [name for name, _ in layer.named_parameters()]
    A = matrix_of(layer, [x], names)
    with ProxProp(model, f"cg{steps}-joint") as prox:
        model(x).square().sum().backward()
        g = flat([getattr(layer, name).grad for name in names])
        prox.precondition()
    found = flat([getattr(layer, name).grad for name in names])
    torch.testing.assert_close(found, conjugate_gradients(A, g, 1.0, steps), rtol=1e-7, atol=1e-9)
