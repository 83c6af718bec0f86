"""Promise 6: two real gloo processes compute what one computes, under DDP and raw FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from solver_plugins import convert_model, merge_model, refresh_steps, revert_model
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import ConversionError
from tests.gloo import in_two_processes
from tests.promises.small import ResidualNet, still

ROWS = {"x": torch.randn(8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
OPTIONS = {"proxgd": {}, "fista": {}, "anderson": {}, "proxsg": {"p": 0.5}}


def perceptron(solver="proxgd", **options):
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 8), nn.ReLU(),
        nn.Linear(8, 3),
    ).double()  # fmt: skip
    still(made)
    settings = {**OPTIONS[solver], **options}
    return convert_model(made, solver, 3, pattern="all", example_inputs=ROWS["x"], **settings)


def residual():
    torch.manual_seed(0)
    return still(convert_model(ResidualNet().double(), "proxgd", 3, pattern="all", example_inputs=IMAGES))


def steps(made):
    return {name: block.L.clone() for name, block in made.named_modules() if isinstance(block, SolverBlock)}


def train(made, batch, count=3):
    optimizer = torch.optim.SGD(made.parameters(), 0.05)
    losses = []
    for number in range(count):
        loss = made((1 + 0.1 * number) * batch).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if number == count - 1:
            break
        optimizer.step()
        optimizer.zero_grad()
    return losses


def data_parallel(rank, solver, options):
    """Returns gradients and steps after two steps and one more backward, of this rank's half of the batch."""
    made = perceptron(solver)
    wrapped = DistributedDataParallel(made, **options)
    train(wrapped, ROWS["x"][4 * rank : 4 * rank + 4])
    with pytest.raises(ConversionError, match="unwrap"):
        convert_model(wrapped, "proxgd", example_inputs=ROWS["x"])
    return [parameter.grad.tolist() for parameter in made.parameters()], {k: v.tolist() for k, v in steps(made).items()}


@pytest.mark.parametrize(
    ("solver", "options"),
    [("proxgd", {}), pytest.param("proxgd", {"static_graph": True}, marks=pytest.mark.slow),
     pytest.param("proxgd", {"find_unused_parameters": True}, marks=pytest.mark.slow),
     pytest.param("anderson", {}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_two_replicas_take_the_step_of_one_process(solver, options):
    """Promise 6, DDP: gradients of two halves are those of the whole batch in one process; constants agree."""
    one, other = in_two_processes(data_parallel, solver, options)
    assert one == other
    alone = perceptron(solver)
    train(alone, ROWS["x"])
    gradients, constants = one
    for found, parameter in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), parameter.grad, rtol=1e-9, atol=1e-12)
    assert constants.keys() == steps(alone).keys()
    for name, value in steps(alone).items():
        torch.testing.assert_close(torch.tensor(constants[name], dtype=torch.float64), value, rtol=1e-9, atol=0)


def replicas_of_a_sampling_solver(rank):
    made = perceptron("proxsg")
    wrapped = DistributedDataParallel(made)
    torch.manual_seed(rank)
    train(wrapped, ROWS["x"][4 * rank : 4 * rank + 4])
    return [parameter.tolist() for parameter in made.parameters()], {k: v.tolist() for k, v in steps(made).items()}


@pytest.mark.slow
def test_sampling_replicas_agree_on_weights_and_constants():
    """Promise 6, DDP: each process draws its own masks, and the replicas stay one model."""
    one, other = in_two_processes(replicas_of_a_sampling_solver)
    assert one == other


def shard(made, units):
    """Shards the root, and first every module with Parameters of its own ("layers")."""
    for module in list(made.modules()):
        if units == "layers" and module is not made and list(module.parameters(recurse=False)):
            fully_shard(module)
    fully_shard(made)
    return made


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_run(plain, sharded, batch):
    torch.testing.assert_close(train(sharded, batch), train(plain, batch), rtol=1e-10, atol=0)
    for one, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one), other, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(steps(sharded), steps(plain), rtol=1e-9, atol=0)
    plain.eval(), sharded.eval()
    torch.testing.assert_close(sharded(batch), plain(batch), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(steps(sharded), steps(plain), rtol=1e-9, atol=0)


def sharded_runs(rank):
    """Promise 6, FSDP2: raw ``fully_shard`` of the root and of every layer, weights as DTensors between passes."""
    for solver in ("proxgd", "anderson"):
        for units in ("root", "layers"):
            plain = perceptron(solver)
            assert_same_run(plain, shard(copy.deepcopy(plain), units), ROWS["x"])
    plain = residual()
    assert_same_run(plain, shard(copy.deepcopy(plain), "root"), IMAGES)
    made = shard(perceptron("proxsg"), "layers")
    assert all(loss == loss for loss in train(made, ROWS["x"]))
    # One whole forward and backward per half of the batch: reduced gradients are those of the whole batch.
    plain = perceptron()
    made = shard(copy.deepcopy(plain), "layers")
    train(made, ROWS["x"][4 * rank : 4 * rank + 4]), train(plain, ROWS["x"])
    for one, other in zip(made.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-9, atol=1e-12)
    dist.barrier()


def refreshed_and_loaded(rank):
    """Promise 6, FSDP2: certificates and loading see the whole weight."""
    for units in ("root", "layers"):
        plain = perceptron()
        made = shard(copy.deepcopy(plain), units)
        train(plain, ROWS["x"]), train(made, ROWS["x"])
        torch.testing.assert_close(refresh_steps(made), refresh_steps(plain), rtol=1e-9, atol=0)
        made.load_state_dict({name: 2 * value for name, value in made.state_dict().items()})
        plain.load_state_dict({name: 2 * value for name, value in plain.state_dict().items()})
        torch.testing.assert_close(steps(made), steps(plain), rtol=1e-9, atol=0)
        torch.testing.assert_close(made.eval()(ROWS["x"]), plain.eval()(ROWS["x"]), rtol=1e-9, atol=1e-12)
    dist.barrier()


def refreshed_chain(rank):
    """Promise 6, FSDP2: the certificate of a folded norm sees the norm's whole scale."""
    plain = residual()
    made = shard(copy.deepcopy(plain), "root")
    torch.testing.assert_close(refresh_steps(made), refresh_steps(plain), rtol=1e-9, atol=0)
    dist.barrier()


def chain_in_units_of_its_own(rank):
    """Promise 6, FSDP2: layer and norm are sharded one by one, so the weight is gone when the norm runs."""
    with pytest.raises(SolverPluginsError, match="as one unit"):
        shard(residual(), "layers")(IMAGES)


def refuse_sharded(rank):
    """Promise 7, FSDP2: converting after sharding says to convert first."""
    for units in ("root", "layers"):
        torch.manual_seed(0)
        made = shard(nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).double(), units)
        classes = [type(module) for module in made.modules()]
        with pytest.raises(ConversionError, match="shard"):
            convert_model(made, "proxgd", example_inputs=ROWS["x"])
        assert [type(module) for module in made.modules()] == classes


def revert_sharded(rank):
    """Promise 4, FSDP2: layers keep the class that sharding gave them."""
    made = shard(perceptron(), "layers")
    for way in (revert_model, merge_model):
        with pytest.raises(ConversionError, match="sharded"):
            way(made)
    assert all(isinstance(made[index], FSDPModule) for index in (0, 2, 5, 7))


def everything_sharded(rank):
    for body in (
        sharded_runs, refreshed_and_loaded, refreshed_chain, chain_in_units_of_its_own, refuse_sharded, revert_sharded,
    ):  # fmt: skip
        body(rank)
        dist.barrier()


def test_sharded_models():
    """Promises 4, 6 and 7, FSDP2; one pair of processes for all of it, as starting them takes longest."""
    in_two_processes(everything_sharded)
