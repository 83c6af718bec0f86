import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.nn import functional

from solver_plugins import convert_model
from solver_plugins.errors import NotProximalError, ShapeError
from solver_plugins.prox import LeakyReluPrior, PreluPrior, prox_for
from solver_plugins.surgery.errors import TargetError


def per_channel(*slopes: float) -> nn.PReLU:
    module = nn.PReLU(len(slopes)).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor(slopes))
    return module


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 4)])
@pytest.mark.parametrize("step", [0.2, 1.0, 3.0])
def test_slopes_broadcast_along_channels(shape, step):
    slopes = (0.0, 0.3, 1.0)
    prior = PreluPrior(per_channel(*slopes))
    a = torch.randn(*shape, dtype=torch.float64)
    x, d, g = prior.prox(a, step), prior.derivative(a, step), prior.g(a)
    assert x.shape == d.shape == g.shape == a.shape
    for channel, slope in enumerate(slopes):
        one = LeakyReluPrior(slope)
        torch.testing.assert_close(x[:, channel], one.prox(a[:, channel], step))
        torch.testing.assert_close(d[:, channel], one.derivative(a[:, channel], step))
        torch.testing.assert_close(g[:, channel], one.g(a[:, channel]))


def test_the_unit_step_is_prelu_bit_for_bit():
    module = per_channel(0.1, 0.2, 0.7)
    a = torch.randn(4, 3, 5, dtype=torch.float64)
    assert torch.equal(prox_for(module).prox(a, 1.0), functional.prelu(a, module.weight))


def test_one_slope_fits_any_shape_and_many_only_theirs():
    one = PreluPrior(nn.PReLU())
    assert one.prox(torch.randn(7), 0.5).shape == (7,)
    assert one.prox(torch.randn(()), 0.5).shape == ()
    many = PreluPrior(nn.PReLU(3))
    for shape in ((3,), (2, 4)):
        with pytest.raises(ShapeError, match="3 slopes"):
            many.prox(torch.randn(*shape), 0.5)


@pytest.mark.parametrize("step", [0.3, 1.0, 4.0])
def test_gradients_reach_the_slope(step):
    module = per_channel(0.2, 0.6)
    a = torch.tensor([[-0.7, 1.2], [0.4, -2.1], [-1.5, -0.3]], dtype=torch.float64, requires_grad=True)
    prior = PreluPrior(module)
    assert prior.learnable
    prior.prox(a, step).square().sum().backward()
    assert (module.weight.grad.abs() > 0).all()

    assert gradcheck(
        lambda z, weight: PreluPrior(_with(weight)).prox(z, step), (a, module.weight.detach().requires_grad_())
    )


def _with(weight):
    """A module whose weight is a plain tensor, as ``torch.func.functional_call`` and parametrizations make it."""
    module = nn.Module()
    module.weight = weight
    return module


@pytest.mark.parametrize("bad", [1.5, -0.25, float("nan")])
@pytest.mark.parametrize("step", [0.5, 1.0])
def test_a_slope_out_of_range_is_caught_at_run_time(bad, step):
    module = per_channel(0.2, 0.6, 0.9)
    prior = prox_for(module)
    prior.prox(torch.randn(2, 3).double(), step)
    with torch.no_grad():
        module.weight[1] = bad
    for call in (prior.prox, prior.derivative):
        with pytest.raises(NotProximalError, match=rf"slope in \[0, 1\].*found {bad}"):
            call(torch.randn(2, 3).double(), step)
    with pytest.raises(NotProximalError):
        prior.g(torch.randn(2, 3).double())


def test_dry_runs_on_the_meta_device_are_let_through():
    prior = prox_for(nn.PReLU(device="meta"))
    assert prior.prox(torch.randn(3, device="meta"), 0.5).shape == (3,)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_of_both_stays_a_pair(clone):
    module = nn.PReLU()
    new_module, new_prior = clone((module, prox_for(module)))
    assert new_prior.module is new_module is not module
    with torch.no_grad():
        new_module.weight.fill_(0.75)
    a = torch.tensor([-1.0])
    assert new_prior.prox(a).item() == -0.75
    assert prox_for(module).prox(a).item() == -0.25


def test_it_compiles_with_the_check_in_the_graph():
    module = nn.PReLU()
    prior = PreluPrior(module)
    compiled = torch.compile(lambda z: prior.prox(z, 0.5), fullgraph=True, backend="aot_eager")
    a = torch.randn(6)
    torch.testing.assert_close(compiled(a), prior.prox(a, 0.5))
    with torch.no_grad():
        module.weight.fill_(2.0)
    with pytest.raises(RuntimeError, match="slope in"):
        compiled(a)


@pytest.mark.parametrize("slope", [1.5, -0.1])
def test_a_slope_out_of_range_is_no_prior(slope):
    with pytest.raises(NotProximalError, match="slope in"):
        prox_for(per_channel(0.3, slope))


def test_a_layer_before_a_slope_out_of_range_is_refused_or_keeps_it_outside():
    """As before a GELU: the layer can be solved without a prior, and the activation follows."""
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4, init=1.5), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    options = {"solver": "proxgd", "iters": 1, "targets": ["0"], "example_inputs": x}
    with pytest.raises(TargetError, match=r"found 1.5 .*pattern='linear'"):
        convert_model(copy.deepcopy(model), **options)
    converted = convert_model(copy.deepcopy(model), pattern="linear", **options)
    torch.testing.assert_close(converted(x), model(x))
