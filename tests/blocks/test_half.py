"""bfloat16: a converted network loses no more of its own size than the plain one."""

import copy

import pytest
import timm
import torch
from torch import nn

from solver_plugins import SolverBlock, convert_model
from tests.blocks.linked import solved


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("iters", [1, 3, 10])
def test_relative_to_its_own_output(iters, training):
    """Several iterations change the scale of a network, and absolute differences with it; relative ones stay."""
    torch.manual_seed(0)
    plain, x = timm.create_model("test_resnet", num_classes=5), torch.randn(8, 3, 64, 64)
    with torch.no_grad():
        plain.train()(x)
        made = convert_model(copy.deepcopy(plain), "proxgd", iters, pattern="all")
        lost = []
        for model in (plain.train(training), made.train(training)):
            expected = model(x)
            with torch.autocast("cpu", torch.bfloat16):
                found = model(x).float()
            lost.append(float((found - expected).norm() / expected.norm()))
    assert lost[1] <= 2 * lost[0] + 2**-7


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("iters", [3, 10])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(96, 64), (32, 96)), (nn.Conv2d(8, 12, 3, padding=1), (4, 8, 9, 9))]
)
def test_a_solve_adds_less_than_one_rounding(layer, shape, iters, training):
    """Given what the layer returned in bfloat16. Iterates are float32: only products are rounded, and the result."""
    torch.manual_seed(0)
    layer.reset_parameters()
    block = SolverBlock.from_layer(layer, "relu", "proxgd", iters).train(training)
    u = torch.randn(shape)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            found, c = block(u), layer(u)
        expected = solved(block, layer, u, c.float(), iters=iters)
    assert (found.float() - expected).norm() < 2**-8 * expected.norm()
