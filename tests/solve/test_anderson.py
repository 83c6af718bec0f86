"""Anderson's small least-squares problem where it has no unique solution, its gradients, its safeguard, training."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from solver_plugins import SolverBlock, solver_linear
from solver_plugins.errors import OptionError
from solver_plugins.registry import SOLVERS
from solver_plugins.solve import Anderson, BlockProblem
from tests.solve.cases import CASES


@pytest.mark.parametrize("iters", [3, 5, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_residuals_have_a_solution(iters, dtype):
    """With one active feature, or none, all residuals of a sample are parallel, and their Gram matrix is singular."""
    torch.manual_seed(iters)
    active = set()
    for _ in range(10):
        fc = nn.Linear(12, 4, dtype=dtype)
        u = 3 * torch.randn(256, 12, dtype=dtype)
        constant = torch.linalg.matrix_norm(fc.weight.detach(), 2).square()
        options = {"activation": "relu", "lipschitz": constant, "iters": iters}
        x = solver_linear(u, fc.weight, fc.bias, solver="anderson", **options)
        active |= set((x > 0).sum(-1).tolist())
        assert torch.isfinite(x).all()
        x.square().sum().backward()
        assert torch.isfinite(fc.weight.grad).all()
    assert {0, 1, 2} <= active


@pytest.mark.parametrize("weights", ["constant", "differentiated"])
@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_not_full_of_rounding(seed, weights):
    """Five iterations have four differences, some of them nearly parallel; float32 agrees with float64 all the same."""
    torch.manual_seed(seed)
    n1, n2 = (6, 5) if seed % 2 else (64, 32)
    fc, u = nn.Linear(n1, n2), torch.randn(7, n1)
    constant = torch.linalg.matrix_norm(fc.weight.detach(), 2).square()
    gradients = []
    for dtype in (torch.float32, torch.float64):
        weight = fc.weight.detach().to(dtype).requires_grad_()
        options = {"activation": "relu", "lipschitz": constant.to(dtype), "iters": 5, "weights": weights, "lam": 1e-3}
        x = solver_linear(u.to(dtype), weight, fc.bias.detach().to(dtype), solver="anderson", **options)
        gradients += torch.autograd.grad(x.square().sum(), weight)
    single, double = gradients
    assert (single - double).norm() <= 1e-2 * double.norm()


def trained_layer(n1: int, n2: int) -> tuple[nn.Linear, torch.Tensor]:
    """Returns a layer with decaying singular values, as training makes it, and inputs behind a ReLU and a dropout."""
    torch.manual_seed(0)
    fc = nn.Linear(n1, n2, dtype=torch.float64)
    U, values, V = torch.linalg.svd(fc.weight.detach(), full_matrices=False)
    decay = torch.logspace(0, -1.5, len(values), dtype=torch.float64)
    fc.weight.data = (U * (values * decay)) @ V
    u = torch.relu(torch.randn(64, n1, dtype=torch.float64)) * (torch.rand(64, n1) < 0.5) * 4
    return fc, u


@pytest.mark.parametrize(("n1", "n2"), [(400, 120), (120, 84), (64, 128), (32, 128)])
def test_gradients_do_not_outgrow_those_of_fista(n1, n2):
    """Without derivatives of the mixtures' weights, which are up to a hundred times the gradient of proxgd.

    Fista takes as large steps towards the same minimiser, so its gradients are the measure: per sample, twice as large
    at most in the median, four times for any sample.
    """
    fc, u = trained_layer(n1, n2)
    signs, sizes = torch.randn(64, n2, dtype=torch.float64), {}
    constant = torch.linalg.matrix_norm(fc.weight.detach(), 2).square()
    for solver in ("fista", "anderson"):
        inputs = u.clone().requires_grad_()
        options = {"activation": "relu", "lipschitz": constant, "solver": solver, "iters": 10, "lam": 1e-3}
        x = solver_linear(inputs, fc.weight, fc.bias, **options)
        (gradient,) = torch.autograd.grad((x * signs).sum(), inputs)
        sizes[solver] = gradient.norm(dim=1)
    assert sizes["anderson"].median() < 2 * sizes["fista"].median()
    assert sizes["anderson"].max() < 4 * sizes["fista"].max()


def test_constant_weights_are_all_that_is_left_out():
    """Finite differences of a solve whose weights are those of another, nearby one."""
    fc, u = trained_layer(9, 5)
    u = u[:3]
    options = {"activation": "softplus", "lipschitz": 20.0, "iters": 4, "lam": 1e-3, "solver": "anderson"}
    found = Anderson._weights

    def gradient(weights: str) -> torch.Tensor:
        inputs = u.clone().requires_grad_()
        return torch.autograd.grad(solver_linear(inputs, fc.weight, weights=weights, **options).sum(), inputs)[0]

    kept: list[torch.Tensor] = []

    def remember(*arguments):
        kept.append(found(*arguments).detach())
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Anderson, "_weights", remember)
        solver_linear(u, fc.weight, **options)
        replayed = lambda *_: next(replay)  # noqa: E731
        patch.setattr(Anderson, "_weights", replayed)
        numeric = torch.zeros_like(u)
        for place in torch.cartesian_prod(torch.arange(3), torch.arange(9)).tolist():
            values = []
            for sign in (1, -1):
                moved, replay = u.clone(), iter(kept)
                moved[tuple(place)] += sign * 1e-6
                values.append(solver_linear(moved, fc.weight, **options).sum())
            numeric[tuple(place)] = ((values[0] - values[1]) / 2e-6).detach()
    torch.testing.assert_close(gradient("constant"), numeric, rtol=1e-6, atol=1e-8)
    assert (gradient("differentiated") - numeric).norm() > 1e-3 * numeric.norm()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Softshrink(0.3), nn.Tanh()])
@pytest.mark.parametrize(("n1", "n2"), [(12, 4), (40, 40), (16, 64)])
def test_the_last_step_is_safeguarded_too(n1, n2, activation, monkeypatch):
    """Its residual is at most the smallest one before: steps are nonexpansive, mixtures are not."""
    torch.manual_seed(0)
    seen, objective = [], BlockProblem.objective
    monkeypatch.setattr(BlockProblem, "objective", lambda self, x: (seen.append(x), objective(self, x))[1])
    for iters in (2, 3, 5, 10):
        fc, u = nn.Linear(n1, n2, dtype=torch.float64).requires_grad_(False), 3 * torch.randn(256, n1).double()
        L, lam = torch.linalg.matrix_norm(fc.weight, 2).square(), 1e-3
        seen.clear()
        options = {"activation": activation, "lipschitz": L, "lam": lam, "diagnose": True}
        solver_linear(u, fc.weight, fc.bias, solver="anderson", iters=iters, **options)
        moved = [activation(fc(u) + x - (x @ fc.weight @ fc.weight.T + lam * x) / (L + lam)) for x in seen]
        *before, last = ((new - x).norm(dim=1) for new, x in zip(moved, seen, strict=True))
        assert (last <= torch.stack(before).amin(0) * (1 + 1e-9) + 1e-12).all()


def network(solver: str, **options) -> nn.Module:
    torch.manual_seed(0)
    blocks = [SolverBlock.from_layer(nn.Linear(64, 64), "relu", solver, **options) for _ in range(2)]
    return nn.Sequential(blocks[0], nn.ReLU(), blocks[1], nn.ReLU(), nn.Linear(64, 10))


def last_loss(model: nn.Module) -> float:
    """Returns the mean loss of the last steps of four epochs on digits."""
    data = load_digits()
    images, labels = torch.tensor(data.images[:1500]).float().flatten(1) / 16, torch.tensor(data.target[:1500])
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9), []
    for _ in range(4):
        for rows in torch.randperm(1500).split(64):
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return float(torch.stack(losses[-10:]).mean())


@pytest.mark.parametrize(("name", "steps"), [*((name, 10) for name in CASES), ("fista", 4), ("anderson", 4)])
def test_no_solver_diverges_where_as_many_steps_of_proxgd_train(name, steps):
    """The loss begins at 2.3; twenty steps of proxgd diverge here, and so do twenty of solvers with inner steps."""
    options = {} if name == "anderson" else CASES[name]
    assert last_loss(network(name, iters=steps // options.get("inner", 1), **options)) < 1.0


@pytest.mark.parametrize(("solver", "over", "with_the_papers_lam"), [("fista", 1.1, 1.7), ("anderson", 1.7, 40)])
def test_accelerated_solvers_enlarge_little_more_than_proxgd_may(solver, over, with_the_papers_lam):
    """Where a layer says next to nothing about a direction, ``iters`` steps of proxgd add up ``iters`` of its outputs.

    Momentum and mixtures overshoot a little on their way to the minimiser. With the paper's ``lam`` it is far away.
    """
    weight, bias = torch.diag(torch.tensor([1.0, 0.03, 1e-3]).double()), torch.ones(3, dtype=torch.float64)
    u = torch.zeros(1, 3, dtype=torch.float64)

    def largest(solver: str, iters: int, **options) -> float:
        options |= {"solver": solver, "iters": iters, "lipschitz": 1.0}
        jacobian = torch.autograd.functional.jacobian(lambda b: solver_linear(u, weight, b, **options)[0], bias)
        return float(torch.linalg.matrix_norm(jacobian, 2))

    for iters in (1, 2, 3, 4, 5, 7, 10, 20):
        assert largest("proxgd", iters) <= iters
        assert largest(solver, iters) <= over * (iters + 1)
    for iters in (10, 20):
        assert largest(solver, iters, lam=1e-3) > with_the_papers_lam * (iters + 1)


def test_a_constant_lam_is_the_papers():
    config = SOLVERS.get("fista").from_options(lam=1e-3).config
    assert config.share is None and config.is_regularised
    assert SOLVERS.get("fista").from_options(iters=4).config.share == 0.25
    assert SOLVERS.get("proxgd").from_options(iters=4, lam=None).config.share == 0.25
    assert SOLVERS.get("proxgd").from_options(iters=4).config.share is None
    assert not SOLVERS.get("anderson").from_options(lam=0.0).config.is_regularised
    with pytest.raises(OptionError, match="'lam' or 'lam_relative'"):
        SOLVERS.get("fista").from_options(lam=1e-3, lam_relative=0.1)
