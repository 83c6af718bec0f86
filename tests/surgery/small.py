"""A model of one function, so that a test shows what it runs."""

from typing import Any

from torch import Tensor, nn


class Model(nn.Module):
    """A model of one function of (self, x), so that each test shows what it records."""

    def __init__(self, forward: Any, **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)
