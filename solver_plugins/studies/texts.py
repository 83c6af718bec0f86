"""Texts in studies: tokens as tensors, and a classifier of transformers that reads them."""

from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.integrations.preprocessing import load_tokenizer
from solver_plugins.studies.images import ImageData, Images
from solver_plugins.train.config import DataSection, FinetuneConfig, ModelSection
from solver_plugins.train.data import Splits, load_splits
from solver_plugins.train.models import build_model
from solver_plugins.train.tensors import Part


class TokenClassifier(nn.Module):
    """A classifier of transformers that takes tokens and their mask as one tensor (N, 2, 1, T), and returns logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits."""
        # Numbers of tokens are exact as floats, as which the training loop hands them over.
        numbers, mask = tokens[:, :, 0].long().unbind(1)
        found: Tensor = self.model(input_ids=numbers, attention_mask=mask).logits
        return found


class Texts:
    """The splits of a data set of texts, for a model of transformers."""

    def __init__(self, data: ImageData, model: ModelSection):
        options = {key: getattr(data, key) for key in ("name", "config", "train", "text", "label")}
        self.data = DataSection.parse({**options, "eval": data.validation})
        self.model, self.splits = model, load_splits(self.data)
        tested = load_splits(DataSection.parse({**options, "eval": data.test})).eval
        tokenizer = load_tokenizer(model.spec.removeprefix("hf/"))
        splits, length = self.splits, data.max_length
        train, validation, test = (
            _part(split, splits, tokenizer, length) for split in (splits.train, splits.eval, tested)
        )
        self.images = Images(train, validation, test, len(splits.classes))

    def build(self) -> nn.Module:
        """Builds the model with its weights and a new classifier."""
        sections = {"model": self.model.options(), "data": self.data.options()}
        config = FinetuneConfig.parse({**sections, "solver": None, "output": "unused"})
        return TokenClassifier(build_model(config, self.splits))


def _part(found: Any, splits: Splits, tokenizer: Any, length: int) -> Part:
    made = tokenizer(
        list(found[splits.column]), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    tokens = torch.stack([made["input_ids"], made["attention_mask"]], 1)[:, :, None].float()
    read = splits.reader()
    return Part(tokens, torch.tensor([read(value) for value in splits.values(found)]))
