"""Gram matrices against explicit ones, whose columns are convolutions with kernels that have a single one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from solver_plugins.proxprop import gram as module
from solver_plugins.proxprop.gram import gram
from solver_plugins.proxprop.rows import Rows

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def moments(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns X^T X and 1^T X as the package computes them."""
    rows = Rows.of(layer)
    prepared, margins = rows.without_zeros(x, x.dtype)
    return gram(rows, prepared, margins), rows.column_sums(prepared, margins)


def dense_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns X as [g, N, d]: the outputs of a layer whose outputs are the entries of its windows."""
    g, d = layer.groups, layer.weight[0].numel()
    wide = type(layer)(
        layer.in_channels,
        g * d,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        g,
        False,
        layer.padding_mode,
        dtype=x.dtype,
    )
    with torch.no_grad():
        wide.weight.copy_(torch.eye(d, dtype=x.dtype).repeat(g, 1).reshape(wide.weight.shape))
        y = wide(x)
    return y.unflatten(1, (g, d)).flatten(3).permute(1, 0, 3, 2).reshape(g, -1, d)


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    taps, dilation, padding = each(1, 4 if dims < 3 else 3), each(1, 3 if dims < 3 else 2), each(0, 3)
    # One window at least.
    size = tuple(
        max(1, gap * (k - 1) + 1 - 2 * side) + more
        for k, gap, side, more in zip(taps, dilation, padding, each(0, 5 if dims < 3 else 2), strict=True)
    )
    groups = draw(st.integers(1, 2))
    stride = tuple(draw(st.sampled_from((1, 1, 1, 2))) for _ in range(dims))
    layer = CONV[dims - 1](
        groups * draw(st.integers(1, 3)), groups, taps, stride, padding, dilation, groups, dtype=torch.float64
    )
    return layer, torch.randn(draw(st.integers(1, 3)), layer.in_channels, *size, dtype=torch.float64)


@given(convolutions(), st.sampled_from((1, 2**22)))
def test_any_convolution(case, piece_bytes):
    layer, x = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        matrix, sums = moments(layer, x)
    X = dense_rows(layer, x)
    torch.testing.assert_close(matrix, X.mT @ X, **CLOSE)
    torch.testing.assert_close(sums, X.sum(1), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("channels", [1, 3, 10])
def test_many_samples_in_uneven_pieces(channels, dtype, monkeypatch):
    """Enough of them for the fast transposition, and blocks of lines that do not come out even."""
    layer = nn.Conv2d(channels, 2, 5, padding=2, dtype=dtype)
    x = torch.rand(190, channels, 11, 7, dtype=dtype)
    monkeypatch.setattr(module, "PIECE_BYTES", x[:80].numel() * x.element_size())
    X = dense_rows(layer, x).double()
    matrix, sums = moments(layer, x)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(matrix.double(), X.mT @ X, **tolerance)
    torch.testing.assert_close(sums.double(), X.sum(1), **tolerance)


def test_no_samples():
    layer = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
    matrix, sums = moments(layer, torch.zeros(0, 2, 5, 5, dtype=torch.float64))
    assert not matrix.any() and not sums.any()


def test_padding_is_not_copied():
    """Zeros around an input cost nothing: the input itself is worked on."""
    x = torch.randn(2, 3, 6, 6)
    prepared, margins = Rows.of(nn.Conv2d(3, 4, 5, padding=2)).without_zeros(x, torch.float32)
    assert prepared.data_ptr() == x.data_ptr()
    assert margins == ((2, 2), (2, 2))
