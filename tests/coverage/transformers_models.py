"""transformers' classifiers as cases: every class of two of its mappings, from a config that is made small."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from solver_plugins.surgery import Inputs
from solver_plugins.surgery.inputs import BATCH, candidate_inputs
from tests.coverage.result import Case

SIDE = 64
"""Side of the images for a network that takes any size."""
_WORDS = {
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_blocks_ num_experts_per_tok moe_topk num_hash_functions num_mem_blocks",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_local_experts num_experts n_routed_experts mamba_n_heads_ linear_num_key_heads linear_num_value_heads",
    8: "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "attention_head_size global_head_dim",
    16: "q_lora_rank kv_lora_rank embedding_size",
    32: "hidden_size d_model n_embd emb_dim dim embed_dim max_2d_position_embeddings_ moe_intermediate_size "
    "shared_expert_intermediate_size expert_layer_size projection_dim image_size",
    64: "intermediate_size ffn_dim d_ff d_inner n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim "
    "max_position_embeddings_ n_positions_ ffn_hidden_size",
    128: "vocab_size",
}
"""Small values of a config's settings; a setting that is smaller keeps its value."""
_SMALL = {word: value for value, words in _WORDS.items() for word in words.split()}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
           "decoder_start_token_id", "unk_token_id", "image_token_id", "image_token_index")  # fmt: skip

_SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "hidden_size": 32, "depths": [1, 2], "num_heads": [2, 4],
    "num_layers": 2, "window_size": 4, "out_features": None, "stage_names": ["stem", "stage1", "stage2"],
}  # fmt: skip
_PERCEIVER: dict[str, Any] = {
    "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
    "num_cross_attention_heads": 1, "image_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": {"n_group": 1, "topk_group": 1},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2], "num_groups": 8, "out_features": None,
            "stage_names": ["stem", "stage1", "stage2"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deberta": {"pooler_hidden_size": 32},
    "deberta-v2": {"pooler_hidden_size": 32},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "donut-swin": _SWIN,
    "efficientnet": {"width_coefficient": 0.4, "depth_coefficient": 0.4, "hidden_dim": 512, "image_size": 64},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "absolute"},
    "gptj": {"rotary_dim": 4},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "mistral4": {"head_dim": 16},
    "mobilevitv2": {"image_size": 64},
    "perceiver": _PERCEIVER,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4,
                 "lsh_attn_chunk_length": 4, "num_buckets": 4, "hash_seed": 0},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "squeezebert": {"embedding_size": 32},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "t5gemma": {"decoder.cross_attention_hidden_size": 32},
    "textnet": {"image_size": [64, 64]},
    "timm_wrapper": {"architecture": "test_resnet"},
    "xmod": {"default_language": "en_XX"},
    # Two hybrid layers: their attention is one module, which transformers ties.
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 3, "mamba_dt_rank": 2,
              "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8, "kv_channels": 8,
               "layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "intermediate_size": 64,
               "chunk_size": 8, "mamba_d_state": 8},
}  # fmt: skip
"""Further settings that a model type needs."""


def _patches() -> Inputs:
    """Returns images that are already cut into patches."""
    shapes = torch.tensor([[2, 2]] * BATCH)
    patches = torch.randn(BATCH, 4, 3 * 16 * 16, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(BATCH, 4, dtype=torch.long)
    return Inputs((), {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes})


def _images(side: int) -> Inputs:
    pixels = torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(0))
    return Inputs((), {"pixel_values": pixels})


INPUTS: dict[str, Callable[[], Inputs]] = {
    "PerceiverForImageClassificationConvProcessing": functools.partial(_images, 224),
    "PerceiverForImageClassificationFourier": functools.partial(_images, 224),
    "PerceiverForImageClassificationLearned": functools.partial(_images, 32),
    "Siglip2ForImageClassification": _patches,
}
"""Inputs of classes that do not say what they take."""


def names() -> list[tuple[str, str]]:
    """Returns every class of the two mappings with its model type."""
    found: dict[str, str] = {}
    for mapping in (MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES):
        for kind, classes in mapping.items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault(name, kind)
    return sorted(found.items())


def small_config(kind: str) -> Any:
    """Returns the default config of a model type, made small."""
    config = CONFIG_MAPPING[kind]()
    _shrink(config)
    for key, value in OVERRIDES.get(kind, {}).items():
        target, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, target.split("."), config) if target else config, name, value)
    config.num_labels = 3
    return config


def _shrink(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value)
        elif name in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, _SMALL[name]))
        elif name in _TOKENS and isinstance(value, int) and value >= 128:
            setattr(config, name, 100 + _TOKENS.index(name))
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = min(config.num_key_value_heads or heads, heads)
    if isinstance(heads, int) and getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // heads
    if getattr(config, "pad_token_id", 0) is None:
        # A classifier of several texts needs to know where each of them ends.
        config.pad_token_id = 0
    kinds, depth = vars(config).get("layer_types"), getattr(config, "num_hidden_layers", None)
    if isinstance(kinds, list) and isinstance(depth, int):
        # One layer of each kind, as far as there is room.
        config.layer_types = [*dict.fromkeys(kinds), *kinds][:depth]


def build(name: str, kind: str) -> nn.Module:
    """Makes a small model."""
    torch.manual_seed(0)
    made: type[nn.Module] = getattr(transformers, name)
    return made(small_config(kind))


def case(name: str, family: str) -> Case:
    """Finds inputs for a class."""
    model = build(name, family)
    inputs = INPUTS[name]() if name in INPUTS else inputs_for(model)
    rebuild = functools.partial(build, name, family)
    return Case("transformers", name, family, rebuild, inputs, model=model, given=name in INPUTS)


def inputs_for(model: nn.Module) -> Inputs:
    """Returns the first inputs that a model takes; images are made small where it takes any size."""
    error: Exception | None = None
    for inputs in candidate_inputs(model):
        try:
            _run(model, inputs)
        except Exception as found:
            error = found
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
