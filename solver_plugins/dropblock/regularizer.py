"""Dropout without sampling: the exact average effect of structured dropout before the last layer on the loss.

regularizer = StructuredDropoutRegularizer(model, "dropblock", theta=0.9, block_size=4)
loss = F.mse_loss(model(x), y) + regularizer()
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from solver_plugins.dropblock.classifier import AtClassifier
from solver_plugins.dropblock.errors import RegularizerError
from solver_plugins.dropblock.schemes import Sampler, Scheme
from solver_plugins.errors import OptionError, ShapeError

Loss = Literal["squared", "cross_entropy_second_order"]
Reduction = Literal["mean", "batchmean", "sum"]


class StructuredDropoutRegularizer(AtClassifier):
    """Computes what dropping units before the last layer would add to the loss on average.

    For the squared loss the value is exact (Lemma 3.1): the sum of the variances of the outputs. Cross-entropy has no
    closed form; ``loss="cross_entropy_second_order"`` is the second-order term
    ``tr((diag(p) - p p^T) Cov(logits))/2`` of the expected loss around the undropped logits, with ``p`` their softmax.

    Each forward pass in training mode computes the value, and a call returns it once. Like the loss it is a mean over
    samples. So it is right under DDP (each process adds its own), with gradient accumulation (divide it together with
    the loss), under autocast (it is computed in float32) and for sharded weights (which are whole while the layer
    runs). If the model itself has dropout before its last layer, set its rate to zero.

    Args:
        model: The classifier; see :func:`find_classifier`. Make the regulariser before the model is compiled.
        scheme: "dropout", "dropblock", "overlapping", a :class:`Scheme`, or a sampler (whose characteristic matrix is
            estimated once).
        theta: The retain probability of a named scheme.
        block_size: The block size of a named scheme.
        loss: The loss that the value is added to.
        reduction: The reduction of that loss: "mean" over samples, and for the squared loss also over outputs
            (``F.mse_loss``, ``F.cross_entropy``); "batchmean" over samples only; or "sum".
        classifier: The last layer or its name, if it is not found automatically.

    Raises:
        ClassifierError: If the last layer is not found.
        BlockSizeError: If blocks of a grid do not divide its width.
        UnknownNameError: If the scheme is unknown.
        OptionError: If another option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme | Sampler,
        theta: float | None = None,
        block_size: int | None = None,
        *,
        loss: Loss = "squared",
        reduction: Reduction = "mean",
        classifier: str | nn.Module | None = None,
    ):
        for option, found, known, more in (
            ("loss", loss, get_args(Loss), " The value is exact for the squared loss only."),
            ("reduction", reduction, get_args(Reduction), ""),
        ):
            if found not in known:
                expected = ", ".join(map(repr, known))
                raise OptionError(f"Expected {option} to be one of {expected}; found {found!r}.{more}")
        super().__init__(model, scheme, theta, block_size, classifier)
        self.loss = loss
        self.reduction = reduction
        self._rows: Tensor | None = None
        self._passes = 0
        self._handle = self.classifier.register_forward_hook(self._look)

    def __call__(self, where: Tensor | None = None) -> Tensor:
        """Returns the value of the last forward pass in training mode, and forgets it.

        Args:
            where: The rows that the loss counts: a boolean tensor with the shape of the layer's input without its last
                dimension. It is only needed for sequences ``(batch, tokens, d)``: ``labels != -100`` for one label per
                token, or only the place of the last token for a model that pools its logits.

        Raises:
            RegularizerError: If there was no forward pass in training mode since the last call, or more than one.
            ShapeError: If the layer has sequences as inputs and ``where`` is missing.
        """
        rows, passes = self._rows, self._passes
        self.reset()
        if rows is None:
            raise RegularizerError(
                f"Expected a forward pass in training mode, through {self.name!r}, before each call of the "
                "regulariser; there was none since the last one."
            )
        if passes > 1:
            raise RegularizerError(
                f"The model ran {passes} times in training mode since the regulariser was last called: add it to the "
                "loss after each pass, or call reset() to leave passes out."
            )
        if where is None:
            if rows.ndim > 1:
                raise ShapeError(
                    f"{self.name!r} saw sequences, of shape {(*rows.shape, self.classifier.in_features)}: say with "
                    f"where= which of the {tuple(rows.shape)} rows the loss counts (torch.ones for all of them)."
                )
        elif where.shape != rows.shape:
            raise ShapeError(f"Expected where= of shape {tuple(rows.shape)}; found {tuple(where.shape)}.")
        counted = rows.numel() if where is None else where.sum().clamp(min=1)
        total = rows.sum() if where is None else (rows * where.to(rows)).sum()
        if self.reduction == "sum":
            return total
        if self.reduction == "mean" and self.loss == "squared":
            counted = counted * self.classifier.out_features
        return total / counted

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape of the layer's rows in the last pass, ``(batch,)`` or ``(batch, tokens)``; None without a pass."""
        return None if self._rows is None else tuple(self._rows.shape)

    def reset(self) -> None:
        """Forgets the passes since the last call, so that the next call does not count them."""
        self._rows, self._passes = None, 0

    def remove(self) -> None:
        """Takes the hooks off the model."""
        super().remove()
        self.reset()

    def __repr__(self) -> str:
        return f"StructuredDropoutRegularizer({self.name!r}, {self.scheme}, loss={self.loss!r})"

    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        features, logits, weight = args[0], output, module.weight
        assert isinstance(weight, Tensor)
        with torch.autocast(features.device.type, enabled=False):
            wide = torch.promote_types(torch.promote_types(features.dtype, weight.dtype), torch.float32)
            features, weight = features.to(wide), weight.to(wide)
            if self.loss == "squared":
                rows = self.scheme.variance(weight, features)
            else:
                probabilities = logits.to(wide).softmax(-1)
                rows = self.scheme.weighted_variance(weight, features, probabilities) / 2
        # Gradient checkpointing repeats the whole pass inside backward, after its value was returned.
        if not _in_backward():
            self._rows, self._passes = rows, self._passes + 1


def _in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
