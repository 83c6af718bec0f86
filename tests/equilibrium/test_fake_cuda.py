"""Equilibria on a fake CUDA device: every tensor lands there, and values are only read where that is documented."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from solver_plugins.equilibrium import DeepOptEq, OptEqLayer, list_equilibrium_solvers
from tests.fake_cuda import on_fake_cuda


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("solver", list_equilibrium_solvers())
def test_forward(solver, kind, training):
    make = OptEqLayer.linear if kind == "linear" else OptEqLayer.conv2d
    count = 1 if solver == "fista" else 2
    regularizer = "half_squared" if solver == "sam" else None
    model = DeepOptEq([make(6, 4) for _ in range(count)], solver=solver, regularizer=regularizer, iters=4)
    x = torch.randn(3, 4) if kind == "linear" else torch.randn(3, 4, 5, 5)
    on_fake_cuda(model.train(training), x, training)


def test_other_activations_and_regularizers():
    for activation in ("tanh", "softplus", torch.nn.PReLU()):
        on_fake_cuda(DeepOptEq([OptEqLayer.linear(6, 4, activation=activation)], iters=3), torch.randn(3, 4), True)
    for name in ("l1", "inverse_norm", "decorrelation"):
        on_fake_cuda(DeepOptEq([OptEqLayer.linear(6, 4)], regularizer=name, iters=3), torch.randn(3, 4), True)


def test_a_look_at_a_value_would_be_seen():
    """The test of the test: with the guard gone, the fake device raises at the first look."""
    model = DeepOptEq([OptEqLayer.linear(6, 4)], iters=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("solver_plugins.equilibrium.solvers.loop.may_look", lambda: True)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            on_fake_cuda(model, torch.randn(3, 4), False)
    assert FakeTensorMode is not None and functional_call is not None
