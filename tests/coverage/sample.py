"""Which models are checked: all of them, or a fixed sample that is quick and has blocks of many kinds."""

from collections.abc import Sequence

from tests.coverage.run import Task

CI: dict[str, tuple[str, ...]] = {
    "timm": (
        "convit_tiny", "cpubone_nano", "darknet17", "deit_tiny_patch16_224", "dla46x_c", "edgenext_xx_small",
        "efficientvit_b0", "efficientvit_m0", "ese_vovnet19b_slim", "eva02_tiny_patch14_224", "fasternet_t0",
        "ghostnet_050", "hardcorenas_a", "hgnetv2_b0", "inception_next_atto", "lcnetv2_small", "legacy_seresnet18",
        "levit_128s", "mixer_s32_224", "mobilenetv3_small_050", "mobilevit_xxs", "pit_ti_224", "pvt_v2_b0",
        "regnetx_002", "repghostnet_050", "resnest14d", "resnetv2_18", "rexnet_100", "selecsls42", "shvit_s1",
        "skresnet18", "starnet_s1", "test_byobnet", "test_convnext", "test_efficientnet", "test_mambaout",
        "test_nfnet", "test_resnet", "test_vit", "xcit_nano_12_p16_224",
    ),
    "transformers": (
        "AlbertForSequenceClassification", "BartForSequenceClassification", "BeitForImageClassification",
        "BertForSequenceClassification", "BitForImageClassification", "CLIPForImageClassification",
        "CTRLForSequenceClassification", "ConvBertForSequenceClassification", "DebertaV2ForSequenceClassification",
        "DistilBertForSequenceClassification", "GPT2ForSequenceClassification",
        "HunYuanMoEV1ForSequenceClassification", "LlamaForSequenceClassification", "MixtralForSequenceClassification",
        "MobileNetV2ForImageClassification", "ModernBertForSequenceClassification", "OPTForSequenceClassification",
        "RegNetForImageClassification", "ResNetForImageClassification", "RobertaForSequenceClassification",
        "SegformerForImageClassification", "SwinForImageClassification", "T5ForSequenceClassification",
        "ViTForImageClassification", "XLNetForSequenceClassification",
    ),
}  # fmt: skip
"""One small model of each of 40 families of timm, and 25 classifiers of transformers."""
HEADS = (
    "ASTForAudioClassification", "AlbertForMultipleChoice", "BartForConditionalGeneration", "BertForMaskedLM",
    "BertForNextSentencePrediction", "CLIPModel", "DecisionTransformerModel", "DistilBertForTokenClassification",
    "EncoderDecoderModel", "GLPNForDepthEstimation", "GPT2LMHeadModel", "LayoutLMForQuestionAnswering",
    "LlamaForCausalLM", "LlavaForConditionalGeneration", "MBartForQuestionAnswering", "OPTForCausalLM",
    "PatchTSTModel", "SegformerForSemanticSegmentation", "TimesformerForVideoClassification",
    "ViTForMaskedImageModeling", "VisionEncoderDecoderModel", "Wav2Vec2ForCTC", "YolosForObjectDetection",
)  # fmt: skip
"""Classes of transformers with each of the other kinds of heads."""


def tasks(libraries: Sequence[str], sample: str | None = None) -> list[Task]:
    """Returns the models of some libraries, or those of a sample."""
    from tests.coverage import timm_models, transformers_models

    found = []
    for library in libraries:
        names = (timm_models if library == "timm" else transformers_models).names()
        found += [
            Task(library, name, family) for name, family in names if sample is None or name in (*CI[library], *HEADS)
        ]
    return found


def heads(task: Task) -> list[str]:
    """Returns what a class of transformers is for: the auto mappings that it stands in."""
    from tests.coverage import transformers_models

    return transformers_models.tasks()[task.name][1] if task.library == "transformers" else []
