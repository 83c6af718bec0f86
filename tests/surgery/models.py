"""Small models of transformers, made from configs: no weights are loaded."""

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    if hasattr(transformers.PreTrainedModel, name)
)
"""The switch of transformers; its second name is that before 5.23."""

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "num_labels": 3,
}
_IMAGE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 3,
}


def bert(**options: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**{**_TEXT, **options}))


def roberta(**options: Any) -> nn.Module:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**_TEXT, **options))


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=40,
        n_embd=16,
        n_layer=1,
        n_head=2,
        num_labels=3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        **options,
    )
    return transformers.GPT2ForSequenceClassification(config)


def t5(**options: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, num_labels=3, **options
    )
    return transformers.T5ForSequenceClassification(config)


def t5_gated(**options: Any) -> nn.Module:
    return t5(feed_forward_proj="gated-gelu", **options)


def bart(**options: Any) -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=40,
        num_labels=3,
        **options,
    )
    return transformers.BartForSequenceClassification(config)


def vit(**options: Any) -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_IMAGE, **options))


def beit(**options: Any) -> nn.Module:
    return transformers.BeitForImageClassification(transformers.BeitConfig(**_IMAGE, **options))


def resnet(**options: Any) -> nn.Module:
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 3}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**{**shape, **options}))


def resnet_bottleneck(**options: Any) -> nn.Module:
    return resnet(hidden_sizes=[16, 32], layer_type="bottleneck", **options)


def efficientnet(**options: Any) -> nn.Module:
    config = transformers.EfficientNetConfig(
        image_size=32,
        width_coefficient=0.1,
        depth_coefficient=1.0,
        kernel_sizes=[3, 5],
        in_channels=[32, 16],
        out_channels=[16, 24],
        depthwise_padding=[],
        strides=[1, 2],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 6],
        hidden_dim=128,
        num_labels=3,
        **options,
    )
    return transformers.EfficientNetForImageClassification(config)


def convnext(**options: Any) -> nn.Module:
    config = transformers.ConvNextConfig(
        image_size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, **options
    )
    return transformers.ConvNextForImageClassification(config)


def swin(**options: Any) -> nn.Module:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=3,
        **options,
    )
    return transformers.SwinForImageClassification(config)


def mixtral(**options: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        **_TEXT, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0, **options
    )
    return transformers.MixtralForSequenceClassification(config)


def bert_mlm(**options: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT, **options))


def wav2vec2(**options: Any) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=[8, 8],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=3,
        **options,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config)


MODELS: dict[str, Callable[..., nn.Module]] = {
    made.__name__: made
    for made in (
        bert,
        roberta,
        gpt2,
        t5,
        t5_gated,
        vit,
        beit,
        resnet,
        resnet_bottleneck,
        convnext,
        efficientnet,
        swin,
        bart,
        mixtral,
        bert_mlm,
        wav2vec2,
    )
}
