"""Two real processes over gloo: the regulariser gives the gradients of a single process."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from solver_plugins import StructuredDropoutRegularizer
from tests.gloo import in_two_processes


class Net(nn.Module):
    def __init__(self, d=4, a=3):
        super().__init__()
        self.body = nn.Linear(5, d)
        self.fc = nn.Linear(d, a)

    def forward(self, x):
        return self.fc(torch.tanh(self.body(x)))


def gradients_of_a_share(rank):
    model, x, y = distributed_problem()
    ddp = DistributedDataParallel(model)
    regularizer = StructuredDropoutRegularizer(ddp, "dropblock", 0.5, 2)
    with ddp.no_sync():
        (F.mse_loss(ddp(x[rank:8:2]), y[rank:8:2]) + regularizer()).backward()
    (F.mse_loss(ddp(x[8 + rank :: 2]), y[8 + rank :: 2]) + regularizer()).backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def distributed_problem():
    torch.manual_seed(0)
    return Net().double(), torch.randn(16, 5).double(), torch.randn(16, 3).double()


def test_two_processes_with_accumulation_equal_one():
    results = in_two_processes(gradients_of_a_share)
    model, x, y = distributed_problem()
    regularizer = StructuredDropoutRegularizer(model, "dropblock", 0.5, 2)
    for part in (slice(0, 8), slice(8, 16)):
        (F.mse_loss(model(x[part]), y[part]) + regularizer()).backward()
    for grads in results:
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            assert_close(torch.tensor(grad, dtype=torch.float64), parameter.grad, rtol=1e-9, atol=1e-12)
