"""transformers' models as cases: every class of its auto mappings, from a config that is made small."""

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from solver_plugins.surgery import Inputs
from solver_plugins.surgery.inputs import candidate_inputs
from solver_plugins.surgery.named_inputs import BATCH
from tests.coverage.result import Case, NotBuiltError, NotFedError
from tests.coverage.small import Small

SIDE = 64
"""Side of the images for a network that takes any size."""
LARGEST = 40_000_000
"""Parameters of a model that is still small."""
_SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
_PE = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": (32, 32), "global_pool": ""}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_RT_DETR = {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [32, 32, 32]}
_STAGES = {"backbone_config.depths": [1, 1, 1, 1], "backbone_config.num_heads": [2, 2, 4, 4]}
_SIZES = [[16, 16], [8, 8], [4, 4]]
_HGNET = {"encoder_in_channels": [16, 32, 64], "decoder_in_channels": [32, 32, 32]}
_FOUR = {"backbone_config.num_hidden_layers": 4,
         "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"]}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "align_vision_model": {"width_coefficient": 0.4, "depth_coefficient": 0.4, "image_size": 64},
    "axk1": {"n_group": 1, "topk_group": 1},
    "beit": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **dict.fromkeys(("mask2former", "maskformer", "oneformer", "upernet"), _STAGES),
    **dict.fromkeys(("depth_anything", "prompt_depth_anything", "tipsv2_dpt", "chmv2"), _FOUR),
    **dict.fromkeys(("pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4"), _HGNET),
    "edgetam_vision_model": {"backbone_channel_list": [192, 48, 32, 32], "backbone_feature_sizes": _SIZES},
    "efficientloftr": {"hidden_size": 64},
    "efficientnet": {"width_coefficient": 0.4, "depth_coefficient": 0.4, "hidden_dim": 512, "image_size": 64},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "absolute"},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "glm5_next_text": {"num_key_value_heads": 4},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "hgnet_v2": {"stem_channels": [3, 8, 16], "stage_in_channels": [16, 8, 16, 32], "stage_mid_channels": [8] * 4,
                 "stage_out_channels": [8, 16, 32, 64], "hidden_sizes": [8, 16, 32, 64]},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "lilt": {"hidden_size": 48},
    "lw_detr_vit": {"image_size": 64},
    "markuplm": {"max_xpath_tag_unit_embeddings": 128, "max_xpath_subs_unit_embeddings": 128},
    "mimi": {"upsample_groups": 32},
    "mistral4": {"head_dim": 16},
    "kosmos-2": {"latent_query_num": 8},
    "mobilevitv2": {"image_size": 64},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron3_5_transcribe_audio": {"chunk_right_context": 4},
    "nemotron3_diarization": {"chunk_right_context": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
                  "num_cross_attention_heads": 1, "image_size": 32, "max_position_embeddings": 64,
                  "num_frames": 2, "train_size": [32, 32], "audio_samples_per_frame": 32},
    "perception_lm": {"vision_config.architecture": "vit_pe_core_tiny_patch16_384", "vision_config.model_args": _PE},
    "qwen3_asr_encoder": {"n_window": 16},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4,
                 "lsh_attn_chunk_length": 4, "num_buckets": 4, "hash_seed": 0},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "sam3_vision_model": {"backbone_feature_sizes": _SIZES},
    "squeezebert": {"embedding_size": 32},
    "superpoint": {"max_keypoints": 16},
    "switch_transformers": {"num_experts": 1},
    "t5gemma": {"decoder.cross_attention_hidden_size": 32},
    "donut-swin": _SWIN,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "vibevoice_acoustic_tokenizer": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "textnet": {"image_size": [64, 64], "stem_out_channels": 16},
    "timm_backbone": {"backbone": "test_resnet"},
    "timm_wrapper": {"architecture": "test_resnet"},
    "xmod": {"default_language": "en_XX"},
    # Two hybrid layers: their attention is one module, which transformers ties.
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 3, "mamba_dt_rank": 2,
              "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8, "kv_channels": 8,
               "layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "intermediate_size": 64,
               "chunk_size": 8, "mamba_d_state": 8},
}  # fmt: skip
"""Further settings that a model type needs; those of a config go before those of the configs in it."""
CLASSES: dict[str, dict[str, Any]] = {
    "ReformerModelWithLMHead": {"is_decoder": True},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
}
"""Further settings that one class needs."""


def _images(side: int) -> Inputs:
    pixels = torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(0))
    return Inputs((), {"pixel_values": pixels})


def _texts(**others: Any) -> Inputs:
    """Returns two texts of a question and its answer, with separators between and behind them."""
    ids = torch.full((BATCH, 16), 5)
    ids[:, [4, 5, 15]] = 2
    ids[:, 0] = 0
    # A norm over the batch sees two texts.
    ids[1, 2] = 6
    return Inputs((), {"input_ids": ids, "attention_mask": torch.ones_like(ids), **others})


def _many() -> Inputs:
    """Returns texts and images for a norm over the batch, which magnifies rounding where it sees two of them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (8, 16), generator=generator)
    pixels = torch.randn(8, 3, 32, 32, generator=generator)
    return Inputs((), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels})


def _choices() -> Inputs:
    return Inputs((), {name: ids[:, None].repeat(1, 2, 1) for name, ids in _texts().kwargs.items()})


def _grounded() -> Inputs:
    """Returns an image, and texts with the places of its latents."""
    where = torch.zeros(BATCH, 16, dtype=torch.long)
    where[:, 2:10] = 1
    return _texts(**_images(32).kwargs, image_embeds_position_mask=where, use_cache=False)


def _seen() -> Inputs:
    """Returns texts that each see one image."""
    pixels = _images(32).kwargs["pixel_values"][:, None]
    return _texts(pixel_values=pixels, image_attention_mask=torch.ones(BATCH, 16, 1), use_cache=False)


def _boxed() -> Inputs:
    """Returns texts, and what was seen in four boxes of an image."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(BATCH, 4, 32, generator=generator)
    return _texts(visual_feats=seen, visual_pos=torch.rand(BATCH, 4, 4, generator=generator))


def _wanted() -> Inputs:
    """Returns images, the names of what to look for in each, and the tasks as texts."""
    classes, tasks = torch.full((2 * BATCH, 6), 5), torch.full((BATCH, 6), 5)
    return Inputs((), {
        **_images(32).kwargs, "classes_input_ids": classes, "classes_attention_mask": torch.ones_like(classes),
        "tasks_input_ids": tasks, "tasks_attention_mask": torch.ones_like(tasks),
        "classes_structure": torch.tensor([2] * BATCH),
    })  # fmt: skip


INPUTS: dict[str, Callable[[], Inputs]] = {
    "GroupViTModel": _many,
    "IdeficsForVisionText2Text": _seen,
    "IdeficsModel": _seen,
    "Kosmos2ForConditionalGeneration": _grounded,
    "Kosmos2Model": _grounded,
    **dict.fromkeys(("LxmertForPreTraining", "LxmertForQuestionAnswering", "LxmertModel"), _boxed),
    "LongformerForMultipleChoice": _choices,
    "LongformerForQuestionAnswering": _texts,
    "OmDetTurboForObjectDetection": _wanted,
    "PerceiverForImageClassificationConvProcessing": functools.partial(_images, 224),
    "PerceiverForImageClassificationFourier": functools.partial(_images, 224),
    "PerceiverForImageClassificationLearned": functools.partial(_images, 32),
}
"""Inputs of classes that do not say what they take."""


@functools.cache
def tasks() -> dict[str, tuple[str, list[str]]]:
    """Returns every model class of the auto mappings with its model type and its tasks."""
    found: dict[str, tuple[str, list[str]]] = {}
    for mapping in sorted(name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES")):
        if mapping == "CONFIG_MAPPING_NAMES":
            continue
        task = mapping.removesuffix("_MAPPING_NAMES").removeprefix("MODEL_FOR_").replace("MODEL", "BASE_MODEL")
        for kind, classes in getattr(modeling_auto, mapping).items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault(name, (kind, []))[1].append(task.lower().replace("_", " "))
    return found


def names() -> list[tuple[str, str]]:
    """Returns every class with its model type, one family after the other in an order that is as good as random.

    What a run that was stopped has done is then a sample of all.
    """
    found = [(name, kind) for name, (kind, _) in tasks().items()]
    return sorted(found, key=lambda pair: (hashlib.sha256(pair[1].encode()).digest(), pair[0]))


def _finish(name: str, config: Any) -> Any:
    if "Classification" in name:
        config.num_labels = 3
    text = config.get_text_config(decoder=True)
    if getattr(text, "pad_token_id", 0) is None:
        # A classifier of several texts needs to know where each of them ends.
        text.pad_token_id = 0
    return config


def build(name: str, family: str) -> nn.Module:
    """Makes a small model of a class."""
    made = case(name, family).model
    assert made is not None
    return made


def _remade(name: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, name)(copy.deepcopy(config))
    return made


def case(name: str, family: str) -> Case:
    """Finds a config and inputs for a class.

    Raises:
        NotBuiltError: If no small config was found with which it is built.
        NotFedError: If it was built, and did not run with any inputs.
    """

    def works(config: Any) -> Case:
        rebuild = functools.partial(_remade, name, _finish(name, config))
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in rebuild().parameters())
            if size > LARGEST:
                raise NotBuiltError(f"{size / 1e6:.0f} million parameters")
            model = rebuild()
        except Exception as error:
            raise NotBuiltError(f"{type(error).__name__}: {error}") from error
        try:
            inputs = INPUTS[name]() if name in INPUTS else inputs_for(model)
        except Exception as error:
            raise NotFedError(f"{type(error).__name__}: {error}") from error
        return Case("transformers", name, family, rebuild, inputs, model=model, given=name in INPUTS)

    kind = getattr(getattr(transformers, name), "config_class", None) or CONFIG_MAPPING[family]
    small = Small(kind(), OVERRIDES)
    small.values |= CLASSES.get(name, {})
    try:
        return small.first(works)
    except (NotBuiltError, NotFedError):
        raise
    except Exception as error:
        # The config itself says what does not fit together.
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error


def inputs_for(model: nn.Module) -> Inputs:
    """Returns the first inputs that a model takes; images are made small where it takes any size."""
    error: Exception | None = None
    for inputs in candidate_inputs(model, small=True):
        try:
            _run(model, inputs)
        except Exception as found:
            # Inputs come likeliest first, and so do errors.
            error = error or found
            continue
        pixels = inputs.kwargs.get("pixel_values")
        if pixels is not None and pixels.dim() == 4 and min(pixels.shape[2:]) > SIDE:
            small = Inputs((), {**inputs.kwargs, "pixel_values": pixels[..., :SIDE, :SIDE].clone()})
            with contextlib.suppress(Exception):
                _run(model, small)
                return small
        return inputs
    assert error is not None
    raise error


def _run(model: nn.Module, inputs: Inputs) -> None:
    args, kwargs = inputs.to(torch.device("cpu"))
    with torch.no_grad():
        model.eval()(*args, **kwargs)
