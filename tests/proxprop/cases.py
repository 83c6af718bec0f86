"""Layers with inputs: every kind and geometry, with more rows than columns and with fewer."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

D = {"dtype": torch.float64}


def conv1d_of_transformers(n1: int, n2: int) -> nn.Module:
    layer = Conv1D(n2, n1).double()
    nn.init.normal_(layer.bias)
    return layer


# name -> (layer, shapes of its inputs)
LAYERS = {
    "linear, few rows": (lambda: nn.Linear(9, 4, **D), [(3, 9)]),
    "linear, many rows": (lambda: nn.Linear(5, 4, **D), [(12, 5)]),
    "linear, few rows, many outputs": (lambda: nn.Linear(9, 8, **D), [(4, 9)]),
    "linear, no bias": (lambda: nn.Linear(9, 4, bias=False, **D), [(3, 9)]),
    "linear, many rows, no bias": (lambda: nn.Linear(5, 4, bias=False, **D), [(12, 5)]),
    "linear, tokens": (lambda: nn.Linear(5, 4, **D), [(2, 3, 4, 5)]),
    "linear, few tokens": (lambda: nn.Linear(30, 4, **D), [(2, 3, 2, 30)]),
    "linear, one sample": (lambda: nn.Linear(6, 3, **D), [(6,)]),
    "linear, called twice": (lambda: nn.Linear(9, 4, **D), [(2, 9), (3, 9)]),
    "linear, called twice, many rows": (lambda: nn.Linear(5, 4, **D), [(4, 5), (2, 3, 5)]),
    "Conv1D, few rows": (lambda: conv1d_of_transformers(9, 4), [(3, 9)]),
    "Conv1D, many rows": (lambda: conv1d_of_transformers(4, 4), [(2, 5, 4)]),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, **D), [(2, 3, 9)]),
    "conv1d, few rows": (lambda: nn.Conv1d(6, 4, 5, **D), [(2, 6, 9)]),
    "conv1d, unbatched": (lambda: nn.Conv1d(2, 4, 3, **D), [(2, 12)]),
    "conv1d, stride, dilation": (lambda: nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=3, **D), [(3, 2, 11)]),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1, **D), [(2, 2, 6, 5)]),
    "conv2d, no bias": (lambda: nn.Conv2d(2, 3, 3, bias=False, **D), [(2, 2, 6, 5)]),
    "conv2d, few rows": (lambda: nn.Conv2d(4, 3, 3, **D), [(1, 4, 5, 6)]),
    "conv2d, few rows, two sizes": (lambda: nn.Conv2d(5, 3, 3, **D), [(1, 5, 5, 6), (1, 5, 4, 4)]),
    "conv2d, 1x1": (lambda: nn.Conv2d(4, 3, 1, **D), [(2, 4, 3, 2)]),
    "conv2d, 1x3": (lambda: nn.Conv2d(2, 3, (1, 3), **D), [(2, 2, 4, 6)]),
    "conv2d, 5x1": (lambda: nn.Conv2d(2, 3, (5, 1), padding=(2, 0), **D), [(2, 2, 7, 3)]),
    "conv2d, patches": (lambda: nn.Conv2d(2, 3, 2, stride=2, **D), [(4, 2, 6, 4)]),
    "conv2d, stride": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, **D), [(3, 2, 7, 6)]),
    "conv2d, stride by one axis": (lambda: nn.Conv2d(2, 3, 3, stride=(1, 2), padding=1, **D), [(3, 2, 7, 6)]),
    "conv2d, dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2, **D), [(2, 2, 7, 8)]),
    "conv2d, small input": (lambda: nn.Conv2d(1, 3, 5, padding=2, **D), [(9, 1, 2, 3)]),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, **D), [(2, 4, 5, 5)]),
    "conv2d, groups, few rows": (lambda: nn.Conv2d(8, 4, 3, groups=2, **D), [(1, 8, 5, 4)]),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, **D), [(2, 4, 6, 6)]),
    "conv2d, same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", **D), [(2, 2, 6, 6)]),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", **D), [(2, 2, 5, 6)]),
    "conv2d, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect", **D), [(2, 2, 5, 6)]),
    "conv2d, replicate": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate", **D), [(2, 2, 5, 6)]),
    "conv2d, two sizes": (lambda: nn.Conv2d(2, 3, 3, padding=1, **D), [(2, 2, 6, 5), (1, 2, 4, 7)]),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, **D), [(2, 2, 4, 5, 4)]),
    "conv3d, few rows": (lambda: nn.Conv3d(4, 3, 3, padding=1, **D), [(1, 4, 2, 3, 4)]),
    "conv3d, all": (
        lambda: nn.Conv3d(2, 4, (3, 1, 2), stride=(1, 2, 1), dilation=(1, 1, 2), padding=1, groups=2, **D),
        [(2, 2, 5, 4, 5)],
    ),
}  # fmt: skip


class Twice(nn.Module):
    """Runs one layer on every input and a head on top: the layer is not the last one."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(1, 2, **D)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(sum(torch.tanh(self.layer(x)).square().sum() for x in inputs).reshape(1, 1))


def make(name: str) -> tuple[Twice, list[Tensor]]:
    layer, shapes = LAYERS[name]
    return Twice(layer()), [torch.randn(shape, **D) for shape in shapes]
