"""What only a real accelerator can tell: run ``make test-gpu`` once where there is CUDA or MPS. Skips itself here."""

import copy
import time

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from solver_plugins import SolverBlock, convert_model, refresh_steps, revert_model
from solver_plugins.blocks import blocks_of
from tests.gloo import in_two_processes
from tests.promises.cases import MODELS, run, twins
from tests.promises.small import still
from tests.solve.cases import CASES

KIND = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(KIND is None, reason="needs a CUDA or MPS device")]


@pytest.fixture(autouse=True)
def whole_floats(monkeypatch):
    """Convolutions of CUDA are rounded to 10 bits by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def tiny():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=5), torch.randn(4, 3, 64, 64)


@pytest.mark.parametrize("training", [False, True])
def test_one_iteration_is_the_plain_network(training):
    model, x = tiny()
    model, x = model.to(KIND).train(training), x.to(KIND)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
        found = convert_model(model, "proxgd", 1, pattern="all")(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("iters", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_the_models_of_the_promises(model, iters):
    """One iteration is the plain model on the CPU, three are the converted one there; gradients, too."""
    plain, made = twins(model, "proxgd", iters=iters)
    expected = plain if iters == 1 else copy.deepcopy(made)
    outputs = [run(still(one).train(), model) for one in (made.to(KIND), expected)]
    torch.testing.assert_close(outputs[0].cpu(), outputs[1], rtol=1e-3, atol=1e-3)
    for output in outputs:
        output.square().mean().backward()
    for (name, one), (_, other) in zip(made.named_parameters(), expected.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-2, atol=1e-3)


def gradients(device: str, rows: slice, wrap) -> list:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 3))
    made = wrap(convert_model(net, "proxgd", 3, pattern="all").to(device))
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))[rows].to(device)
    made(x).square().mean().backward()
    return [parameter.grad.tolist() for parameter in net.parameters()]


def half(rank: int) -> list:
    wrap = lambda made: DistributedDataParallel(made, device_ids=[rank])  # noqa: E731
    return gradients(f"cuda:{rank}", slice(4 * rank, 4 * rank + 4), wrap)


def test_data_parallel_on_two_devices():
    """Over gloo, as everywhere else in the tests."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    one, other = in_two_processes(half)
    assert one == other
    for found, expected in zip(one, gradients("cpu", slice(None), lambda made: made), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("solver", sorted(CASES))
@pytest.mark.parametrize("make", [lambda: nn.Linear(12, 8), lambda: nn.Conv2d(3, 4, 3, padding=1)])
def test_the_same_numbers_as_on_the_cpu(make, solver):
    torch.manual_seed(0)
    block = SolverBlock.from_layer(make(), "relu", solver, 4, **CASES[solver]).eval()
    u = torch.randn(5, 12) if isinstance(block, nn.Linear) else torch.randn(2, 3, 8, 8)
    expected = block(u)
    moved = copy.deepcopy(block).to(KIND)
    torch.testing.assert_close(moved(u.to(KIND)).cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trains_in_lower_precision(dtype):
    model, x = tiny()
    model = convert_model(model.to(KIND), "proxgd", 3, pattern="all", blend=0.1).train()
    optimizer, labels = torch.optim.SGD(model.parameters(), 1e-3), torch.arange(4, device=KIND)
    for _ in range(3):
        with torch.autocast(KIND, dtype):
            loss = functional.cross_entropy(model(x.to(KIND)).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
    assert all(block.L.dtype == torch.float32 and block.L.device.type == KIND for block in blocks_of(model).values())


def test_a_training_pass_never_waits_for_the_device():
    if KIND != "cuda":
        pytest.skip("only CUDA tells")
    model, x = tiny()
    model, x = convert_model(model.to(KIND), "proxgd", 3, pattern="all").train(), x.to(KIND)
    model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_revert_and_refresh():
    model, x = tiny()
    model, x = model.to(KIND).eval(), x.to(KIND)
    with torch.no_grad():
        expected = model(x)
        made = convert_model(model, "proxgd", 3, pattern="all")
        assert all(value.device.type == KIND for value in refresh_steps(made).values())
        torch.testing.assert_close(revert_model(made)(x), expected)


def test_what_it_costs(capsys):
    """Ratios of times for a person to read; none is asserted."""
    for title, make, shape in (
        ("400 -> 120", lambda: nn.Linear(400, 120), (64, 400)),
        ("4096 -> 512", lambda: nn.Linear(4096, 512), (256, 4096)),
        ("64 -> 64, 3x3", lambda: nn.Conv2d(64, 64, 3, padding=1), (32, 64, 56, 56)),
    ):
        plain, u = make().to(KIND), torch.randn(shape, device=KIND)
        made = SolverBlock.from_layer(make(), "relu", "proxgd", 10).to(KIND).train()
        times = []
        for module in (plain, made):
            for repeat in range(25):
                if repeat == 5:
                    _wait()
                    start = time.perf_counter()
                module(u).relu().sum().backward()
            _wait()
            times.append(time.perf_counter() - start)
        with capsys.disabled():
            print(f"{title}: {times[1] / times[0]:.1f} times the plain layer")


def _wait():
    torch.cuda.synchronize() if KIND == "cuda" else torch.mps.synchronize()
