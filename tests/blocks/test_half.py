"""bfloat16: a converted network loses no more of its own size than the plain one."""

import copy

import pytest
import timm
import torch

from solver_plugins import convert_model


@pytest.mark.parametrize("iters", [1, 3])
def test_relative_to_its_own_output(iters):
    """Several iterations change the scale of a network, and absolute differences with it; relative ones stay."""
    torch.manual_seed(0)
    plain, x = timm.create_model("test_resnet", num_classes=5), torch.randn(8, 3, 64, 64)
    with torch.no_grad():
        plain.train()(x)
        made = convert_model(copy.deepcopy(plain), "proxgd", iters, pattern="all").eval()
        lost = []
        for model in (plain.eval(), made):
            expected = model(x)
            with torch.autocast("cpu", torch.bfloat16):
                found = model(x).float()
            lost.append(float((found - expected).norm() / expected.norm()))
    assert lost[1] <= 2 * lost[0] + 2**-7
