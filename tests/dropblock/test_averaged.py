"""The mean of dropout masks: mean, variance, gradients, dtypes."""

import pytest
import torch

from solver_plugins.dropblock import AveragedDropout, averaged_dropout
from solver_plugins.errors import OptionError


@pytest.mark.parametrize(("p", "masks"), [(0.5, 1), (0.5, 10), (0.9, 3)])
def test_mean_and_variance_are_those_of_averaged_masks(p, masks):
    torch.manual_seed(0)
    found = averaged_dropout(torch.full((200_000,), 2.0, dtype=torch.float64), p, masks)
    assert float(found.mean()) == pytest.approx(2.0, rel=0.02)
    assert float(found.var()) == pytest.approx(4 * p / (1 - p) / masks, rel=0.02)
    # Each value is a number of masks over their expected number.
    counts = found / 2 * masks * (1 - p)
    assert torch.allclose(counts, counts.round()) and counts.max() <= masks


def test_one_mask_is_dropout_and_gradients_are_those_of_the_mask():
    x = torch.randn(50, 7, dtype=torch.float64, requires_grad=True)
    found = averaged_dropout(x, 0.25, 4, generator=torch.Generator().manual_seed(3))
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert torch.allclose(grad * x, found)
    one = averaged_dropout(x, 0.25, 1)
    kept = one != 0
    assert torch.allclose(one[kept], x[kept] / 0.75)


def test_as_a_layer():
    layer = AveragedDropout(0.5, 3)
    x = torch.ones(4, 5, dtype=torch.bfloat16)
    torch.manual_seed(0)
    first = layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first) and first.dtype == torch.bfloat16 and not torch.equal(first, x)
    assert layer.eval()(x) is x and AveragedDropout(0.0)(x) is x
    assert repr(layer) == "AveragedDropout(p=0.5, masks=3)" and not layer.state_dict()


@pytest.mark.parametrize(("p", "masks"), [(1.0, 3), (-0.1, 3), (0.5, 0)])
def test_wrong_settings_are_refused(p, masks):
    with pytest.raises(OptionError, match="at least one mask"):
        AveragedDropout(p, masks)
