"""|W| <= 1: initialised, projected, or by construction; certified for convolutions of every size."""

import pytest
import torch
from torch import nn

from solver_plugins.equilibrium import DeepOptEq, OptEqLayer, project_weights
from solver_plugins.equilibrium.norms import rescaled_kernel
from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.operators import geometry_of, lipschitz_constant, lipschitz_from_kernel

LAYERS = {
    "linear": lambda **options: OptEqLayer.linear(12, 5, 9, **options),
    "wide": lambda **options: OptEqLayer.linear(7, 5, 20, **options),
    "conv": lambda **options: OptEqLayer.conv2d(4, 3, 6, **options),
    "strided": lambda **options: OptEqLayer.conv2d(4, 3, 6, stride=2, **options),
    "large kernel": lambda **options: OptEqLayer.conv2d(3, 3, 4, kernel_size=5, inject_size=1, **options),
}


def exact(layer, size=9):
    return float(lipschitz_from_kernel(layer.kernel(), layer._geometry, "exact", input_size=(size, size)).sqrt())


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("norm", [0.5, 1.0])
def test_initial_norm_is_the_one_asked_for(make, norm):
    layer = make(constraint="none", norm=norm)
    assert 0.97 * norm <= float(layer.certified_norm()) <= norm * (1 + 1e-6)
    assert 0.75 * norm <= exact(layer) <= norm * (1 + 1e-6)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_aol_holds_for_any_weight(make, size):
    layer = make(constraint="aol", norm=0.9)
    for seed in range(3):
        torch.manual_seed(seed)
        nn.init.normal_(layer.W.weight, std=size)
        assert exact(layer) <= 0.9 * (1 + 1e-6)
        # The bound is not an empty one.
        assert exact(layer) >= 0.2
    with torch.no_grad():
        layer.W.weight.zero_()
    assert torch.isfinite(layer.kernel()).all() and exact(layer) == 0


def test_aol_of_orthogonal_weights_is_exact():
    weight = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    layer = nn.Linear(6, 6, bias=False, dtype=torch.float64)
    torch.testing.assert_close(
        rescaled_kernel(3 * weight, geometry_of(layer), 0.8), 0.8 * weight, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_the_first_gradient_is_no_rounding_error(make):
    """Initial weights are orthogonal, where the bound has a kink: float32 and float64 take the same side of it."""
    torch.manual_seed(0)
    layer = make(constraint="aol")
    signs, gradients = torch.randn_like(layer.W.weight), []
    for dtype in (torch.float32, torch.float64):
        weight = layer.W.weight.detach().to(dtype).requires_grad_()
        (rescaled_kernel(weight, layer._geometry, 0.9) * signs.to(dtype)).sum().backward()
        gradients.append(weight.grad.double())
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_training_stays_inside_by_construction_or_projection(make):
    for constraint in ("aol", "none"):
        torch.manual_seed(0)
        layer = make(constraint=constraint, norm=0.9)
        model = DeepOptEq([layer], tol=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        x = torch.randn(4, layer.U.weight.shape[1], *([6, 6] if layer._geometry.dims else []))
        for _ in range(3):
            optimizer.zero_grad()
            (-model(x).square().mean() * 30).backward()
            optimizer.step()
            norms = project_weights(model)
            assert set(norms) == {"layers.0"}
            assert exact(layer) <= 0.9 * (1 + 1e-5)


def test_projection_leaves_small_weights_alone_and_scales_large_ones():
    layer = OptEqLayer.conv2d(4, 3, constraint="none", norm=0.9)
    with torch.no_grad():
        layer.W.weight.mul_(0.5)
    before = layer.W.weight.clone()
    layer.project()
    assert torch.equal(layer.W.weight, before)
    with torch.no_grad():
        layer.W.weight.mul_(10)
    assert 4.3 < float(layer.project()) < 4.6
    assert 0.88 <= float(lipschitz_constant(layer.W, tolerance=0.02).sqrt()) <= 0.9 * (1 + 1e-6)


def test_bad_layers_are_refused():
    with pytest.raises(OptionError, match="norm"):
        OptEqLayer.linear(3, 3, norm=1.5)
    with pytest.raises(OptionError, match="aol"):
        OptEqLayer.linear(3, 3, constraint="aoll")
    with pytest.raises(ShapeError, match="without a bias"):
        OptEqLayer(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ShapeError, match="same number of outputs"):
        OptEqLayer(nn.Linear(3, 4, bias=False), nn.Linear(3, 3))
    with pytest.raises(ShapeError, match="groups"):
        OptEqLayer(nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False), nn.Conv2d(3, 4, 3, padding=1))
    with pytest.raises(OptionError, match="odd"):
        OptEqLayer.conv2d(3, 3, kernel_size=4)
    with pytest.raises(ShapeError, match="stride and padding"):
        DeepOptEq([OptEqLayer(nn.Conv2d(3, 3, 3, bias=False, padding=1), nn.Conv2d(3, 3, 3))])(torch.zeros(1, 3, 6, 6))
    with pytest.raises(ShapeError, match="one state"):
        DeepOptEq([OptEqLayer.linear(3, 2), OptEqLayer.linear(4, 2)])
    with pytest.raises(OptionError, match="OptEqLayer"):
        DeepOptEq([nn.Linear(3, 3)])
    with pytest.raises(OptionError, match="alpha"):
        DeepOptEq([OptEqLayer.linear(3, 2)], alpha=0.0)
