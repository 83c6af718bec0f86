"""Promise 6: accumulation, autocast, no_grad, inference_mode, and steps that follow the weights by themselves."""

import copy

import pytest
import torch

from solver_plugins.blocks import SolverBlock, blocks_of
from tests.promises.cases import MODELS, SMALL, SOLVERS, converted, named_state, rows, run
from tests.promises.small import still
from tests.tolerances import tolerance

EVERY = rows((model, solver) for model in SMALL for solver in SOLVERS)


@pytest.mark.parametrize("solver", ["proxgd", "fista", "anderson"])
@pytest.mark.parametrize("model", ["hf_roberta", "timm_vgg"])
def test_accumulated_gradients_are_those_of_the_whole_batch(model, solver):
    """Promise 6: two micro-batches see the same step as one batch (no BatchNorm, float64)."""
    assert not MODELS[model].norms
    one = still(converted(model, solver, torch.float64)).train()
    other = copy.deepcopy(one)
    for made in (one, other):
        with torch.no_grad():  # the weights have moved since the last certificate
            for parameter in made.parameters():
                parameter.mul_(1.2)
    run(one, model, torch.float64).square().sum().backward()
    for half in (slice(0, 2), slice(2, 4)):
        run(other, model, torch.float64, half).square().sum().backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-9)
    for a, b in zip(blocks_of(one).values(), blocks_of(other).values(), strict=True):
        assert torch.equal(a.L, b.L)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("model", "solver"), EVERY)
def test_autocast(model, solver, dtype):
    """Promise 6: trains in lower precision; constants and gradients stay in float32."""
    made = converted(model, solver).train()
    with torch.autocast("cpu", dtype=dtype):
        output = run(made, model)
        loss = output.float().square().mean()
    loss.backward()
    assert torch.isfinite(output).all()
    for block in blocks_of(made).values():
        own = dict(block.named_buffers(recurse=False))
        assert own["L"].dtype == own["power_vectors"].dtype == own["image"].dtype == torch.float32
    for parameter in made.parameters():
        assert parameter.grad is None or (
            parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", SMALL)
def test_autocast_is_near_full_precision(model, dtype):
    """Promise 6: within the precision of the lower dtype, scaled by the output."""
    made = converted(model, "proxgd").eval()
    expected = run(made, model)
    with torch.autocast("cpu", dtype=dtype):
        got = run(made, model).float()
    assert (got - expected).abs().max() <= 2 * tolerance(torch.bfloat16).rtol * expected.abs().max()


@pytest.mark.parametrize(("model", "solver"), EVERY)
def test_no_grad_and_inference_mode(model, solver):
    """Promise 6: without a graph the same output, and training goes on afterwards."""
    made = converted(model, solver).eval()
    expected = run(made, model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = run(made, model)
        assert not output.requires_grad and torch.equal(output, expected)
    outputs = []
    for mode in (torch.enable_grad, torch.no_grad):
        torch.manual_seed(1)
        with mode():
            outputs.append(run(copy.deepcopy(made).train(), model).detach())
    assert torch.equal(*outputs)
    with torch.inference_mode():
        run(made.train(), model)
    run(made.train(), model).sum().backward()
    assert not any(tensor.is_inference() for _, tensor in named_state(made))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", ["functional", "timm_vgg", "hf_roberta"])
def test_scaled_weights_do_not_make_a_solve_diverge(model, training):
    """Promise 6: nobody calls ``refresh_steps``; the constant stays above half of the truth, where solves converge."""
    made = still(converted(model, "proxgd", iters=30)).train(training)
    run(made, model)
    with torch.no_grad():
        for name in blocks_of(made):
            layer = made.get_submodule(name)
            for parameter in layer.parameters(recurse=False):
                parameter.mul_(2.0)
        output = run(made, model)
    assert torch.isfinite(output).all()
    for name, block in blocks_of(made).items():
        # The constant of a folded norm belongs to a reference diagonal, which a certificate would change.
        if isinstance(block, SolverBlock):
            true = float(copy.deepcopy(block).refresh_step())
            assert float(block.L) > 0.55 * true, name


@pytest.mark.parametrize(("model", "solver"), EVERY)
def test_no_block_returns_a_view(model, solver):
    """Promise 6: an in-place activation on a view would drop the hook by which FSDP2 gathers weights for backward."""
    made = converted(model, solver).train()
    views = []
    for name, block in blocks_of(made).items():
        block.register_forward_hook(lambda module, args, output, name=name: views.append((name, output._is_view())))
    run(made, model)
    assert {name for name, _ in views} == blocks_of(made).keys() and not any(view for _, view in views)
