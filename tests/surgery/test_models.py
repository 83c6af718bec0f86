"""The blocks of real models, each with its pattern or the reason against a longer one, and what solvers take of them.

``blocks.txt`` and ``selections.txt`` were derived by hand from the sources of the models; see ``rows.py`` for how to
read them. ``python -m tests.surgery.test_models timm resnet18`` prints what the matcher says.
"""

import functools
import pathlib
import sys
from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.surgery.models import MODELS
from tests.surgery.rows import read_sections, selection_table, table

TIMM: dict[str, dict[str, Any]] = {
    "vgg16": {"drop_rate": 0.5},
    "resnet18": {"drop_rate": 0.2},
    "resnet50": {},
    "resnet26t": {"drop_path_rate": 0.1},
    "convnext_tiny": {},
    "efficientnet_b0": {"drop_rate": 0.2},
    "efficientnet_lite0": {},
    "vit_tiny_patch16_224": {"drop_rate": 0.2, "proj_drop_rate": 0.1},
    "swin_tiny_patch4_window7_224": {},
    "swinv2_tiny_window8_256": {"depths": (1, 1, 1, 1)},
    "beit_base_patch16_224": {},
    "mixer_s32_224": {},
    "vit_base_patch16_clip_quickgelu_224": {"depth": 1},
    "test_nfnet": {},
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 2},
    "roberta": {},
    "gpt2": {},
    "t5": {"classifier_dropout": 0.1},
    "t5_gated": {},
    "vit": {},
    "beit": {},
    "resnet": {},
    "resnet_bottleneck": {},
    "convnext": {},
    "efficientnet": {},
    "swin": {},
    "bart": {"classifier_dropout": 0.1},
    "mixtral": {},
    "bert_mlm": {},
    "wav2vec2": {},
}
CASES = [("timm", name) for name in TIMM] + [("transformers", name) for name in TRANSFORMERS]


def build(library: str, name: str) -> nn.Module:
    if library == "transformers":
        return MODELS[name](**TRANSFORMERS[name])
    with torch.device("meta"):
        return timm.create_model(name, **TIMM[name])


@functools.cache
def expected(file: str) -> dict[str, list[str]]:
    return read_sections(pathlib.Path(__file__).with_name(file).read_text())


@pytest.mark.parametrize(("library", "name"), CASES)
def test_blocks_are_those_of_the_source(library: str, name: str) -> None:
    assert table(build(library, name)) == expected("blocks.txt")[f"{library} {name}"]


def test_no_section_is_left_over() -> None:
    assert list(expected("blocks.txt")) == [f"{library} {name}" for library, name in CASES]


@pytest.mark.parametrize("heading", expected("selections.txt"))
def test_solvers_take_by_default_what_they_should(heading: str) -> None:
    assert selection_table(build(*heading.split())) == expected("selections.txt")[heading]


if __name__ == "__main__":
    made = build(*sys.argv[1:3])
    print(*table(made), *selection_table(made), sep="\n")
