"""Dtypes, autocast, torch.compile, vmap-free transforms: a block computes the same everywhere."""

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from solver_plugins import SolverBlock, SolverConv2d, SolverLinear, convert_model
from solver_plugins.blocks.stepsize import STEP_BUFFERS
from tests.solve.cases import CASES, DETERMINISTIC
from tests.tolerances import tolerance


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def blocks(solver, iters=(5, 4), **options):
    yield SolverLinear(12, 8, activation="relu", solver=solver, iters=iters[0], **options), torch.randn(6, 12)
    yield (
        SolverConv2d(3, 4, 3, padding=1, activation="tanh", solver=solver, iters=iters[1], **options),
        torch.randn(2, 3, 6, 6),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", DETERMINISTIC)
def test_moved_to_another_dtype(solver, dtype):
    # Well conditioned: how far two iterates of an accelerated method lie apart is a matter of conditioning.
    for block, u in blocks(solver, lam=1.0):
        block.eval()
        expected = block(u)
        got = block.to(dtype)(u.to(dtype))
        assert got.dtype == dtype
        assert block.L.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), "constants keep precision"
        bounds = tolerance(torch.bfloat16 if dtype.itemsize < 4 else torch.float32)
        torch.testing.assert_close(got.float(), expected, **bounds._asdict())


def test_a_constant_too_large_for_half_survives():
    block = SolverLinear(64, 64, activation="relu", solver="proxgd", iters=3)
    block.weight.data.mul_(1e3)
    block.refresh_step()
    before = float(block.L)
    assert before > 65504
    assert float(block.half().L) == pytest.approx(before, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", sorted(CASES))
def test_autocast(solver, dtype):
    for block, u in blocks(solver, lam=1.0, **CASES[solver]):
        block.eval()
        expected = block(u)
        with torch.autocast("cpu", dtype=dtype):
            got = block(u)
            assert got.dtype == dtype
            block.train()
            block(u).float().square().mean().backward()
        torch.testing.assert_close(got.float(), expected, **tolerance(torch.bfloat16)._asdict())
        assert block.weight.grad.dtype == torch.float32 and torch.isfinite(block.weight.grad).all()


@pytest.mark.parametrize("gradient", ["unrolled", "implicit"])
@pytest.mark.parametrize("solver", DETERMINISTIC)
def test_compiled_without_a_graph_break_or_recompilation(solver, gradient):
    # Eager execution checks the residual, which these few iterations do not reach.
    options = {} if gradient == "unrolled" else {"implicit_tol": 10.0, "implicit_iters": 3}
    # Three iterations: the second has a history, the third a longer one. More of them only make larger graphs.
    for block, u in blocks(solver, (3, 3), gradient=gradient, **options):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, fullgraph=True, backend=counter)
        for training in (True, False):
            block.train(training)
            compiled(u)
            frames = counter.frame_count
            for factor in (1.5, 0.5, 2.0):
                with torch.no_grad():
                    block.weight.mul_(factor)
                block.refresh_step()
                torch.testing.assert_close(compiled(u), block(u), rtol=1e-4, atol=1e-5)
            assert counter.frame_count == frames, "a refreshed L must not recompile"


def test_compiled_gradients_with_inductor():
    block = SolverLinear(12, 8, activation="relu", solver="proxgd", iters=4)
    u = torch.randn(6, 12)
    compiled = torch.compile(block, fullgraph=True)
    (expected,) = torch.autograd.grad(block(u).square().sum(), block.weight)
    (got,) = torch.autograd.grad(compiled(u).square().sum(), block.weight)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", sorted(CASES))
def test_sampling_solvers_compile_whole_too(solver):
    """Compiled random numbers differ from eager ones, so only the graph is checked, and that results are finite."""
    block = SolverLinear(12, 8, activation="relu", solver=solver, iters=4, **CASES[solver])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    out = compiled(torch.randn(6, 12))
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(block.weight.grad).all()


def test_inference_mode_and_functional_call():
    block, u = next(blocks("proxgd"))
    expected = block(u)
    with torch.inference_mode():
        torch.testing.assert_close(block(u), expected)
    state = {name: 2 * value for name, value in block.named_parameters()}
    doubled = torch.func.functional_call(block.eval(), state, (u,))
    assert torch.isfinite(doubled).all()


def test_parametrised_layers():
    fc = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    block = SolverBlock.from_layer(fc, "relu", "proxgd", 1)
    u = torch.randn(3, 6)
    assert torch.equal(block(u), fc(u)) and isinstance(block, nn.Linear)
    assert list(block.state_dict()) == list(fc.state_dict())
    block(u).sum().backward()
    assert fc.parametrizations.weight.original0.grad is not None


def test_buffers_are_plain_and_need_no_gradient():
    block = SolverLinear(6, 4, solver="proxgd")
    assert {name for name, _ in block.named_buffers()} == set(STEP_BUFFERS)
    assert all(not buffer.requires_grad for buffer in block.buffers())


def test_half_precision_does_not_overflow_where_the_layer_does_not():
    """A A^T x is never formed in full: weights of size one make it overflow a half."""
    fc = nn.Linear(512, 512)
    nn.init.normal_(fc.weight)
    block = SolverLinear.from_linear(fc, "relu", solver="proxgd", iters=10).eval()
    u = torch.randn(4, 512)
    expected = block(u)
    with torch.autocast("cpu", dtype=torch.float16):
        lowered = block(u)
    halved = block.half()(u.half())
    for got in (lowered, halved):
        assert torch.isfinite(got).all()
        assert (got.float() - expected).norm() < 0.05 * expected.norm()


def test_float64_layers_ignore_autocast():
    block = SolverLinear(6, 4, activation="relu", solver="proxgd", iters=3, dtype=torch.float64).eval()
    u = torch.randn(3, 6, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block(u), block(u)) and block(u).dtype == torch.float64


def test_prelu_in_half():
    block = SolverLinear.from_linear(nn.Linear(6, 4).half(), nn.PReLU().half(), solver="proxgd", iters=3)
    assert torch.isfinite(block(torch.randn(3, 6).half())).all()


def test_empty_batches():
    for solver in sorted(CASES):
        block = SolverLinear(6, 4, activation="relu", solver=solver, iters=3, **CASES[solver])
        out = block(torch.zeros(0, 6, requires_grad=True))
        out.sum().backward()
        assert out.shape == (0, 4)
    block = SolverLinear(6, 4, activation="relu", solver="proxgd", iters=3, gradient="implicit")
    block(torch.zeros(0, 6, requires_grad=True)).sum().backward()


def test_weight_norm_loads_and_leaves_again():
    """The constant is certified after the parts of a parametrised weight have loaded, and torch can remove them."""
    parametrized = torch.nn.utils.parametrizations.weight_norm
    block = SolverBlock.from_layer(parametrized(nn.Linear(6, 4)), "relu", "proxgd", 5)
    state = {name: 5 * value if name.endswith("original0") else value for name, value in block.state_dict().items()}
    block.load_state_dict(state)
    true = float(torch.linalg.matrix_norm(block.weight.detach().double(), 2)) ** 2
    assert true <= float(block.L) <= 1.01 * true
    u = torch.randn(3, 6)
    expected = block.eval()(u)
    torch.nn.utils.parametrize.remove_parametrizations(block, "weight")
    assert type(block) is SolverLinear
    torch.testing.assert_close(block(u), expected)


def test_spectral_norm_is_looked_at_once():
    torch.manual_seed(0)
    fc = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
    block = SolverBlock.from_layer(copy.deepcopy(fc), "relu", "proxgd", 1)
    state = {name: buffer.clone() for name, buffer in fc.named_buffers()}
    for name, buffer in block.named_buffers():
        if name in state:
            buffer.copy_(state[name])
    u = torch.randn(3, 6)
    assert torch.equal(block(u), fc(u))


@pytest.mark.parametrize("training", [False, True])
def test_shapes_without_values(training):
    """On the meta device, and with fake tensors, a converted model says what shape comes out."""

    def build():
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(80, 6), nn.Tanh())

    x = torch.randn(2, 3, 8, 8)
    for solver, rate in (("proxgd", {}), ("fista", {}), ("proxsg", {"p": 0.5})):
        with torch.device("meta"):
            model = build()
        convert_model(model, solver, iters=3, pattern="all", example_inputs=x.to("meta"), **rate)
        found = model.train(training)(x.to("meta"))
        assert found.is_meta and found.shape == (2, 6)
        model = convert_model(build(), solver, iters=3, pattern="all", example_inputs=x, **rate).train(training)
        # torch itself counts batches there.
        kept = {name: buffer for name, buffer in model.named_buffers() if "num_batches" not in name}
        state = {name: buffer.clone() for name, buffer in kept.items()}
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert model(mode.from_tensor(x)).shape == (2, 6)
        assert all(torch.equal(state[name], buffer) for name, buffer in kept.items())
