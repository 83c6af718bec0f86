"""What a config can add to training besides solver blocks: implicit weight steps and a regulariser."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from solver_plugins.dropblock import ClassifierDropout, StructuredDropoutRegularizer
from solver_plugins.proxprop import ProxProp
from solver_plugins.train.config import ProxPropSection, RegularizerSection
from solver_plugins.train.data import Batch


class Additions:
    """Implicit weight steps and a regulariser, put on a model and its optimiser by :meth:`attach`.

    Neither Parameters nor state dicts change, so exports stay plain.
    """

    def __init__(self, proxprop: ProxPropSection | None = None, regularizer: RegularizerSection | None = None):
        self.sections = (proxprop, regularizer)
        self.regularizer: StructuredDropoutRegularizer | None = None
        self.dropout: ClassifierDropout | None = None
        self.proxprop: ProxProp | None = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Puts the additions on a model and its optimiser, prepared or not.

        Args:
            model: The unwrapped model. Attach after sharding, which replaces Parameters.
            optimizer: Its optimiser.
        """
        proxprop, regularizer = self.sections
        if regularizer is not None:
            self._regularize(regularizer, model)
        if proxprop is not None:
            self._precondition(proxprop, model, optimizer)

    def _regularize(self, section: RegularizerSection, model: nn.Module) -> None:
        options = (section.scheme, section.theta, section.block_size)
        if section.how == "sampled":
            self.dropout = ClassifierDropout(model, *options, classifier=section.classifier)
        else:
            self.regularizer = StructuredDropoutRegularizer(
                model, *options, loss="cross_entropy_second_order", classifier=section.classifier
            )

    def _precondition(self, section: ProxPropSection, model: nn.Module, optimizer: Optimizer) -> None:
        made = ProxProp(model, **section.options())
        try:
            self.proxprop = made.attach(optimizer)
        except Exception:
            made.detach()
            raise

    def penalty(self, batch: Batch) -> Tensor | None:
        """Returns the term to add to the loss of the last forward pass; None if there is none."""
        if self.regularizer is None:
            return None
        rows = self.regularizer.row_shape
        if rows is not None and len(rows) == 2 and "attention_mask" in batch:
            # The classifier runs on every token, and transformers keeps the logits of the last one.
            return self.regularizer(_last_tokens(batch["attention_mask"]))
        return self.regularizer()

    def describe(self) -> list[str]:
        """Returns one sentence for each addition, for the dry run."""
        lines = []
        if self.proxprop is not None:
            lines.append(f"proxprop: {self.proxprop.mode}, tau_theta {self.proxprop.tau_theta:g}, on "
                         f"{len(self.proxprop.layers)} layers")  # fmt: skip
        if self.regularizer is not None:
            lines.append(f"regularizer: mean effect of {self.regularizer.scheme} before {self.regularizer.name!r}")
        if self.dropout is not None:
            lines.append(f"regularizer: {self.dropout.scheme}, sampled before {self.dropout.name!r}")
        return lines

    def remove(self) -> None:
        """Takes all additions off again."""
        for one in (self.regularizer, self.dropout):
            if one is not None:
                one.remove()
        if self.proxprop is not None:
            self.proxprop.detach()


def _last_tokens(mask: Tensor) -> Tensor:
    """Marks the last real token of each text, whichever side is padded."""
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (places * mask).argmax(-1, keepdim=True)
    return places == last
