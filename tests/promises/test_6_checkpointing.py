"""Promise 6: a recomputed forward pass uses the same masks and the same step as the first."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from solver_plugins import convert_model
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import SolverPluginsError
from tests.promises.cases import MODELS, SMALL, SOLVERS, converted, rows, run


class Recomputed(nn.Module):
    """A model that is one checkpointed segment."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *args, **kwargs):
        if self.reentrant:
            # The old form takes tensors by position only, and needs one that requires a gradient.
            return checkpoint(self.inner, *(x.requires_grad_() for x in args), use_reentrant=True)
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def assert_same_steps(first, second, model, steps=2):
    """Both train alike, from the same random numbers: outputs, gradients, weights and step sizes."""
    optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in (first, second)]
    for seed in range(steps):
        outputs = []
        for one, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            outputs.append(run(one.train(), model, torch.float64))
            outputs[-1].square().mean().backward()
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(blocks_of(first).values(), blocks_of(second).values(), strict=True):
        torch.testing.assert_close(a.L, b.L, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("model", "solver"), rows((model, solver) for model in SMALL for solver in SOLVERS))
def test_a_whole_model_recomputed(model, solver):
    """Promise 6: ``torch.utils.checkpoint`` around a converted model, chains behind norms and skips included."""
    made = converted(model, solver, torch.float64)
    assert_same_steps(made, Recomputed(copy.deepcopy(made), False), model)


@pytest.mark.parametrize("solver", ["proxgd", "proxsg", "rcd"])
def test_recomputed_the_old_way(solver):
    """Promise 6: reentrant checkpointing, where the first pass runs without a graph."""
    made = converted("residual", solver, torch.float64)
    assert_same_steps(made, Recomputed(copy.deepcopy(made), True), "residual")


@pytest.mark.parametrize(
    ("model", "solver"),
    rows((name, solver) for name, case in MODELS.items() if case.checkpointing for solver in ("proxgd", "proxsg")),
)
def test_the_library_s_own_switch(model, solver):
    """Promise 6: timm's ``set_grad_checkpointing``, transformers' ``activation_checkpointing_enable``."""
    made = converted(model, solver, torch.float64)
    other = copy.deepcopy(made)
    getattr(other, MODELS[model].checkpointing)()
    if hasattr(getattr(made, "config", None), "use_cache"):
        made.config.use_cache = other.config.use_cache = False
    assert_same_steps(made, other, model)


class Halves(nn.Module):
    """One half of a chain conv-norm-act is recomputed, the other is not (timm's DenseNet recomputes the conv)."""

    def __init__(self, half, reentrant=False):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        self.fc, self.half, self.reentrant = nn.Linear(4, 3), half, reentrant

    def forward(self, x):
        for part in (self.conv, self.bn):
            again = self.training and part is getattr(self, self.half, None)
            x = checkpoint(part, x, use_reentrant=self.reentrant) if again else part(x)
        return self.fc(self.act(x).mean((2, 3)))


def assert_halves_train_alike(half, reentrant=False):
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    plain = convert_model(Halves("").double(), "proxgd", 3, pattern="all", example_inputs=x).train()
    other = copy.deepcopy(plain)
    other.half, other.reentrant = half, reentrant
    assert len(blocks_of(plain)) == 2
    for _ in range(2):
        for one in (plain, other):
            one.zero_grad()
            one(x.clone().requires_grad_()).square().mean().backward()
        for a, b in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_the_layer_of_a_chain_recomputed_alone():
    """Promise 6: the solver behind it has taken what it needs."""
    assert_halves_train_alike("conv")


def test_the_layer_of_a_chain_recomputed_alone_the_old_way():
    """Promise 6: what only a recomputation has kept is not mistaken for a call of the next step."""
    assert_halves_train_alike("conv", reentrant=True)


def test_the_norm_of_a_chain_recomputed_alone():
    """Promise 6: the solver would run again, but its layer does not: an error that says what to do."""
    with pytest.raises(SolverPluginsError, match="gradient checkpointing"):
        assert_halves_train_alike("bn")
