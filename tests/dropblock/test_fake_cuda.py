"""Structured dropout on a fake CUDA device: masks are drawn there, and no value is read."""

import pytest
import torch
from torch import nn

from solver_plugins.dropblock import DropBlock1d, DropBlock2d, DropConnectLinear, StructuredDropout, make_scheme
from tests.fake_cuda import on_fake_cuda

MAPS = torch.randn(3, 4, 16, 16)
VECTORS = torch.randn(3, 64)
LAYERS = {
    "drop_block_1d": (lambda: DropBlock1d(0.9, 4), VECTORS),
    "drop_block_2d": (lambda: DropBlock2d(0.9, 4), MAPS),
    "rare, drop_block_2d": (lambda: DropBlock2d(0.99, 8), torch.randn(16, 32, 32, 32)),
    "dropout": (lambda: StructuredDropout(make_scheme("dropout", 0.5)), VECTORS),
    "overlapping": (lambda: StructuredDropout(make_scheme("overlapping", 0.5, 4), dims=2), MAPS),
    "drop_connect": (lambda: DropConnectLinear(64, 5, theta=0.5), VECTORS),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_forward(name, training):
    make, x = LAYERS[name]
    conv = nn.Conv2d(x.shape[1], x.shape[1], 1) if x.ndim == 4 else nn.Linear(64, 64)
    on_fake_cuda(nn.Sequential(conv, make()).train(training), x, recorded=training)
