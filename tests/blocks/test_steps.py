"""Where a block's Lipschitz constant comes from, and that it follows the weights."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from solver_plugins import SolverBlock, SolverConv2d, SolverLinear, lipschitz_constant, refresh_steps
from solver_plugins.errors import OptionError, WeightError


def exact(layer):
    return float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) ** 2


def test_certified_at_construction_and_after_loading():
    block = SolverLinear(30, 20, activation="relu", solver="proxgd")
    assert exact(block) <= float(block.L) <= 1.001 * exact(block)
    assert "L" not in block.state_dict()
    state = {name: 5 * value for name, value in block.state_dict().items()}
    block.load_state_dict(state)
    assert exact(block) <= float(block.L) <= 1.001 * exact(block)
    other = nn.Sequential(SolverLinear(30, 20, activation="relu", solver="proxgd"))
    other.load_state_dict({f"0.{k}": v for k, v in state.items()}, assign=True)
    assert float(other[0].L) == pytest.approx(float(block.L), rel=1e-5)


@pytest.mark.parametrize("method", ["certified", "power"])
def test_refresh_steps_of_a_model(method):
    model = nn.Sequential(
        SolverConv2d(3, 8, 3, padding=1, activation="relu", solver="proxgd"),
        nn.ReLU(),
        nn.Flatten(),
        SolverLinear(8 * 16, 10, solver="fista"),
    )
    buffers = [model[0].L, model[3].L]
    for parameter in model.parameters():
        parameter.data.mul_(3)
    found = refresh_steps(model, method=method)
    assert list(found) == ["0", "3"]
    assert model[0].L is buffers[0] and float(model[0].L) == pytest.approx(float(found["0"]))
    if method == "certified":
        assert float(found["3"]) == pytest.approx(exact(model[3]), rel=1e-3)


def test_refresh_steps_changes_nothing_when_it_fails():
    model = nn.Sequential(SolverLinear(4, 4, solver="proxgd"), SolverLinear(4, 4, solver="proxgd"))
    before = [float(block.L) for block in model]
    model[0].weight.data.mul_(2)
    model[1].weight.data[0, 0] = torch.inf
    with pytest.raises(WeightError, match="'1'"):
        refresh_steps(model)
    assert [float(block.L) for block in model] == before
    with pytest.raises(OptionError, match=r"exact|certified"):
        refresh_steps(model[0], method="guess")
    with pytest.raises(OptionError, match="without a solver block"):
        refresh_steps(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_training_follows_the_weights(kind):
    """A plain loop: nobody calls refresh_steps, and L stays close to the truth (never below it by more than a
    little)."""
    if kind == "linear":
        block, u = SolverLinear(30, 20, activation="relu", solver="proxgd", iters=3), torch.randn(64, 30)
    else:
        block = SolverConv2d(4, 6, 3, padding=1, activation="relu", solver="proxgd", iters=3)
        u = torch.randn(8, 4, 8, 8)
    optimizer = torch.optim.SGD(block.parameters(), 0.2, momentum=0.9)
    target = torch.randn_like(block(u)).relu() * 3
    start = float(lipschitz_constant(block_layer(block)))
    for _ in range(60):
        optimizer.zero_grad()
        (torch.relu(block(u)) - target).square().mean().backward()
        optimizer.step()
    block(u)
    true = float(lipschitz_constant(block_layer(block), tolerance=0.02))
    assert abs(true / start - 1) > 0.1, "the test needs weights that moved"
    assert 0.8 * true < float(block.L) < 1.4 * true


def block_layer(block):
    plain = nn.Linear(2, 2) if isinstance(block, nn.Linear) else nn.Conv2d(4, 6, 3, padding=1)
    plain.weight = block.weight
    return plain


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("factor", [2.0, 30.0])
def test_weights_scaled_behind_its_back_do_not_make_a_solve_diverge(training, factor):
    block = SolverLinear(16, 16, activation="relu", solver="proxgd", iters=60, lam=0.0).train(training)
    u = torch.randn(4, 16)
    block.weight.data.mul_(factor)
    fresh = SolverLinear.from_linear(plain_copy(block), "relu", solver="proxgd", iters=60, lam=0.0).train(training)
    torch.testing.assert_close(block(u), fresh(u), rtol=1e-2, atol=1e-2)


def plain_copy(block):
    fc = nn.Linear(block.in_features, block.out_features)
    fc.load_state_dict(block.state_dict())
    return fc


def test_evaluation_certifies_what_has_moved():
    """An EMA copy is changed in place and never leaves evaluation; it must compute what it computes after loading."""
    block = SolverConv2d(4, 6, 3, padding=1, activation="relu", solver="proxgd", iters=6).eval()
    u = torch.randn(2, 4, 8, 8)
    for _ in range(3):
        with torch.no_grad():
            block.weight.add_(0.3 * torch.randn_like(block.weight))
        fresh = SolverConv2d(4, 6, 3, padding=1, activation="relu", solver="proxgd", iters=6)
        fresh.load_state_dict(block.state_dict())
        assert torch.equal(block(u), fresh.eval()(u))


def test_certifying_in_evaluation_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(SolverBlock, "certify_in_evaluation", False)
    block = SolverLinear(16, 16, activation="relu", solver="proxgd").eval()
    block.weight.data.mul_(2)
    before = {name: buffer.clone() for name, buffer in block.named_buffers()}
    assert torch.isfinite(block(torch.randn(2, 16))).all()
    for name, buffer in block.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_wider_dtype_is_no_movement():
    block = SolverLinear(16, 12, activation="relu", solver="proxgd").eval()
    before = float(block.L)
    block.double()
    block(torch.randn(2, 16, dtype=torch.float64))
    assert float(block.L) == before


def test_rounded_weights_are_certified():
    """What a block computes in a narrower dtype is what it computes after these weights were saved and loaded."""
    block = SolverLinear(16, 12, activation="relu", solver="proxgd").bfloat16()
    fresh = SolverLinear(16, 12, activation="relu", solver="proxgd").bfloat16()
    fresh.load_state_dict(block.state_dict())
    assert torch.equal(block.L, fresh.L) and block.L.dtype == torch.float32


def test_no_direction_is_ever_lost():
    """The new top direction may be orthogonal to all that the block has seen."""
    block = SolverLinear(4, 4, bias=False, activation="relu", solver="proxgd")
    with torch.no_grad():
        block.weight.copy_(torch.diag(torch.tensor([1.0, 0, 0, 0])))
        refresh_steps(block)
        block.weight.copy_(torch.diag(torch.tensor([0, 0, 0, 3.0])))
    block(torch.ones(1, 4))
    assert float(block.L) > 0.6 * 9
    large = SolverLinear(128, 128, bias=False, activation="relu", solver="proxgd")
    with torch.no_grad():
        large.weight[:64] = 0
        refresh_steps(large)
        large.weight.copy_(large.weight.roll(64, 0))
        assert torch.isfinite(large(torch.randn(4, 128))).all()
    assert float(large.L) > 0.6 * exact(large)


def test_one_iteration_does_not_look_at_the_constant(monkeypatch):
    block = SolverLinear(4, 4, activation="relu", solver="proxgd", iters=1)
    monkeypatch.setattr(type(block), "_current_L", lambda *_: pytest.fail("L is not needed"))
    assert block(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("solver", ["proxgd", "proxsg", "ms2gd", "s2gd"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_the_same_step_and_masks(solver, reentrant):
    torch.manual_seed(0)
    block = SolverLinear(16, 12, activation="relu", solver=solver, iters=6, dtype=torch.float64)
    first, second = (torch.randn(4, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grads = []
    for wrap in (lambda u: block(u), lambda u: checkpoint(block, u, use_reentrant=reentrant)):
        state = {name: buffer.clone() for name, buffer in block.named_buffers()}
        torch.manual_seed(1)
        # Two forwards before one backward: the second must not change the step that the first is recomputed with.
        loss = wrap(first).square().sum() + wrap(second).square().sum()
        grads.append(backward(loss, first, second, block.weight))
        for name, buffer in block.named_buffers():
            buffer.copy_(state[name])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def backward(loss, *leaves):
    """Gradients through ``Tensor.backward``: the reentrant checkpoint refuses ``torch.autograd.grad``."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad.clone() for leaf in leaves]


def test_nothing_is_refreshed_while_the_weights_stand_still():
    block = SolverLinear(16, 12, activation="relu", solver="proxgd")
    u = torch.randn(4, 16)
    block(u)
    before = {name: buffer.clone() for name, buffer in block.named_buffers()}
    block(u)
    for name, buffer in block.named_buffers():
        assert torch.equal(buffer, before[name])


def test_meta_device_then_loading():
    block = SolverLinear(8, 4, activation="relu", solver="proxgd", device="meta")
    assert block.L.is_meta
    block = block.to_empty(device="cpu")
    source = nn.Linear(8, 4)
    block.load_state_dict(source.state_dict())
    reference = SolverBlock.from_layer(source, "relu", "proxgd")
    u = torch.randn(3, 8)
    torch.testing.assert_close(block.eval()(u), reference.eval()(u))


@pytest.mark.parametrize("assign", [True, False])
def test_made_on_the_meta_device_inside_a_context(assign):
    with torch.device("meta"):
        block = SolverLinear(8, 4, activation="relu", solver="proxgd")
    if not assign:
        block = block.to_empty(device="cpu")
    source = nn.Linear(8, 4)
    block.load_state_dict(source.state_dict(), assign=assign)
    u = torch.randn(3, 8)
    torch.testing.assert_close(block.eval()(u), SolverBlock.from_layer(source, "relu", "proxgd").eval()(u))


def test_reset_parameters_certifies():
    block = SolverLinear(8, 4, activation="relu", solver="proxgd", device="meta").to_empty(device="cpu")
    for buffer in block.buffers():
        buffer.fill_(torch.nan)
    block.reset_parameters()
    assert exact(block) <= float(block.L) <= 1.001 * exact(block)
    block.weight.data.mul_(1e-3)
    block.refresh_step()
    block.reset_parameters()
    assert exact(block) <= float(block.L) <= 1.001 * exact(block)


def lowest_ratio(block, u, optimizer, loss_of, steps):
    """The smallest constant used in a training loop, in units of the true one. Below 1/2 a solve may diverge."""
    ratios = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(block(u))
        ratios.append((float(block.L) + 1e-3) / (exact(block) + 1e-3))
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    return min(ratios)


def test_adam_turns_the_top_direction_and_nothing_diverges():
    torch.manual_seed(0)
    block = SolverLinear(256, 256, activation="relu", solver="proxgd", iters=10)
    u, target = torch.randn(64, 256), torch.randn(64, 256).relu()
    optimizer = torch.optim.Adam(block.parameters(), 1e-2)
    assert lowest_ratio(block, u, optimizer, lambda out: (out.relu() - target).square().mean(), 15) > 0.6


def test_a_head_that_starts_from_zeros():
    torch.manual_seed(0)
    fc = nn.Linear(256, 100)
    nn.init.zeros_(fc.weight)
    block = SolverLinear.from_linear(fc, solver="proxgd", iters=10)
    u, labels = torch.randn(64, 256), torch.randint(100, (64,))
    optimizer = torch.optim.SGD(block.parameters(), 0.5)
    assert lowest_ratio(block, u, optimizer, lambda out: nn.functional.cross_entropy(out, labels), 10) > 0.6


@pytest.mark.parametrize("training", [True, False])
def test_weights_replaced_behind_its_back(training):
    torch.manual_seed(0)
    block = SolverLinear(256, 256, solver="proxgd", iters=30).train(training)
    with torch.no_grad():
        block.weight.copy_(torch.randn(256, 256) / 16)
    u = torch.randn(4, 256)
    fresh = SolverLinear.from_linear(plain_copy(block), solver="proxgd", iters=30).train(training)
    assert block(u).norm() < 1.5 * fresh(u).norm()


@pytest.mark.parametrize("factor", [0.5, 0.01])
def test_evaluation_follows_weights_that_shrank(factor):
    """In the normalized formulation L is part of the function: too large is as wrong as too small."""
    block = SolverLinear(16, 16, activation="relu", solver="proxgd").eval()
    block.weight.data.mul_(factor)
    fresh = SolverLinear.from_linear(plain_copy(block), "relu", solver="proxgd").eval()
    u = torch.randn(4, 16)
    torch.testing.assert_close(block(u), fresh(u), rtol=1e-3, atol=1e-4)


def test_trained_saved_and_loaded_gives_the_same_values():
    block = SolverConv2d(4, 6, 3, padding=1, activation="relu", solver="fista", iters=5)
    u = torch.randn(2, 4, 8, 8)
    optimizer = torch.optim.Adam(block.parameters(), 1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        block(u).square().mean().backward()
        optimizer.step()
    fresh = SolverConv2d(4, 6, 3, padding=1, activation="relu", solver="fista", iters=5)
    fresh.load_state_dict(block.state_dict())
    assert torch.equal(block.eval()(u), fresh.eval()(u))


def test_lipschitz_constant_reads_a_block():
    block = SolverLinear(8, 4, activation="relu", solver="proxgd")
    assert torch.equal(lipschitz_constant(block), block.L)


def test_loading_weights_that_are_not_finite_leaves_the_block_alone():
    model = nn.Sequential(SolverLinear(3, 2, activation="relu", solver="proxgd"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = {"0.weight": torch.full((2, 3), torch.nan), "0.bias": torch.zeros(2)}
    with pytest.raises(RuntimeError, match=r"found NaN or infinite ones in 0\.weight"):
        model.load_state_dict(bad)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
