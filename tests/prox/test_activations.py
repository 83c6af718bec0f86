"""The table from activations to priors: what is accepted, what is refused and why, what is declared."""

import functools
import math
import re

import pytest
import timm.layers.activations as timm_activations
import timm.layers.activations_me as timm_activations_me
import torch
import transformers.activations as hf_activations
from torch import nn
from torch.nn import functional

from solver_plugins.errors import DuplicateNameError, NotProximalError, OptionError, UnknownNameError
from solver_plugins.prox import (
    AtanPrior,
    CeluPrior,
    EluPrior,
    HardsigmoidPrior,
    HardtanhPrior,
    IdentityPrior,
    LeakyReluPrior,
    LogSigmoidPrior,
    Monotone,
    PreluPrior,
    Relu6Prior,
    ReluPrior,
    SigmoidPrior,
    SoftmaxPrior,
    SoftplusPrior,
    SoftshrinkPrior,
    SoftsignPrior,
    SqrtSoftplusPrior,
    TanhBarrier,
    TanhPrior,
    TanhshrinkPrior,
    declare_activation,
    prox_for,
)
from tests.prox.cases import rational

MODULES = [
    (nn.Identity(), IdentityPrior()),
    (nn.ReLU(inplace=True), ReluPrior()),
    (nn.ReLU6(inplace=True), Relu6Prior()),
    (nn.Hardtanh(-2.0, 0.5, inplace=True), HardtanhPrior(-2.0, 0.5)),
    (nn.Threshold(0.25, 0.25), HardtanhPrior(0.25, math.inf)),
    (nn.LeakyReLU(0.2, inplace=True), LeakyReluPrior(0.2)),
    (nn.Softshrink(0.3), SoftshrinkPrior(0.3)),
    (nn.Tanhshrink(), TanhshrinkPrior()),
    (nn.ELU(0.5, inplace=True), EluPrior(0.5)),
    (nn.CELU(2.0), CeluPrior(2.0)),
    (nn.Tanh(), TanhPrior()),
    (nn.Sigmoid(), SigmoidPrior()),
    (nn.Hardsigmoid(), HardsigmoidPrior()),
    (nn.LogSigmoid(), LogSigmoidPrior()),
    (nn.Softplus(2.0), SoftplusPrior(2.0)),
    (nn.Softsign(), SoftsignPrior()),
    (nn.Softmax(1), SoftmaxPrior(1)),
    (nn.Softmax2d(), SoftmaxPrior(-3)),
    (timm_activations.Sigmoid(inplace=True), SigmoidPrior()),
    (timm_activations.Tanh(inplace=True), TanhPrior()),
    (timm_activations.HardSigmoid(), HardsigmoidPrior()),
    (timm_activations_me.HardSigmoidMe(), HardsigmoidPrior()),
    (hf_activations.LinearActivation(), IdentityPrior()),
]
if hasattr(hf_activations, "SqrtSoftplusActivation"):
    MODULES.append((hf_activations.SqrtSoftplusActivation(), SqrtSoftplusPrior()))


def stable_id(value: object) -> str:
    """A test's name must not hold an address: parallel workers compare the names."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(("module", "prior"), MODULES, ids=lambda value: type(value).__name__)
def test_modules(module, prior):
    assert prox_for(module) == prior
    a = torch.randn(2, 3, 4, 5)
    # timm's own hard sigmoid is another formula for the same function.
    torch.testing.assert_close(prox_for(module).prox(a), module(a.clone()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("module", [nn.PReLU(3), timm_activations.PReLU(3, inplace=True)], ids=["torch", "timm"])
def test_prelu_holds_its_module(module):
    prior = prox_for(module)
    assert isinstance(prior, PreluPrior)
    assert prior.module is module
    a = torch.randn(2, 3)
    assert torch.equal(prior.prox(a), module(a))


@pytest.mark.parametrize(
    ("function", "prior"),
    [
        (None, IdentityPrior()),
        (functional.relu, ReluPrior()),
        (functional.relu_, ReluPrior()),
        (torch.relu, ReluPrior()),
        (torch.relu_, ReluPrior()),
        (torch.Tensor.relu, ReluPrior()),
        (functional.relu6, Relu6Prior()),
        (functional.hardtanh, HardtanhPrior()),
        (torch.tanh, TanhPrior()),
        (functional.tanh, TanhPrior()),
        (torch.Tensor.tanh_, TanhPrior()),
        (torch.sigmoid, SigmoidPrior()),
        (functional.sigmoid, SigmoidPrior()),
        (torch.special.expit, SigmoidPrior()),
        (functional.hardsigmoid, HardsigmoidPrior()),
        (functional.logsigmoid, LogSigmoidPrior()),
        (functional.softplus, SoftplusPrior()),
        (functional.softsign, SoftsignPrior()),
        (functional.softshrink, SoftshrinkPrior()),
        (functional.tanhshrink, TanhshrinkPrior()),
        (functional.leaky_relu, LeakyReluPrior()),
        (functional.elu, EluPrior()),
        (functional.celu, CeluPrior()),
        (torch.atan, AtanPrior()),
        (torch.arctan, AtanPrior()),
        (timm_activations.sigmoid, SigmoidPrior()),
        (timm_activations.tanh, TanhPrior()),
        (timm_activations.hard_sigmoid, HardsigmoidPrior()),
        (functools.partial(functional.leaky_relu, negative_slope=0.3, inplace=True), LeakyReluPrior(0.3)),
        (functools.partial(functools.partial(functional.elu, alpha=0.3), inplace=True), EluPrior(0.3)),
        (functools.partial(torch.softmax, dim=1), SoftmaxPrior(1)),
        (functools.partial(functional.softmax, dim=-1), SoftmaxPrior(-1)),
        (functools.partial(torch.clamp, min=0.0, max=6.0), HardtanhPrior(0.0, 6.0)),
        (functools.partial(torch.Tensor.clamp, min=0.0), ReluPrior()),
        ("tanh", TanhPrior()),
        ("linear", IdentityPrior()),
        ("hard_sigmoid", HardsigmoidPrior()),
        ("tanh_barrier", TanhBarrier()),
        (TanhBarrier(0.1), TanhBarrier(0.1)),
    ],
)
def test_functions_names_and_priors(function, prior):
    assert prox_for(function) == prior


def test_parameters_of_a_call():
    assert prox_for(functional.hardtanh, -2.0, 3.0, True) == HardtanhPrior(-2.0, 3.0)
    assert prox_for(functional.leaky_relu, 0.2, inplace=True) == LeakyReluPrior(0.2)
    assert prox_for("tanh_barrier", gamma=0.1) == TanhBarrier(0.1)
    with pytest.raises(OptionError, match="parameters after the input: negative_slope, inplace"):
        prox_for(functional.leaky_relu, slope=0.2)
    with pytest.raises(OptionError, match="by name"):
        prox_for("tanh_barrier", 0.1)
    with pytest.raises(OptionError, match="no further parameters"):
        prox_for(nn.ReLU(), 0.1)
    with pytest.raises(OptionError, match="dim"):
        prox_for(functional.softmax)
    with pytest.raises(OptionError, match="dim"):
        prox_for(nn.Softmax())
    with pytest.raises(NotProximalError, match="binds its input"):
        prox_for(functools.partial(functional.elu, 0.5))


GELUS = [
    nn.GELU(),
    nn.GELU("tanh"),
    timm_activations.GELU(),
    timm_activations.GELUTanh(),
    timm_activations.QuickGELU(),
    hf_activations.GELUActivation(),
    hf_activations.GELUActivation(use_gelu_python=True),
    hf_activations.GELUTanh(),
    hf_activations.NewGELUActivation(),
    hf_activations.FastGELUActivation(),
    hf_activations.QuickGELUActivation(),
    hf_activations.AccurateGELUActivation(),
    hf_activations.ClippedGELUActivation(-10, 10),
    functional.gelu,
    functools.partial(functional.gelu, approximate="tanh"),
    timm_activations.gelu,
    timm_activations.quick_gelu,
    "gelu",
    "gelu_new",
    "quick_gelu",
]
SWISHES = [
    nn.SiLU(inplace=True),
    nn.Mish(),
    nn.Hardswish(),
    timm_activations.Swish(),
    timm_activations.Mish(),
    timm_activations.HardSwish(),
    timm_activations.HardMish(),
    timm_activations_me.SwishMe(),
    timm_activations_me.MishMe(),
    timm_activations_me.HardSwishMe(),
    timm_activations_me.HardMishMe(),
    hf_activations.SiLUActivation(),
    hf_activations.MishActivation(),
    functional.silu,
    functional.mish,
    functional.hardswish,
    timm_activations.swish,
    timm_activations.hard_mish,
    "silu",
    "swish",
    "mish",
    "hardswish",
]


@pytest.mark.parametrize("activation", GELUS + SWISHES, ids=stable_id)
def test_what_is_not_monotone_is_refused(activation):
    with pytest.raises(NotProximalError, match="not the proximal map of any function: it is not monotone"):
        prox_for(activation)
    if callable(activation):
        assert (activation(torch.linspace(-6, 0, 1001, dtype=torch.float64)).diff() < 0).any()


@pytest.mark.parametrize(
    ("activation", "reason"),
    [
        (nn.SELU(), "slope exceeds 1"),
        (functional.selu, "slope exceeds 1"),
        ("selu", "slope exceeds 1"),
        (hf_activations.ReLUSquaredActivation(), "slope 2x exceeds 1"),
        (hf_activations.LaplaceActivation(), "slope reaches 1.41"),
        ("xielu", "slope grows without bound"),
        (nn.Hardshrink(), "jumps"),
        (nn.Threshold(0.0, 1.0), "jumps"),
        (functools.partial(functional.threshold, threshold=0.5, value=0.0), "jumps"),
        (nn.RReLU(), "at random"),
        (nn.GLU(), "2n numbers to n"),
        (nn.Softmin(-1), "decreases in its own argument"),
        (nn.LogSoftmax(-1), "not symmetric"),
        (functional.prelu, "pass the nn.PReLU module"),
        (nn.LeakyReLU(1.5), r"slope in \[0, 1\].*found 1.5"),
        (nn.LeakyReLU(-0.5), "found -0.5"),
        (nn.ELU(2.0), r"alpha in \[0, 1\].*found 2.0"),
        (nn.CELU(-1.0), "alpha > 0"),
        (nn.Softplus(threshold=2.0), "drops by"),
        (functools.partial(torch.clamp, min=torch.zeros(3)), "bounds are Python numbers"),
        (nn.ReLU, "pass an instance"),
        (3.0, "found 3.0"),
    ],
    ids=stable_id,
)
def test_refusals_say_why(activation, reason):
    with pytest.raises(NotProximalError, match=reason):
        prox_for(activation)


def test_the_reasons_hold():
    """The numbers in the messages, measured."""
    x = torch.linspace(-8, 8, 160001, dtype=torch.float64)

    def lowest(f):
        return x[f(x).argmin()].item()

    def steepest(f):
        return (f(x).diff() / x.diff()).max().item()

    assert lowest(functional.gelu) == pytest.approx(-0.75, abs=0.005)
    assert lowest(hf_activations.QuickGELUActivation()) == pytest.approx(-0.75, abs=0.005)
    assert lowest(functional.silu) == pytest.approx(-1.28, abs=0.005)
    assert lowest(functional.mish) == pytest.approx(-1.19, abs=0.005)
    assert lowest(functional.hardswish) == pytest.approx(-1.5, abs=0.005)
    assert lowest(timm_activations.hard_mish) == pytest.approx(-1, abs=0.005)
    assert steepest(functional.selu) == pytest.approx(1.76, abs=0.005)
    assert steepest(hf_activations.LaplaceActivation()) == pytest.approx(1.41, abs=0.005)
    if hasattr(hf_activations, "SqrtSoftplusActivation"):
        assert steepest(hf_activations.SqrtSoftplusActivation()) < 1 / 3


class OwnForward(nn.ReLU):
    def forward(self, input):
        return super().forward(input) - 0.1


class OnlyNamed(nn.ReLU):
    """A subclass that computes what its base does."""


class Rational(nn.Module):
    def forward(self, input):
        return rational(input)


class Scaled(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, input):
        return functional.leaky_relu(input, self.slope)


def test_subclasses_are_trusted_only_with_the_forward_of_their_base():
    assert prox_for(OnlyNamed()) == ReluPrior()
    with pytest.raises(NotProximalError, match=r"OwnForward, which overrides the forward of torch.*ReLU"):
        prox_for(OwnForward())
    module = nn.ReLU()
    module.forward = lambda input: input
    with pytest.raises(NotProximalError, match="its own forward on the instance"):
        prox_for(module)


@pytest.mark.parametrize(
    "activation", [nn.Linear(2, 2), nn.Sequential(nn.ReLU()), lambda x: x, len, torch.exp], ids=stable_id
)
def test_what_is_unknown_is_refused_and_how_to_declare_it(activation):
    with pytest.raises(NotProximalError, match=r"not known to be a proximal map.*declare_activation\(.*Monotone"):
        prox_for(activation)


def test_unknown_names_list_near_ones():
    with pytest.raises(UnknownNameError, match="Did you mean 'softplus"):
        prox_for("softpluss")


def test_declarations():
    declare_activation(Rational, Monotone(rational, zero_argument=0.0, bounded=True))
    declare_activation(Scaled, lambda module: LeakyReluPrior(module.slope))
    prior = prox_for(Rational())
    assert isinstance(prior, Monotone)
    assert prox_for(Scaled(0.3)) == LeakyReluPrior(0.3)

    def shifted(x, shift=0.0):
        return functional.relu(x - shift) + shift

    declare_activation(shifted, lambda shift=0.0: HardtanhPrior(shift, math.inf))
    assert prox_for(shifted, 0.5) == HardtanhPrior(0.5, math.inf)
    assert prox_for(functools.partial(shifted, shift=2.0)) == HardtanhPrior(2.0, math.inf)

    class Child(Rational):
        def forward(self, input):
            return -super().forward(input)

    with pytest.raises(NotProximalError, match="overrides"):
        prox_for(Child())


def test_what_is_known_cannot_be_declared_otherwise():
    for activation in (nn.GELU, nn.ReLU, functional.gelu, torch.tanh, timm_activations.gelu):
        with pytest.raises(DuplicateNameError, match="known already"):
            declare_activation(activation, Monotone(torch.tanh))

    def mine(x):
        return x

    prior = IdentityPrior()
    declare_activation(mine, prior)
    declare_activation(mine, prior)
    with pytest.raises(DuplicateNameError):
        declare_activation(mine, ReluPrior())
    for wrong in (nn.ReLU(), 3, int):
        with pytest.raises(OptionError, match="class or a function"):
            declare_activation(wrong, prior)
    with pytest.raises(OptionError, match="Expected a prior"):
        declare_activation(lambda x: x, 3)


def test_every_activation_of_the_hosts_is_decided():
    """A class that a new timm or transformers adds must get a row, here or in the package."""
    for host in (timm_activations, timm_activations_me, hf_activations):
        for cls in vars(host).values():
            if not (isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == host.__name__):
                continue
            arguments = (-1, 1) if "Clipped" in cls.__name__ else ()
            module = object.__new__(cls) if "XIELU" in cls.__name__ else cls(*arguments)
            try:
                prox_for(module)
            except NotProximalError as error:
                assert "not known" not in str(error), cls
