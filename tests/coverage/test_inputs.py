"""Inputs that are made from what a class of transformers says."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from solver_plugins.surgery import RecordError, example_inputs_for, record


def llava() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    return transformers.LlavaForConditionalGeneration(config)


def test_images_stand_in_the_place_of_their_tokens():
    """A 16x16 image has four patches of 8x8, and both towers are walked."""
    model = llava()
    made = example_inputs_for(model).kwargs
    assert made["pixel_values"].shape == (2, 3, 16, 16)
    assert (made["input_ids"] == 60).sum(1).tolist() == [4, 4]
    names = {call.name for call in record(model).calls}
    assert any("vision_tower" in str(name) for name in names) and any("language_model" in str(name) for name in names)


def test_several_choices_and_decoders():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertForMultipleChoice(transformers.BertConfig(**sizes, vocab_size=64))
    assert example_inputs_for(bert).kwargs["input_ids"].shape == (2, 2, 16)
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=64, max_source_positions=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    made = example_inputs_for(transformers.WhisperForConditionalGeneration(config)).kwargs
    assert made["input_features"].shape == (2, 80, 16) and made["decoder_input_ids"].shape == (2, 16)


class Pairs(nn.Module):
    """Keypoints are matched between two images."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=4, num_channels=3)
        self.fc = nn.Linear(4, 2)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        first, second = pixel_values.transpose(0, 1)
        return self.fc(first - second)


class Clips(nn.Module):
    """A vision tower whose patches last two frames."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(patch_size=4, patch_temporal=2)
        self.fc = nn.Linear(2 * 3 * 4**2, 2)

    def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        return self.fc(pixel_values)


@pytest.mark.parametrize("model", [Pairs(), Clips()])
def test_pairs_of_images_and_patches_in_time(model):
    assert "fc" in [call.name for call in record(model).calls]


class Options(nn.Module):
    """A class with an input that its name does not tell."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=8)
        self.fc = nn.Linear(3, 2)

    def forward(self, input_ids: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        return self.fc(marks)


def test_what_cannot_be_made_is_said_with_an_example():
    expected = r'"input_ids": torch\.ones\(2, 16, dtype=torch\.int64\), "marks": \.\.\.'
    with pytest.raises(RecordError, match=expected):
        record(Options())
