"""Networks of weight-standardised convolutions: what is converted computes with the kernels that are applied."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from transformers import BitConfig, BitForImageClassification

from solver_plugins import SolverBlock, convert_model, revert_model


def nf_resnet() -> nn.Module:
    return timm.create_model("nf_resnet26", num_classes=3, depths=(1, 1), channels=(64, 128), stem_chs=32)


def resnetv2_bit() -> nn.Module:
    # As timm's resnetv2_50x1_bit, but small.
    return ResNetV2(
        (1, 1), (128, 256), num_classes=3, stem_chs=32, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8)
    )


def hf_bit() -> nn.Module:
    config = BitConfig(
        embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=8, num_labels=3, global_padding="SAME"
    )
    return BitForImageClassification(config)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    result: Any = model(x)
    return result if isinstance(result, Tensor) else result.logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [nf_resnet, resnetv2_bit, hf_bit])
def test_a_network_of_standardised_convolutions(build: Callable[[], nn.Module]) -> None:
    model = build().double().eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    plain, keys = logits(model, x), list(model.state_dict())
    options = {"pattern": "all", "example_inputs": x}
    convert_model(model, "proxgd", iters=1, **options)
    assert torch.equal(logits(model, x), plain)
    revert_model(model)
    convert_model(model, "proxgd", iters=3, targets=lambda name, module: hasattr(module, "eps"), **options)
    blocks = [module for module in model.modules() if isinstance(module, SolverBlock)]
    assert len(blocks) > 3 and all(
        "StdConv2d" in type(b).__name__ or "Standardized" in type(b).__name__ for b in blocks
    )
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for block in blocks:
        # Activations may work in place.
        block.register_forward_hook(lambda module, args, output: seen.update({module: (args[0], output.clone())}))
    logits(model, x).sum().backward()
    for block in blocks:
        # Behind a skip the layer returns what it always did.
        if block.link is None:
            check(block, *seen[block])
    assert all(parameter.grad is not None for parameter in model.parameters())
    revert_model(model)
    assert torch.equal(logits(model, x), plain) and list(model.state_dict()) == keys


def check(block: SolverBlock, u: Tensor, found: Tensor) -> None:
    """Three steps with ``A`` and ``A^T`` as jvp and vjp of the plain layer alone."""
    plain = type(block).plain_class
    lam, constant = block.solver.config.lam, block.L + block.solver.config.lam
    with torch.no_grad():
        c = plain.forward(block, u)
    bias = plain.forward(block, torch.zeros_like(u)).detach()
    _, adjoint = torch.func.vjp(lambda v: plain.forward(block, v), u.detach())
    v = c
    for _ in range(2):
        value = block.prior.prox(v, 1.0)
        v = value - (plain.forward(block, adjoint(value)[0]) - bias + lam * value) / constant + c
    torch.testing.assert_close(found, v, rtol=1e-9, atol=1e-9)
