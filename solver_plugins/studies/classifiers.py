"""Studies of what stands at the end of a network of timm: on its frozen features, or finetuned as a whole."""

from abc import abstractmethod
from collections import OrderedDict
from typing import Any, TypeVar

from torch import nn

from solver_plugins.studies.comparison import accuracies, differences, search_tables
from solver_plugins.studies.controls import GAIN, Gains, put_before, untuned
from solver_plugins.studies.images import is_pretrained
from solver_plugins.studies.searched import SearchedConfig, SearchedStudy
from solver_plugins.studies.study import Cell, Context, Results, Table
from solver_plugins.studies.training import features_of
from solver_plugins.train.config import ModelSection
from solver_plugins.train.tensors import Part

C = TypeVar("C", bound=SearchedConfig)


class ClassifierStudy(SearchedStudy[C]):
    """Arms that differ in a network's classifier; with the same search for all of them."""

    group = "backbone"
    simple = (GAIN,)
    _features: dict[int, dict[str, Part]]

    @abstractmethod
    def section(self) -> ModelSection: ...

    @abstractmethod
    def frozen(self) -> bool:
        """Whether only classifiers are trained."""

    def same_for_all_seeds(self) -> bool:
        """Whether every seed reads the same features: those of given weights."""
        return is_pretrained(self.section())

    def prepare(self) -> None:
        super().prepare()
        self._features = {}
        self.compared()

    def _inputs(self, model: nn.Module, cell: Cell, context: Context) -> dict[str, Part]:
        parts = self._ready(model, context)
        if not self.frozen():
            return parts
        seed = 0 if self.same_for_all_seeds() else cell.seed
        if seed not in self._features:
            # Only one seed is kept: networks of other seeds may be others.
            self._features = {seed: {key: Part(features_of(model, part), part.labels) for key, part in parts.items()}}
        return self._features[seed]

    def _trained(self, model: Any) -> Any:
        return nn.Sequential(OrderedDict(classifier=model.get_classifier())) if self.frozen() else model

    def classifier_of(self, model: Any) -> Any:
        """Returns the classifier of what is trained."""
        return model.classifier if self.frozen() else model.get_classifier()

    def _convert(self, cell: Cell, model: nn.Module, parts: dict[str, Part], p: Any = None) -> dict[str, Any]:
        if cell.arm == GAIN:
            last = self.classifier_of(model)
            put_before(model, last, Gains(last.in_features))
        return {}

    def title(self) -> str:
        config, section = self.config, self.section()
        source = ", pretrained" if is_pretrained(section) else ""
        what = "frozen features" if self.frozen() else "the whole network is trained"
        return f"{section.spec}{source}; {what}; {config.data.train!r} of {super().title()}"

    def tables(self, results: Results) -> list[Table]:
        rows, (plain, *others), config = self.rows(results), self.arms(), self.config
        chosen = [row for row in rows if untuned(row.arm) in others]
        controls = [plain, *(arm for arm in config.controls if untuned(arm) not in others)]
        return [
            *accuracies(rows, plain, config, self.title(), self.measures),
            differences(rows, chosen, controls, config.seeds),
            *search_tables(rows, config),
        ]
