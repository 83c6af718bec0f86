"""The papers' small networks as timm models.

LeNet and AlexNet for CIFAR of "Deep Layers as Stochastic Solvers" (section 4), and the convolutional equilibrium of
"Optimization Induced Equilibrium Networks" (section 5.2).

The first paper gives no widths. LeNet has those of LeCun et al. with ReLU and max-pooling; AlexNet those that are usual
for its one-column form, adapted to 32x32 images as the paper's footnote 1 says. There are no pretrained weights.
"""

from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from solver_plugins.equilibrium import OptEqLayer
from solver_plugins.equilibrium.head import DeepOptEqConfig
from solver_plugins.errors import OptionError, ShapeError, did_you_mean

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)
DROPOUTS = {"d-d": (True, True), "d-nd": (True, False), "nd-d": (False, True), "nd-nd": (False, False)}
"""Whether a dropout stands before the penultimate and before the last fully connected layer with a ReLU (Table 2)."""


class _Classified(nn.Module):
    """A model with the methods that timm calls: features, a head, and a classifier that can be replaced or left out."""

    fc: nn.Module

    def __init__(self, num_features: int, num_classes: int, in_chans: int, drop_rate: float) -> None:
        super().__init__()
        if not 0 <= drop_rate < 1:
            raise OptionError(f"Expected drop_rate in [0, 1); found {drop_rate!r}.")
        self.num_features = self.head_hidden_size = num_features
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.grad_checkpointing = False
        # As timm's models say which images they take; timm.create_model puts its own in the place of this one.
        self.default_cfg = {"input_size": (in_chans, 32, 32)}

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns the logits, or with ``pre_logits`` the features that the classifier reads."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Makes a new classifier; with no classes, the model returns features."""
        if global_pool:
            raise OptionError(f"{type(self).__name__} has no global pooling; found global_pool={global_pool!r}.")
        weight = next(self.parameters())
        self.num_classes = num_classes
        self.fc = _classifier(self.num_features, num_classes, {"device": weight.device, "dtype": weight.dtype})

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable:
            raise OptionError(f"{type(self).__name__} has no gradient checkpointing.")

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay. There are none: the paper decays all of them."""
        return set()


class LeNet(_Classified):
    """LeNet for 32x32 images, with dropouts before its fully connected layers.

    It has two stages of 5x5 convolution, ReLU and 2x2 max-pooling, two fully connected layers with ReLU, and a
    classifier. ``dropout`` says which of the two layers follow a dropout, a key of :data:`DROPOUTS`: ``d-d``, ``d-nd``
    and ``nd-d`` are the columns of the paper's Table 2. ``channels`` and ``features`` are the widths of the
    convolutions and of the fully connected layers.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.5,
        dropout: str = "d-d",
        channels: tuple[int, int] = (6, 16),
        features: tuple[int, int] = (120, 84),
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dropout not in DROPOUTS:
            raise OptionError(f"LeNet has no dropout {dropout!r}.{did_you_mean(str(dropout), DROPOUTS)}")
        super().__init__(features[1], num_classes, in_chans, drop_rate)
        made = {"device": device, "dtype": dtype}
        penultimate, last = DROPOUTS[dropout]
        self.conv1 = nn.Conv2d(in_chans, channels[0], 5, **made)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, **made)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.drop1: nn.Module = nn.Dropout(drop_rate) if penultimate else nn.Identity()
        self.fc1 = nn.Linear(25 * channels[1], features[0], **made)
        self.drop2: nn.Module = nn.Dropout(drop_rate) if last else nn.Identity()
        self.fc2 = nn.Linear(features[0], features[1], **made)
        self.fc = _classifier(features[1], num_classes, made)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        return self.pool(self.relu(self.conv2(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if x.shape[-2:] != (5, 5):
            raise ShapeError(f"LeNet takes 32x32 images, of which 5x5 reach its head; found {tuple(x.shape[-2:])}.")
        x = self.relu(self.fc1(self.drop1(x.flatten(1))))
        x = self.relu(self.fc2(self.drop2(x)))
        return x if pre_logits else self.fc(x)


class CifarAlexNet(_Classified):
    """AlexNet for 32x32 images, with one fully connected layer; the paper mentions no dropout before the classifier.

    The first convolution is padded by 5, and pooling is over 2x2 pixels. Table 3 of the paper replaces ``conv1`` by
    Prox-GD.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(256, num_classes, in_chans, drop_rate)
        made = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_chans, 64, 11, stride=4, padding=5, **made)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2, **made)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1, **made)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1, **made)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1, **made)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.head_drop = nn.Dropout(drop_rate)
        self.fc = _classifier(256, num_classes, made)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.conv3(x))
        x = self.relu(self.conv4(x))
        return self.pool(self.relu(self.conv5(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if x.shape[-2:] != (1, 1):
            raise ShapeError(
                f"This AlexNet takes 32x32 images, of which 1x1 reaches its head; found {tuple(x.shape[-2:])}."
            )
        x = self.head_drop(x.flatten(1))
        return x if pre_logits else self.fc(x)


class OptEqNet(_Classified):
    """A convolutional equilibrium (Table 1b): one convolution, five layers in equilibrium, pooling, a classifier.

    ``forward_features`` returns the equilibrium: feature maps of the input's resolution (over ``stride``), which a
    segmentation head can read. The paper gives the hidden channels of the five 3x3 convolutions, a single convolution
    as feature extractor, and 162k parameters. It does not give the widths of the state and of the extractor; 48 and 96,
    with 1x1 convolutions as ``U``, come close to that number.

    Further options are the fields of :class:`~solver_plugins.equilibrium.head.DeepOptEqConfig`: ``alpha``, ``solver``,
    ``iters``, ``gradient``, ``regularizer``, ``constraint``, and others. The paper has the solvers "sam" and
    "fixed_point", 20 iterations, ``gradient="unrolled"``, and bounds ``|W|`` by its initialisation only
    (``constraint="none"``).
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        state: int = 48,
        extracted: int = 96,
        hidden: tuple[int, ...] = (16, 32, 64, 64, 128),
        stride: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(state, num_classes, in_chans, drop_rate)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        config = DeepOptEqConfig.parse(options, owner="OptEqNet")
        own = config.layer_options()
        self.conv1 = nn.Conv2d(in_chans, extracted, 3, stride, 1, bias=False, **made)
        self.bn1 = nn.BatchNorm2d(extracted, **made)
        self.equilibrium = config.equilibrium(
            OptEqLayer.conv2d(state, extracted, width, inject_size=1, **own, **made) for width in hidden
        )
        self.head_drop = nn.Dropout(drop_rate)
        self.fc = _classifier(state, num_classes, made)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.equilibrium(self.bn1(self.conv1(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(x.mean((2, 3)))
        return x if pre_logits else self.fc(x)


def _classifier(features: int, classes: int, made: dict[str, Any]) -> nn.Module:
    return nn.Linear(features, classes, **made) if classes > 0 else nn.Identity()


_CONFIG: dict[str, Any] = {
    "url": "",
    "num_classes": 10,
    "input_size": (3, 32, 32),
    "pool_size": None,
    "crop_pct": 1.0,
    "interpolation": "bilinear",
    "mean": CIFAR_MEAN,
    "std": CIFAR_STD,
    "first_conv": "conv1",
    "classifier": "fc",
    "license": "apache-2.0",
}
default_cfgs = generate_default_cfgs(
    {f"{name}.untrained": dict(_CONFIG) for name in ("solver_lenet", "solver_alexnet", "solver_opteq")}
)


@register_model
def solver_lenet(pretrained: bool = False, **kwargs: Any) -> LeNet:
    """LeNet of the paper; ``dropout="d-d"``, ``"d-nd"`` or ``"nd-d"`` says which layers follow a dropout."""
    return _build(LeNet, "solver_lenet", pretrained, kwargs)


@register_model
def solver_alexnet(pretrained: bool = False, **kwargs: Any) -> CifarAlexNet:
    """AlexNet of the paper, for 32x32 images."""
    return _build(CifarAlexNet, "solver_alexnet", pretrained, kwargs)


@register_model
def solver_opteq(pretrained: bool = False, **kwargs: Any) -> OptEqNet:
    """Convolutional equilibrium; ``solver``, ``gradient`` and ``regularizer`` choose the paper's variants."""
    return _build(OptEqNet, "solver_opteq", pretrained, kwargs)


def _build(made: type[_Classified], name: str, pretrained: bool, arguments: dict[str, Any]) -> Any:
    if arguments.pop("features_only", False):
        # timm would string the convolutions together without the ReLU and the pooling, which they share.
        raise OptionError(f"{name} does not support features_only; use forward_features.")
    return build_model_with_cfg(made, name, pretrained, **arguments)
