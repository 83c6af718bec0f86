"""Converted models of timm and transformers, small enough to save and load in a test."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

from solver_plugins import convert_model
from tests.surgery.models import MODELS

TIMM: dict[str, dict[str, Any]] = {
    "test_byobnet": {"num_classes": 7, "drop_rate": 0.5},
    "test_resnet": {"in_chans": 4, "num_classes": 5},
    "test_efficientnet": {"drop_rate": 0.2},
    "test_vit": {"img_size": 64, "drop_rate": 0.1, "drop_path_rate": 0.2},
}
"""Names of models, and what they are created with."""

TARGETS = {
    "test_byobnet": r"stem.conv|stages.0.0.conv1_1x1.conv|stages.1.0.*|head.fc",
    "test_resnet": r"conv1.0|layer1.0.*|fc",
    "test_efficientnet": r"conv_stem|blocks.1.0.*|classifier",
    "test_vit": r"blocks.0.mlp.*|head",
}
"""A few layers of each: a certificate takes its time."""

SOLVERS: dict[str, dict[str, Any]] = {
    "proxgd": {"pattern": "all"},
    "proxsg": {"p": 0.5, "pattern": "all"},
    "fista": {"pattern": "all"},
    "rcd": {"p": 0.5, "pattern": "all"},
}

HUGGING_FACE = ("bert", "roberta", "vit", "resnet", "t5", "gpt2", "bert_mlm")


def timm_model(name: str, **more: Any) -> nn.Module:
    return timm.create_model(name, **{**TIMM[name], **more}).eval()


def timm_input(model: nn.Module, batch: int = 2) -> Tensor:
    name = model.pretrained_cfg["architecture"]
    size = TIMM[name].get("img_size", 32)
    return torch.randn(batch, TIMM[name].get("in_chans", 3), size, size)


def hugging_face_model(name: str, **options: Any) -> nn.Module:
    if name == "t5":
        options = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, **options}
    return MODELS[name](**options).eval()


def hugging_face_inputs(name: str, batch: int = 2) -> dict[str, Tensor]:
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(batch, 3, 32, 32)}
    ids = torch.randint(3, 60, (batch, 8))
    ids[:, -1] = 1  # T5 reads the classification at the end of the sentence
    return {"input_ids": ids}


def converted(model: nn.Module, solver: str, iters: int = 3, **options: Any) -> nn.Module:
    return convert_model(model, solver, iters=iters, **{**SOLVERS[solver], **options})
