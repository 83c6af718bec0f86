"""Promise 6: converted models compile whole, and neither training steps nor refreshed constants compile them again."""

import copy

import pytest
import torch
import torch._dynamo.testing

from solver_plugins import convert_model, refresh_steps
from solver_plugins.blocks import blocks_of
from tests.promises.cases import SOLVERS, converted, run
from tests.promises.small import ResidualNet, still

F64 = torch.float64


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def assert_compiles_whole(made, call):
    """One graph per mode; outputs, gradients and constants are the eager ones (deterministic solvers, float64)."""
    eager = copy.deepcopy(still(made)).train()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(made.train(), fullgraph=True, backend=counter)
    for factor in (1.0, 1.5, 0.5):
        for one in (made, eager):
            one.zero_grad()
            with torch.no_grad():
                for block in blocks_of(one).values():
                    for parameter in block.parameters(recurse=False):
                        parameter.mul_(factor)
            if factor == 0.5:
                refresh_steps(one)
        outputs = call(compiled), call(eager)
        torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
        for output in outputs:
            output.square().mean().backward()
        for a, b in zip(made.parameters(), eager.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-9)
        for a, b in zip(blocks_of(made).values(), blocks_of(eager).values(), strict=True):
            torch.testing.assert_close(a.L, b.L, rtol=1e-9, atol=0)
        # What the compiler began and gave up within the first compilation is an empty graph.
        graphs = sum(len(one.graph.nodes) > 0 for one in counter.graphs)
        assert graphs == 1, "a moved weight or a refreshed constant must not compile again"


def test_a_small_residual_network_compiles_whole():
    """Promise 6: norm, skip and layer outlets in one graph."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 10, dtype=F64)
    made = convert_model(ResidualNet().double(), "proxgd", 2, pattern="all", example_inputs=x)
    assert_compiles_whole(made, lambda one: one(x))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["timm_vgg", "timm_resnet", "timm_vit", "functional"])
def test_whole_models_compile(model):
    """Promise 6: VGG, ResNet and ViT of timm, every pattern."""
    assert_compiles_whole(converted(model, "proxgd", F64), lambda one: run(one, model, F64))


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_compiles_in_every_kind_of_host(solver):
    """Promise 6: compiled random numbers differ from eager ones, so sampled results are only finite."""
    x = torch.randn(2, 3, 10, 10)
    made = convert_model(ResidualNet(), solver, 2, pattern="all", example_inputs=x, **SOLVERS[solver])
    output = torch.compile(made, fullgraph=True, backend="aot_eager")(x)
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in made.parameters() if parameter.grad is not None)
