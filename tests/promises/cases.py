"""The tables that the promises are crossed with: models, and one row of options per registered solver.

``test_tables`` fails when a registered solver has no row, or a model has nothing to convert.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from timm.models.vgg import VGG
from torch import Tensor, nn

from solver_plugins import convert_model
from tests.promises.small import Functional, ResidualNet, SharedReLU
from tests.surgery import models as hugging


@dataclass(frozen=True)
class Case:
    """One model of the table.

    Attributes:
        build: Makes the model, in float32 on the CPU.
        inputs: Makes keyword or positional arguments of its forward, given a dtype for images.
        norms: Whether it has BatchNorm, so that a batch is not the sum of its samples.
        checkpointing: How the library switches gradient checkpointing on; None if it cannot.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], dict[str, Any] | tuple[Any, ...]]
    norms: bool = False
    checkpointing: str | None = None


def _image(side: int = 32, batch: int = 4) -> Callable[[torch.dtype], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(batch, 3, side, side, generator=generator, dtype=torch.float64)
    return lambda dtype: (image.to(dtype, copy=True),)


def _text(length: int = 12, batch: int = 4) -> Callable[[torch.dtype], dict[str, Tensor]]:
    ids = torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 1  # the end token, at which T5's classifier reads
    return lambda dtype: {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _vgg() -> nn.Module:
    # timm's VGG with its head of two 1x1-like convolutions, as vgg16 has it, and few channels.
    return VGG([8, "M", 8, "M", 12, "M"], num_classes=5, mlp_ratio=0.005, drop_rate=0.5)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **options)


def _t5() -> nn.Module:
    return hugging.t5(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)


_TIMM = "set_grad_checkpointing"
_HUGGING = hugging.CHECKPOINTING
MODELS: dict[str, Case] = {
    "residual": Case(ResidualNet, _image(12), norms=True),
    "shared_relu": Case(SharedReLU, _image(8), norms=True),
    "functional": Case(Functional, _image(8), norms=True),
    "timm_vgg": Case(_vgg, _image(), checkpointing=None),
    "timm_resnet": Case(_timm("test_resnet", drop_rate=0.2), _image(), norms=True, checkpointing=_TIMM),
    "timm_efficientnet": Case(
        _timm("test_efficientnet", act_layer=nn.ReLU6, drop_rate=0.2), _image(), norms=True, checkpointing=_TIMM
    ),
    "timm_vit": Case(_timm("test_vit", img_size=32, patch_size=8, drop_rate=0.1), _image(), checkpointing=_TIMM),
    "timm_convnext": Case(_timm("test_convnext", drop_rate=0.1), _image(), checkpointing=_TIMM),
    "hf_bert": Case(hugging.bert, _text(), checkpointing=_HUGGING),
    "hf_roberta": Case(hugging.roberta, _text(), checkpointing=_HUGGING),
    "hf_gpt2": Case(hugging.gpt2, _text(), checkpointing=_HUGGING),
    "hf_t5": Case(_t5, _text(), checkpointing=_HUGGING),
    "hf_vit": Case(hugging.vit, _image(), checkpointing=_HUGGING),
    "hf_resnet": Case(hugging.resnet, _image(), norms=True),
}
SOLVERS: dict[str, dict[str, Any]] = {
    "proxgd": {},
    "fista": {},
    "anderson": {"window": 2},
    "proxsg": {"p": 0.5},
    "ms2gd": {"p": 0.5, "inner": 2},
    "s2gd": {"p": 0.5, "inner": 2},
    "svrg": {"p": 0.5, "inner": 2},
    "rcd": {"p": 0.5},
}
"""Options that let a solver convert layers without a dropout, too, and go through all of its branches."""
DETERMINISTIC = ("proxgd", "fista", "anderson")
EVERYWHERE = ("proxgd", "proxsg", "rcd")
"""Solvers that meet every model; the others meet ``SMALL`` ones."""
SMALL = ("residual", "functional", "hf_roberta")
LARGE = ("timm_resnet", "timm_efficientnet", "timm_vit", "timm_convnext", "hf_bert", "hf_gpt2", "hf_t5")
"""Models whose certificates take seconds: only ``proxgd`` meets them outside of the slow tests."""
PAIRS = [(model, solver) for model in MODELS for solver in SOLVERS if solver in EVERYWHERE or model in SMALL]


def rows(pairs: Iterable[tuple[str, str]], large: str = "proxgd") -> list[Any]:
    """Returns pairs of model and solver for ``parametrize``, the costly ones marked slow."""
    return [
        pytest.param(model, solver, marks=pytest.mark.slow)
        if (model in LARGE and solver != large) or (model == "hf_roberta" and solver not in EVERYWHERE)
        else (model, solver)
        for model, solver in pairs
    ]


def singles() -> list[Any]:
    """Returns all models for ``parametrize``, the large ones marked slow."""
    return [pytest.param(model, marks=pytest.mark.slow) if model in LARGE else model for model in MODELS]


def build(model: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a model of the table with reproducible weights, and norms whose statistics are not the initial ones."""
    torch.manual_seed(0)
    made = MODELS[model].build().to(dtype)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
    return made


def convert(plain: nn.Module, model: str, solver: str, iters: int = 3, **options: Any) -> nn.Module:
    """Converts a model of the table in place, with all patterns."""
    example = MODELS[model].inputs(next(plain.parameters()).dtype)
    settings = {"pattern": "all", **SOLVERS[solver], **options}
    return convert_model(plain, solver, iters, example_inputs=example, **settings)


def run(made: nn.Module, model: str, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> Tensor:
    """Returns the model's output (its logits) for some rows of the table's batch."""
    inputs, device = MODELS[model].inputs(dtype), next(made.parameters()).device
    if isinstance(inputs, tuple):
        result = made(*(one[rows].to(device) for one in inputs))
    else:
        result = made(**{name: one[rows].to(device) for name, one in inputs.items()})
    return result if isinstance(result, Tensor) else result.logits


def twins(model: str, solver: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Returns a plain model and its converted copy, the same weights in both."""
    return build(model, dtype), converted(model, solver, dtype, **options)


def converted(model: str, solver: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Returns a converted model of the table; a copy, as certificates take most of the time of a conversion."""
    return copy.deepcopy(_prototype(model, solver, dtype, tuple(sorted(options.items()))))


@functools.cache
def _prototype(model: str, solver: str, dtype: torch.dtype, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    return convert(build(model, dtype), model, solver, **dict(options))


def named_state(made: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and all buffers, also those that are not saved."""
    yield from made.named_parameters()
    yield from made.named_buffers()
