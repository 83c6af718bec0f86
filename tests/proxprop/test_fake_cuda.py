"""ProxProp listens on a fake CUDA device without reading a value."""

import pytest
import torch
from torch import nn

from solver_plugins import ProxProp
from tests.fake_cuda import on_fake_cuda


@pytest.mark.parametrize("mode", ["exact", "cg3"])
def test_forward(mode):
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 2))
    mlp = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    for model, x in ((conv, torch.randn(3, 3, 4, 4)), (mlp, torch.randn(7, 6))):
        with ProxProp(model, mode) as prox:
            assert prox.layers
            on_fake_cuda(model, x, recorded=True)
            on_fake_cuda(model.eval(), x, recorded=False)
