"""Bad input gets a named error that says what was expected, what was found, and what to do; nothing is changed."""

import pytest
import torch
from torch import nn

from solver_plugins import SolverBlock, SolverConv2d, SolverLinear, refresh_steps, solver_conv2d, solver_linear
from solver_plugins.errors import (
    InputError,
    NoMinimizerWarning,
    NotProximalError,
    OptionError,
    ShapeError,
    UnknownNameError,
    UnsupportedLayerError,
    WeightError,
)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"solver": "proxgs"}, UnknownNameError, "Did you mean 'proxsg'|'proxgd'"),
        ({"solver": "proxsg", "itres": 3}, OptionError, "no option 'itres'.*'iters'"),
        ({"solver": "proxgd", "p": 0.5}, OptionError, "does not sample"),
        ({"solver": "s2gd", "p": 0.5}, OptionError, "one feature per step"),
        ({"solver": "proxsg", "gradient": "implicit"}, OptionError, "unrolled"),
        ({"iters": 0}, OptionError, "iters.*found 0"),
        ({"iters": 2.5}, OptionError, "iters"),
        ({"p": 1.0}, OptionError, "p.*found 1"),
        ({"p": -0.1}, OptionError, "p.*found -0.1"),
        ({"lam": float("nan")}, OptionError, "lam"),
        ({"lam": -1.0}, OptionError, "lam"),
        ({"formulation": "dual"}, OptionError, "normalized"),
        ({"step": "exponential"}, OptionError, "exp"),
        ({"step": "constant", "decay": 0.5}, OptionError, "decay"),
        ({"output": "both"}, OptionError, "'argument' or 'value'"),
        ({"activation": nn.GELU()}, NotProximalError, "monotone"),
        ({"activation": nn.SELU()}, NotProximalError, "1"),
        ({"activation": "relo"}, UnknownNameError, "relu"),
        ({"activation": nn.ELU(2.0)}, NotProximalError, "alpha"),
        ({"activation": nn.Softmax(-1), "step": "exp"}, OptionError, "unit step"),
        ({"activation": nn.Softmax(-1), "solver": "proxgd", "formulation": "paper"}, OptionError, "unit step"),
        ({"activation": nn.Softmax(-1), "solver": "rcd"}, OptionError, "coordinates"),
        ({"activation": nn.Sigmoid(), "solver": "rcd"}, OptionError, "output='value'"),
    ],
)
def test_options(keywords, error, message):
    fc = nn.Linear(4, 3)
    before = dict(vars(fc))
    with pytest.raises(error, match=message):
        SolverLinear.from_linear(fc, **{"activation": nn.ReLU(), **keywords})
    assert vars(fc).keys() == before.keys() and type(fc) is nn.Linear
    with pytest.raises(error, match=message):
        solver_linear(torch.randn(2, 4), fc.weight, fc.bias, **{"activation": nn.ReLU(), **keywords})


def test_weights():
    fc = nn.Linear(3, 2)
    fc.weight.data[0, 0] = torch.nan
    with pytest.raises(WeightError, match="finite"):
        SolverLinear.from_linear(fc, "relu")
    with pytest.raises(WeightError, match="float"):
        solver_linear(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long))
    whole = nn.Linear(3, 2)
    whole.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(WeightError, match="int8"):
        SolverLinear.from_linear(whole, "relu")


def test_shapes():
    block = SolverLinear(4, 3, solver="proxgd")
    with pytest.raises(ShapeError, match=r"4.*\b5\b|5.*4"):
        block(torch.randn(2, 5))
    with pytest.raises(ShapeError, match="3"):
        SolverConv2d(3, 4, 3, solver="proxgd")(torch.randn(2, 5, 6, 6))
    with pytest.raises(ShapeError, match="bias"):
        solver_linear(torch.randn(2, 4), torch.randn(3, 4), torch.randn(4), solver="proxgd")
    with pytest.raises(ShapeError, match="weight of shape"):
        solver_conv2d(torch.randn(2, 3, 6, 6), torch.randn(4, 3), solver="proxgd")
    with pytest.raises(ShapeError, match="diagonal"):
        solver_linear(torch.randn(2, 4), torch.randn(3, 4), solver="proxgd", diagonal=torch.ones(4))


def test_layers():
    with pytest.raises(UnsupportedLayerError, match="BatchNorm"):
        SolverBlock.from_layer(nn.BatchNorm1d(3))
    with pytest.raises(UnsupportedLayerError, match=r"[Tt]ransposed"):
        SolverBlock.from_layer(nn.ConvTranspose2d(3, 3, 3))
    block = SolverLinear(4, 4, solver="proxgd")
    with pytest.raises(UnsupportedLayerError, match="already"):
        SolverLinear.from_linear(block)
    fc = nn.Linear(4, 4)
    fc.forward = lambda input: input
    with pytest.raises(UnsupportedLayerError, match="hook"):
        SolverLinear.from_linear(fc)
    compiled = nn.Linear(4, 4)
    compiled.compile()
    with pytest.raises(UnsupportedLayerError, match="compile the block"):
        SolverLinear.from_linear(compiled)
    named = nn.Linear(4, 4)
    named.register_buffer("L", torch.ones(3))
    with pytest.raises(UnsupportedLayerError, match="has L"):
        SolverLinear.from_linear(named)


def test_the_source_layer_is_left_as_it_was():
    fc = nn.Linear(4, 4)
    before = {name: (value.copy() if hasattr(value, "copy") else value) for name, value in vars(fc).items()}
    SolverLinear.from_linear(fc, "relu")
    assert vars(fc) == before


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("solver", ["proxgd", "proxsg", "ms2gd", "rcd"])
def test_inputs_of_another_dtype(solver, training):
    block = SolverLinear(4, 3, activation="relu", solver=solver).train(training)
    for dtype in (torch.int64, torch.float64):
        with pytest.raises(InputError, match=r"Expected an input in torch\.float32.*found torch\."):
            block(torch.ones(2, 4, dtype=dtype))


def test_functional_constants_and_skips():
    u, weight = torch.randn(2, 4), torch.randn(3, 4)
    for bad in (-1.0, 0.0, float("nan"), float("inf"), "auto", torch.tensor(float("nan"))):
        with pytest.raises(OptionError, match="lipschitz"):
            solver_linear(u, weight, solver="proxgd", lipschitz=bad)
    with pytest.raises(ShapeError, match="0-d"):
        solver_linear(u, weight, solver="proxgd", lipschitz=torch.ones(2))
    with pytest.raises(ShapeError, match=r"skip of the output's shape \(2, 3\)"):
        solver_linear(u, weight, solver="proxgd", skip=torch.randn(7, 2, 3))


def test_softmax_along_another_dimension():
    """It would couple samples or tokens, which are problems of their own."""
    u = torch.randn(2, 3, 4)
    for dim in (0, 1):
        with pytest.raises(OptionError, match="along the features"):
            SolverLinear(4, 4, activation=nn.Softmax(dim), solver="proxgd")(u)
    SolverLinear(4, 4, activation=nn.Softmax(2), solver="proxgd")(u)


def test_things_that_are_no_layers_or_tensors():
    for thing in ("fc", None, nn.LazyLinear(3)):
        with pytest.raises(UnsupportedLayerError):
            SolverBlock.from_layer(thing)
    with pytest.raises(OptionError, match="found str"):
        refresh_steps("model")


def test_warnings_point_at_the_callers_line():
    for make in (
        lambda: SolverLinear.from_linear(nn.Linear(3, 5), "relu", solver="proxgd", lam=0.0),
        lambda: SolverLinear(3, 5, activation="relu", solver="proxgd", lam=0.0),
        lambda: solver_linear(torch.randn(2, 3), torch.randn(5, 3), activation="relu", solver="proxgd", lam=0.0),
    ):
        with pytest.warns(NoMinimizerWarning) as caught:
            make()
        assert caught[0].filename == __file__


def test_a_problem_without_a_minimiser_is_warned_of():
    with pytest.warns(NoMinimizerWarning, match="lam > 0"):
        SolverLinear(3, 5, activation="relu", solver="proxgd", lam=0.0)
    # None of these needs the warning: enough rows, a bounded prior, or the default lam.
    SolverLinear(5, 3, activation="relu", solver="proxgd", lam=0.0)
    SolverLinear(3, 5, activation=nn.Tanh(), solver="proxgd", lam=0.0)
    SolverLinear(3, 5, activation="relu", solver="proxgd")


def test_a_ready_solver_takes_no_options():
    from solver_plugins.solve import ProxGD

    ready = ProxGD.from_options(iters=4)
    assert SolverLinear(3, 3, solver=ready).solver.config.iters == 4
    with pytest.raises(OptionError, match="inside the given solver"):
        SolverLinear(3, 3, solver=ready, lam=1.0)
