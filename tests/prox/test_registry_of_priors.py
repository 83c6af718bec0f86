import pytest
import torch

from solver_plugins.errors import DuplicateNameError, NotProximalError, OptionError, RegistrationError, UnknownNameError
from solver_plugins.prox import PRIORS, Prior, TanhBarrier, TanhPrior, list_priors, make_prior, register_prior
from tests.prox.cases import CASES, COUPLED, Case, each_case


def test_every_registered_prior_has_a_row():
    own = {name for name in PRIORS.names() if PRIORS.info(name).source.startswith("solver_plugins.")}
    assert own == {case.name for case in CASES} | COUPLED


@each_case
def test_flags(case: Case):
    prior = case.make()
    assert prior.zero_argument == case.zero_argument
    assert prior.bounded is case.bounded
    assert prior.separable
    assert not prior.unit_step_only
    assert prior.name == case.name


def test_names_are_filtered_by_glob_and_by_tag():
    assert list_priors("*_barrier") == ["sigmoid_barrier", "softplus_barrier", "tanh_barrier"]
    assert list_priors("indicator") == ["hardtanh", "identity", "relu", "relu6"]
    assert {"leaky_relu", "tanh_barrier", "squared_hinge"} <= set(list_priors("paper"))


def test_every_prior_is_described():
    for name in list_priors():
        assert PRIORS.info(name).description.endswith(".") or name == "monotone", name


def test_parameters_are_passed_on_and_checked():
    assert make_prior("tanh_barrier", gamma=0.1) == TanhBarrier(0.1)
    with pytest.raises(OptionError, match=r"no parameter 'gama'.*Did you mean 'gamma'"):
        make_prior("tanh_barrier", gama=0.1)
    with pytest.raises(OptionError, match=r"no parameter 'gamma'.*none"):
        make_prior("tanh", gamma=0.1)
    with pytest.raises(OptionError, match="needs module"):
        make_prior("prelu")
    with pytest.raises(UnknownNameError, match="tanh"):
        make_prior("tanhh")


@pytest.mark.parametrize("name", ["tanh_barrier", "softplus_barrier", "sigmoid_barrier", "squared_hinge"])
def test_gamma_must_be_positive(name):
    with pytest.raises(OptionError, match="gamma > 0; found 0"):
        make_prior(name, gamma=0)


@pytest.mark.parametrize(
    ("name", "parameters", "found"),
    [
        ("leaky_relu", {"negative_slope": 1.2}, "1.2"),
        ("leaky_relu", {"negative_slope": -0.1}, "-0.1"),
        ("leaky_relu", {"negative_slope": float("nan")}, "nan"),
        ("elu", {"alpha": 1.5}, "1.5"),
        ("elu", {"alpha": -1.0}, "-1.0"),
        ("celu", {"alpha": 0.0}, "0.0"),
        ("softshrink", {"lambd": -1.0}, "-1.0"),
        ("hardtanh", {"min_val": 2.0, "max_val": 1.0}, "2.0 and 1.0"),
        ("softplus", {"beta": -1.0}, "-1.0"),
        ("softplus", {"threshold": 5.0}, "drops by 0.0067"),
    ],
)
def test_parameters_that_are_not_proximal_are_refused(name, parameters, found):
    with pytest.raises(NotProximalError, match=found):
        make_prior(name, **parameters)


def test_only_priors_can_be_registered_and_only_once():
    with pytest.raises(RegistrationError, match="subclass of solver_plugins"):
        PRIORS.register("test.number", 3)  # type: ignore[arg-type]

    class Tanh(Prior):
        name = "tanh"

    with pytest.raises(DuplicateNameError, match="'tanh'"):
        register_prior(Tanh)
    assert register_prior(TanhPrior) is TanhPrior


def test_equality_and_hash():
    assert TanhBarrier(0.1) == TanhBarrier(0.1) != TanhBarrier(0.2)
    assert len({make_prior("tanh"), make_prior("tanh"), make_prior("relu")}) == 2
    assert repr(TanhBarrier(0.1)) == "TanhBarrier(gamma=0.1)"


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["tanh", "leaky_relu", "softsign", "hardsigmoid", "tanh_barrier"])
def test_a_step_that_is_not_positive_is_refused(name, step):
    with pytest.raises(OptionError, match="positive"):
        make_prior(name).prox(torch.ones(2), step)
