"""The convolutional equilibrium as a timm model."""

import pytest
import timm
import torch
from torch import nn

from solver_plugins.equilibrium import DeepOptEq, OptEqLayer
from solver_plugins.errors import OptionError


def small(**options):
    return timm.create_model("solver_opteq", state=4, extracted=5, hidden=(3, 4), **options)


def test_size_is_the_papers():
    model = timm.create_model("solver_opteq")
    assert abs(sum(parameter.numel() for parameter in model.parameters()) / 162_000 - 1) < 0.03
    assert [layer.W.weight.shape[0] for layer in model.equilibrium.layers] == [16, 32, 64, 64, 128]
    assert all(tuple(layer.W.kernel_size) == (3, 3) for layer in model.equilibrium.layers)
    assert all(float(norm) <= 0.9 * (1 + 1e-6) for norm in model.equilibrium.certified_norms().values())


@pytest.mark.parametrize("options", [{}, {"solver": "sam", "regularizer": "half_squared"}, {"gradient": "unrolled"}])
def test_it_learns(options):
    torch.manual_seed(0)
    model = small(num_classes=3, **options)
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_timm_conventions():
    model = small().eval()
    x = torch.randn(2, 3, 8, 6)
    features = model.forward_features(x)
    assert features.shape == (2, 4, 8, 6)
    assert torch.equal(model.forward_head(features), model(x))
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    model.reset_classifier(0)
    assert model(x).shape == (2, 4)
    assert small(stride=2).forward_features(x).shape == (2, 4, 4, 3)
    with pytest.raises(OptionError, match="features_only"):
        timm.create_model("solver_opteq", features_only=True)


def test_wrong_options():
    with pytest.raises(OptionError, match=r"OptEqNet has no option 'solvr'\. Did you mean 'solver'"):
        small(solvr="sam")
    with pytest.raises(OptionError, match="OptEqNet, option 'norm'"):
        small(norm=1.5)


def test_a_segmentation_head_reads_the_equilibrium():
    """Feature maps of the input's resolution, whatever it is; a 1x1 convolution behind them labels every pixel."""
    torch.manual_seed(0)
    backbone = DeepOptEq([OptEqLayer.conv2d(6, 3, width) for width in (6, 8, 8)])
    model = nn.Sequential(backbone, nn.Conv2d(6, 2, 1))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    losses = []
    for _ in range(30):
        x = torch.randn(4, 3, 10, 12)
        # A pixel belongs to class 1 where its neighbourhood is bright in the first channel: needs space, not one pixel.
        y = (nn.functional.avg_pool2d(x[:, :1], 3, 1, 1)[:, 0] > 0).long()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    assert model(torch.randn(1, 3, 7, 5)).shape == (1, 2, 7, 5)
