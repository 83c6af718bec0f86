"""The layers: rates, covariances, gradients, reproducibility, precision, compilation, bad input."""

import copy
import pickle

import pytest
import torch
from timm.layers import drop_block_2d as timm_drop_block_2d
from torch import nn
from torch.testing import assert_close

from solver_plugins.dropblock import (
    BlockSizeError,
    DropBlock1d,
    DropBlock2d,
    DropConnectLinear,
    OverlappingBlocks,
    StructuredDropout,
    characteristic_matrix,
    drop_block_1d,
    drop_block_2d,
    drop_connect_linear,
    make_scheme,
    seed_retain_probability,
    structured_dropout,
)
from solver_plugins.errors import OptionError, ShapeError, UnknownNameError
from tests.dropblock.masks import enumerate_masks
from tests.tolerances import tolerance

SIGMAS = 5.5
"""Of some thousand entries none lies this far off by chance (1e-8 each)."""


def check_moments(masks, theta, cbar):
    """Compares the means and second moments of masks (n, d) with theory, within Monte Carlo error."""
    n = len(masks)
    masks = masks.double()
    bound = SIGMAS * (theta * (1 - theta) / n) ** 0.5 + 1e-12
    assert (masks.mean(0) - theta).abs().amax() < bound
    joint = theta**2 * (1 + cbar)
    found = masks.T @ masks / n
    assert ((found - joint).abs() <= SIGMAS * (joint * (1 - joint) / n).clamp(min=0).sqrt() + 1e-12).all()


@pytest.mark.parametrize("theta", [0.5, 0.9])
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 16, 31, 64])
def test_rate_and_covariance_on_vectors(d, theta):
    for name, r in [("dropout", 1), ("dropblock", 1), ("dropblock", d), ("overlapping", 3), ("overlapping", 7)] + [
        ("dropblock", 4)
    ] * (d % 4 == 0):
        x = torch.ones(4000, d)
        kept = structured_dropout(x, make_scheme(name, theta, r)) != 0
        check_moments(kept, theta, characteristic_matrix(name, d, theta, r))


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 7), (8, 4)])
def test_rate_and_covariance_on_maps(size):
    for overlapping, r in [(True, 1), (True, 3), (True, 7)] + [(False, 2)] * (size == (8, 4)):
        x = torch.ones(1500, 2, *size)
        kept = drop_block_2d(x, 0.9, r, overlapping=overlapping) != 0
        name = "overlapping" if overlapping else "dropblock"
        check_moments(kept.flatten(2).flatten(0, 1), 0.9, characteristic_matrix(name, size, 0.9, r))


def test_timm_misses_its_rate_where_ours_does_not():
    x = torch.ones(4000, 1, 7, 7)
    theirs = (timm_drop_block_2d(x, 0.1, 7) == 0).float().mean()
    ours = (drop_block_2d(x, 0.9, 7, overlapping=True) == 0).float().mean()
    assert theirs > 0.9
    assert abs(ours - 0.1) < 0.02


@pytest.mark.parametrize(
    ("name", "size", "r"), [("overlapping", (3,), 2), ("dropblock", (4,), 2), ("overlapping", (2, 2), 2)]
)
def test_every_pattern_is_as_likely_as_it_should_be(name, size, r):
    masks, weights = enumerate_masks(name, size, 0.6, r)
    exact: dict[tuple[float, ...], float] = {}
    for mask, weight in zip(masks.tolist(), weights.tolist(), strict=True):
        exact[tuple(mask)] = exact.get(tuple(mask), 0.0) + weight
    n = 20000
    drawn = make_scheme(name, 0.6, r).mask((n,), size).flatten(1).double()
    patterns, counts = drawn.unique(dim=0, return_counts=True)
    assert {tuple(p) for p in patterns.tolist()} <= exact.keys()
    for pattern, count in zip(patterns.tolist(), counts.tolist(), strict=True):
        p = exact[tuple(pattern)]
        assert abs(count / n - p) < SIGMAS * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.04])
def test_rare_bits_drawn_by_their_gaps(rate):
    """Counts, and counts of neighbours that are both dropped, have the moments of independent bits."""
    n = 500_000
    bits = ~make_scheme("dropout", 1 - rate).mask((n // 100,), (100,)).flatten()
    pairs = (bits[1:] & bits[:-1]).sum()
    assert abs(int(bits.sum()) - n * rate) < SIGMAS * (n * rate) ** 0.5 + 1
    assert abs(int(pairs) - n * rate**2) < SIGMAS * (n * rate**2) ** 0.5 + 2
    ends = torch.stack([~make_scheme("dropout", 1 - rate).mask((330,), (100,)).flatten()[[0, -1]] for _ in range(500)])
    assert (ends.sum(0) <= 500 * rate + SIGMAS * (500 * rate) ** 0.5 + 2).all()


def test_matching_rule_of_section_5_3():
    """The printed rule keeps the wrong share; ours keeps theta (both by the definition of overlapping blocks)."""
    theta, r = 0.5, 5
    assert seed_retain_probability(theta, r) ** r == pytest.approx(theta)
    assert seed_retain_probability(theta, r, dims=2) ** (r * r) == pytest.approx(theta)
    printed = 1 - (1 - theta) ** (1 / (2 * r - 1))
    assert abs(printed**r - theta) > 0.4


def test_kept_units_are_divided_by_the_mean_not_by_the_realised_rate():
    y = drop_block_1d(torch.ones(3, 12), 0.25, 3)
    assert set(y.unique().tolist()) <= {0.0, 4.0}


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("couple", [False, True])
def test_gradients_flow_through_kept_units_only(overlapping, couple):
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    y = drop_block_2d(x, 0.6, 2, overlapping=overlapping, couple_channels=couple)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_close(grad, torch.where(y == 0, 0.0, torch.ones_like(y) / 0.6), **tolerance(torch.float64)._asdict())
    assert (grad == 0).any() and (grad != 0).any()
    if couple:
        assert (grad == grad[:, :1]).all()


def test_memory_format_and_views():
    x = torch.randn(2, 3, 4, 6).to(memory_format=torch.channels_last)
    for overlapping in (False, True):
        a, b = (
            drop_block_2d(z, 0.6, 2, overlapping=overlapping, generator=torch.Generator().manual_seed(0))
            for z in (x, x.contiguous())
        )
        assert_close(a, b, rtol=0, atol=0)
    y = drop_block_1d(torch.randn(6, 4).T, 0.5, 3)
    assert y.shape == (4, 6)


def test_a_generator_reproduces():
    x = torch.randn(4, 12)
    draws = [drop_block_1d(x, 0.5, 3, overlapping=True, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert_close(*draws, rtol=0, atol=0)
    state = torch.random.get_rng_state()
    drop_connect_linear(x, torch.randn(2, 12), theta=0.5, generator=torch.Generator().manual_seed(0))
    layer = DropBlock1d(0.5, 3)
    torch.random.set_rng_state(state)
    first = layer(x)
    torch.random.set_rng_state(state)
    assert_close(layer(x), first, rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda: DropBlock1d(0.5, 3), lambda: DropBlock2d(0.5, 3, overlapping=True)])
def test_modules(make):
    layer = make()
    x = torch.randn(2, 6, 6)
    assert layer.eval()(x) is x
    assert not list(layer.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer))).train()
    torch.manual_seed(0)
    expected = layer.train()(x)
    torch.manual_seed(0)
    assert_close(again(x), expected, rtol=0, atol=0)
    assert "theta=0.5, block_size=3" in repr(layer)


def test_theta_one_and_eval_return_the_input():
    x = torch.randn(2, 4)
    assert drop_block_1d(x, 1.0, 2) is x
    assert drop_block_1d(x, 0.5, 2, training=False) is x


def whole_or_nothing(n, size, generator):
    keep = torch.rand(n, generator=generator) < 0.25
    return keep.double().reshape(n, *[1] * len(size)).expand(n, *size)


def test_any_scheme_by_a_sampler():
    layer = StructuredDropout(whole_or_nothing, mean=0.25, dims=2)
    y = layer(torch.ones(50, 3, 2, 2))
    assert set(y.unique().tolist()) == {0.0, 4.0}
    assert (y == y[..., :1, :1]).all()
    mean = torch.tensor([0.25, 0.5])
    y = StructuredDropout(whole_or_nothing, mean=mean)(torch.ones(50, 2))
    assert y.unique(dim=0).tolist() == [[0.0, 0.0], [4.0, 2.0]]
    with pytest.raises(OptionError, match="came without one: pass mean="):
        StructuredDropout(whole_or_nothing)(torch.ones(2, 2))


def test_dropconnect():
    plain = nn.Linear(6, 4)
    layer = DropConnectLinear.from_linear(plain, 0.5)
    assert layer.weight is plain.weight and layer.bias is plain.bias and layer.training
    x = torch.eye(6)
    y = layer(x) - plain.bias
    kept = y != 0
    assert_close(y, torch.where(kept, 2 * plain.weight.T, 0.0))
    assert 0 < kept.sum() < 24
    y.sum().backward()
    assert ((plain.weight.grad.T != 0) == kept).all()
    assert_close(layer.eval()(x), plain(x), rtol=0, atol=0)
    rates = torch.stack([drop_connect_linear(x, torch.ones(4, 6), theta=0.3) != 0 for _ in range(400)]).double()
    assert abs(rates.mean() - 0.3) < SIGMAS * (0.21 / 9600) ** 0.5
    assert "theta=0.5" in repr(DropConnectLinear(2, 3, theta=0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rescales_without_bias(dtype):
    """1/0.9 is not a half precision number: rounding the scale first would shift every unit to the same side."""
    x = torch.full((64, 64), 1.7, dtype=dtype)
    y = drop_block_1d(x, 0.9, 4)
    assert y.dtype == dtype
    expected = (x.double() / 0.9).to(dtype)
    assert ((y == 0) | (y == expected)).all()


def test_autocast():
    layer = nn.Sequential(DropConnectLinear(8, 8, theta=0.5), DropBlock1d(0.5, 4))
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "layer",
    [
        DropBlock1d(0.5, 3),
        DropBlock1d(0.5, 5, overlapping=True),
        DropBlock2d(0.5, 3),
        DropBlock2d(0.5, 4, overlapping=True, couple_channels=True),
        DropConnectLinear(6, 6, theta=0.5),
        StructuredDropout("dropout", 0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_break(layer, backend):
    torch.compiler.reset()
    layer = copy.deepcopy(layer).train()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(200, 3, 6, 6, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    if not isinstance(layer, nn.Linear):
        kept = y != 0
        assert_close(y, torch.where(kept, 2 * x, 0.0))
        assert ((x.grad != 0) == kept).all()
        assert abs(kept.double().mean() - 0.5) < 0.1
    assert_close(torch.compile(layer.eval(), fullgraph=True, backend=backend)(x), layer(x))


def test_bad_input():
    x = torch.randn(2, 10)
    with pytest.raises(BlockSizeError, match=r"block_size=4 for 10. The nearest that divide it: 2 or 5\."):
        drop_block_1d(x, 0.5, 4)
    with pytest.raises(BlockSizeError, match=r"block_size=4 for 6 x 9.*divide it: 3\."):
        drop_block_2d(torch.randn(1, 1, 6, 9), 0.5, 4)
    with pytest.raises(BlockSizeError, match=r"block_size=20 for 10.*divide it: 10\."):
        drop_block_1d(x, 0.5, 20)
    for theta in (0, -0.1, 1.1, float("nan"), True, "0.5", None):
        with pytest.raises(OptionError, match=r"in \(0, 1\]; found"):
            drop_block_1d(x, theta, 2)
    for size in (0, -1, 2.0, True):
        with pytest.raises(BlockSizeError, match="positive whole number"):
            DropBlock1d(0.5, size)
    with pytest.raises(UnknownNameError, match=r"Unknown scheme 'drop-block'. Did you mean 'dropblock'"):
        StructuredDropout("drop-block", 0.5, 2)
    with pytest.raises(UnknownNameError, match="Unknown scheme None"):
        StructuredDropout(None, 0.5, 2)
    with pytest.raises(OptionError, match="needs a block_size"):
        StructuredDropout("dropblock", 0.5)
    with pytest.raises(OptionError, match="needs theta"):
        StructuredDropout("dropblock", block_size=2)
    with pytest.raises(OptionError, match="drops single units"):
        StructuredDropout("dropout", 0.5, 2)
    with pytest.raises(OptionError, match="has its own"):
        StructuredDropout(OverlappingBlocks(0.5, 2), 0.5)
    with pytest.raises(OptionError, match="mean belongs to a sampler"):
        StructuredDropout("dropout", 0.5, mean=0.5)
    with pytest.raises(OptionError, match="without zeros"):
        StructuredDropout(whole_or_nothing, mean=0.0)
    with pytest.raises(ShapeError, match="and one of channels"):
        drop_block_2d(torch.randn(4, 4), 0.5, 2, couple_channels=True)
    with pytest.raises(OptionError, match="found 2"):
        DropConnectLinear(2, 2, theta=2)
