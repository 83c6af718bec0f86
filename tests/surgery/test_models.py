"""The blocks of real models, every one with its pattern or the reason against a longer one.

``blocks.txt`` was checked by hand against the sources of the models; see ``rows.py`` for how to read it. To write it
anew after a change: ``python -m tests.surgery.test_models > tests/surgery/blocks.txt``, and read the difference.
"""

import pathlib
from typing import Any

import pytest
import timm
from torch import nn

from tests.surgery.models import MODELS
from tests.surgery.rows import table

TIMM: dict[str, dict[str, Any]] = {
    "vgg16": {"drop_rate": 0.5},
    "resnet18": {"drop_rate": 0.2},
    "test_convnext": {},
    "efficientnet_lite0": {},
    "test_efficientnet": {},
    "test_vit": {"drop_rate": 0.1, "proj_drop_rate": 0.1},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1, 2, 1)},
    "swinv2_tiny_window8_256": {"depths": (1, 1, 1, 1)},
    "beit_base_patch16_224": {"depth": 1},
    "mixer_s32_224": {},
    "vit_base_patch16_clip_quickgelu_224": {"depth": 1},
    "test_nfnet": {},
    "resnet26t": {"drop_path_rate": 0.1},
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "gpt2": {},
    "t5": {"classifier_dropout": 0.1},
    "bart": {"classifier_dropout": 0.1},
    "vit": {},
    "beit": {},
    "resnet": {},
    "convnext": {},
    "swin": {},
    "mixtral": {},
    "bert_mlm": {},
    "wav2vec2": {},
}
CASES = [("timm", name) for name in TIMM] + [("transformers", name) for name in TRANSFORMERS]


def build(library: str, name: str) -> nn.Module:
    return timm.create_model(name, **TIMM[name]) if library == "timm" else MODELS[name](**TRANSFORMERS[name])


def expected() -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for text in pathlib.Path(__file__).with_name("blocks.txt").read_text().splitlines():
        if text.startswith("== "):
            rows = sections[text[3:]] = []
        elif text:
            rows.append(text)
    return sections


@pytest.mark.parametrize(("library", "name"), CASES)
def test_blocks_are_those_of_the_source(library: str, name: str) -> None:
    assert table(build(library, name)) == expected()[f"{library} {name}"]


def test_no_section_is_left_over() -> None:
    assert list(expected()) == [f"{library} {name}" for library, name in CASES]


if __name__ == "__main__":
    for case in CASES:
        print(f"== {' '.join(case)}", *table(build(*case)), "", sep="\n")
