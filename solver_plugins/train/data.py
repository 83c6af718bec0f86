"""The data of a run: finds columns, checks labels, transforms images, tokenises texts and makes batches."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from solver_plugins.errors import did_you_mean
from solver_plugins.train.config import DataSection, FinetuneConfig
from solver_plugins.train.errors import DataError
from solver_plugins.train.images import FILE_NAMES, check_images, files_of, opened
from solver_plugins.train.labels import Label, LabelReader, check_labels, names_of, problem_of, value_of, values_of
from solver_plugins.train.preparation import image_preparation, text_preparation
from solver_plugins.train.problems import PROBLEMS, SINGLE, Problem, ProblemType
from solver_plugins.train.randomness import seed_for, seeded
from solver_plugins.train.sources import load_split

_IMAGE_NAMES = ("image", "img", "pixel_values")
_LABEL_NAMES = ("label", "labels", "fine_label")
Batch = dict[str, Tensor]
"""Keyword arguments of the model's forward (or "image", its only positional one), and "labels"."""


@dataclass(frozen=True)
class Splits:
    """Both splits, as they are stored.

    Attributes:
        train: The training split.
        eval: The evaluation split.
        column: The column of images or texts.
        is_text: Whether they are texts.
        label: The column of labels, or several of them.
        classes: The names of the classes, in the order of their numbers; or those of the targets of a regression.
        problem_type: What is predicted.
        separator: What stands between the labels of a text.
    """

    train: Any
    eval: Any
    column: str
    is_text: bool
    label: Label
    classes: tuple[str, ...]
    problem_type: ProblemType = SINGLE
    separator: str | None = None

    @property
    def problem(self) -> Problem:
        """What is predicted."""
        return PROBLEMS[self.problem_type]

    def values(self, found: Any) -> list[Any]:
        """Returns the labels of a split as they are stored."""
        return values_of(found, self.label, self.separator)

    def reader(self) -> LabelReader:
        """Returns what turns a stored label into a class number or a row of numbers."""
        return LabelReader(self.problem_type, self.classes, self.label)

    def identity(self) -> dict[str, Any]:
        """Returns what identifies these examples: their number, their classes, and their labels in order."""
        both = [[str(one) for one in self.values(split)] for split in (self.train, self.eval)]
        labels = hashlib.sha256(json.dumps(both).encode()).hexdigest()
        return {"train": len(self.train), "eval": len(self.eval), "classes": list(self.classes), "labels": labels}

    def seen(self, found: Any) -> set[int]:
        """Returns the numbers of the classes that occur in a split; those of all targets of a regression."""
        if self.problem_type == "regression":
            return set(range(len(self.classes)))
        made = map(self.reader(), self.values(found))
        rows = ([one] if isinstance(one, int) else [place for place, hot in enumerate(one) if hot] for one in made)
        return {number for row in rows for number in row}

    def weights(self, given: str | list[float]) -> Tensor:
        """Returns a weight for each class: those given, or one over the share of the class; their mean is one.

        With several labels at once it is the weight of their positive examples: those given, or how many negative ones
        there are for each.
        """
        several = self.problem_type == "multi_label_classification"
        if isinstance(given, str):
            read = self.reader()
            targets = torch.tensor([read(value) for value in self.values(self.train)])
            counts = targets.sum(0) if several else torch.bincount(targets, minlength=len(self.classes))
            if not bool((counts > 0).all()):
                raise DataError("class_weights=balanced needs a training example of each class.")
            made = (len(targets) - counts.double()) / counts if several else 1 / counts.double()
        else:
            made = torch.tensor(given, dtype=torch.float64)
            if len(made) != len(self.classes) or not bool((made > 0).all()):
                raise DataError(f"Expected {len(self.classes)} class_weights above zero; found {given}.")
        return (made if several else made / made.mean()).float()

    def notes(self) -> list[str]:
        """Returns what a user should know about the examples before training."""
        extra = [self.classes[number] for number in sorted(self.seen(self.train) - self.seen(self.eval))]
        if not extra:
            return []
        return [
            f"nothing in the evaluated split is {', '.join(extra[:5])}{', ...' if len(extra) > 5 else ''}, so what is "
            "learnt of that is not measured"
        ]


def load_splits(config: DataSection) -> Splits:
    """Loads and checks both splits."""
    train = load_split(config, config.train)
    evaluation = load_split(config, config.eval) if isinstance(config.eval, str) else train
    column = config.text or _column(train, config.image, (*_IMAGE_NAMES, *FILE_NAMES), "image")
    if isinstance(config.label, list):
        label: Label = tuple(config.label)
    else:
        label = _column(train, config.label, _LABEL_NAMES, "label")
    both = ((repr(config.train), train), (config.eval_name, evaluation))
    for split, found in both:
        for name in (column, *(label if isinstance(label, tuple) else (label,))):
            if name not in found.column_names:
                raise DataError(
                    f"The split {split} of {config.name!r} has no column {name!r}."
                    f"{did_you_mean(name, found.column_names)}"
                )
    if config.text is None:
        train, evaluation = (opened(found, column, config.name) for _, found in both)
    problem = problem_of(train, label, config)
    values = values_of(train, label, config.separator)
    classes = names_of(train, label, problem, values)
    if len(classes) < 2 and problem == SINGLE:
        raise DataError(
            f"Expected at least two classes to tell apart; found {classes[0]!r} alone in {label!r} of {config.name!r}. "
            "A folder of images has a folder for each class."
        )
    whole = Splits(train, evaluation, column, config.text is not None, label, classes, problem, config.separator)
    expected = {
        SINGLE: f"labels of the {len(classes)} classes of the training split",
        "multi_label_classification": f"lists of the {len(classes)} labels of the training split",
    }.get(problem, "a finite number for each target")
    for split, found in ((repr(config.train), train), (config.eval_name, evaluation)):
        check_labels(whole.values(found), whole.reader(), expected, f"the split {split} of {config.name!r}")
    if not isinstance(config.eval, str):
        train, evaluation = _divided(train, values if problem == SINGLE else [0] * len(train), config.eval)
    made = replace(whole, train=train, eval=evaluation)
    _check_classes(made, config)
    if config.check and not made.is_text:
        check_images([file for found in (train, evaluation) for file in files_of(found, column)])
    return made


def _divided(found: Any, values: Sequence[Any], share: float) -> tuple[Any, Any]:
    """Divides a split in two, with the same share of each value; always in the same way, whatever the run's seed."""
    generator = torch.Generator().manual_seed(seed_for("division"))
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    chosen: list[int] = []
    for own in places.values():
        order = torch.randperm(len(own), generator=generator).tolist()
        chosen += [own[number] for number in order[: max(1, round(share * len(own)))]]
    if len(chosen) == len(found):
        most = max(map(len, places.values()))
        told = "each class has a single example" if most == 1 else f"no class has more than {most} examples"
        raise DataError(f"data.eval={share:g} leaves nothing to train on: {told}.")
    kept = set(chosen)
    return found.select([place for place in range(len(found)) if place not in kept]), found.select(sorted(chosen))


def _column(found: Any, given: str | None, names: tuple[str, ...], kind: str) -> str:
    if given is not None:
        return given
    hit = next((name for name in names if name in found.column_names), None)
    if hit is None:
        raise DataError(
            f"Expected a column {' or '.join(names)}; found {', '.join(found.column_names)}. Name it with data.{kind}="
            + (" or, for texts, data.text=." if kind == "image" else ".")
        )
    return hit


def _check_classes(splits: Splits, config: DataSection) -> None:
    """Checks that a number means the same class in both splits, and that every evaluated class is trained."""
    if splits.problem_type == "regression" or isinstance(splits.label, tuple):
        return
    feature = splits.eval.features[splits.label]
    names = getattr(getattr(feature, "feature", feature), "names", None)
    if names and tuple(names) != splits.classes:
        raise DataError(
            f"The splits {config.train!r} and {config.eval_name} of {config.name!r} number their classes differently: "
            f"{', '.join(splits.classes[:5])}, ... and {', '.join(names[:5])}, .... Cast both to one ClassLabel."
        )
    trained, evaluated = splits.seen(splits.train), splits.seen(splits.eval)
    lacking = [splits.classes[number] for number in sorted(evaluated - trained)]
    if not lacking or splits.problem_type != SINGLE or ("[" in config.train and trained & evaluated):
        # A small slice may miss a class, and any split a rare label.
        return
    sliced = (
        " A folder of images is sorted by class, and so are its slices: make train/ and test/ instead."
        if "[" in config.train
        else " Add some, or remove these classes."
    )
    raise DataError(
        f"Expected training examples of all classes that are evaluated; the split {config.train!r} of {config.name!r} "
        f"has none of {', '.join(lacking[:5])}.{sliced}"
    )


class Examples(Dataset[dict[str, Any]]):
    """The examples of one split; an index is a pair of epoch and number.

    Random augmentation depends only on the seed and that pair, not on the process that reads an example or on what
    was read before. So a resumed run and a run of several processes see the same images.
    """

    def __init__(self, found: Any, splits: Splits, prepare: Callable[[Any], Any], seed: int, name: str):
        self.found, self.column, self.label, self.separator = found, splits.column, splits.label, splits.separator
        self.read = splits.reader()
        self.prepare, self.seed, self.name = prepare, seed, name
        self.key = "text" if splits.is_text else "image"

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        epoch, number = place
        try:
            row = self.found[number]
            with seeded(self.seed, "augmentation", epoch, number):
                made = self.prepare(row[self.column])
        except Exception as error:
            file = next(iter(files_of(self.found.select([number]), self.column)), None)
            raise DataError(
                f"Cannot read {self.column!r} of example {number} of {self.name}"
                f"{f' ({file})' if file else ''}: {type(error).__name__}: {error}. Repair or remove that example."
            ) from error
        return {self.key: made, "labels": self.read(value_of(row, self.label, self.separator))}


class Order(Sampler[Any]):
    """The order of one epoch: a permutation that depends only on the seed and the epoch.

    Args:
        count: How many examples there are.
        batch_size: Examples of one optimiser step.
        seed: The run's seed.
        rest: Whether leftover examples make a smaller step; by default an epoch leaves them out.

    Attributes:
        steps: How many steps an epoch has.
        epoch: The epoch that comes next.
        skip: How many of its examples are already done.
    """

    def __init__(self, count: int, batch_size: int, seed: int, rest: bool = False):
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.used = count if rest else count // batch_size * batch_size
        self.steps = -(-self.used // batch_size)
        self.epoch = self.skip = 0

    def numbers(self, epoch: int) -> Tensor:
        """Returns the numbers of the examples of an epoch, in their order."""
        generator = torch.Generator().manual_seed(seed_for(self.seed, "order", epoch))
        return torch.randperm(self.count, generator=generator)[: self.used]

    def __len__(self) -> int:
        return self.used - self.skip

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.epoch, number) for number in self.numbers(self.epoch)[self.skip :].tolist()])


@dataclass(frozen=True)
class Loaders:
    """What a run reads from: its training batches, epoch by epoch, and those to evaluate on.

    Attributes:
        train: Batches of one process and pass, prepared or not.
        order: The order of the training examples.
        eval: Batches of one process, prepared or not.
    """

    train: Any
    order: Order
    eval: Any

    @property
    def steps(self) -> int:
        """How many optimiser steps an epoch has."""
        return self.order.steps

    @property
    def left_out(self) -> int:
        """How many examples each epoch leaves out, as they do not fill a batch."""
        return self.order.count - self.order.used

    def start(self, epoch: int, step: int) -> Iterable[Batch]:
        """Returns the training batches of an epoch that are left after this many steps of it."""
        self.order.epoch, self.order.skip = epoch, step * self.order.batch_size
        batches: Iterable[Batch] = self.train if step < self.steps else ()
        return batches


def example_of(loader: Any) -> Batch:
    """Returns a batch of a loader's first two examples, for a pass that is only recorded or inspected."""
    examples = loader.dataset
    made: Batch = loader.collate_fn([examples[(0, 0)], examples[(0, 1 % len(examples))]])
    return made


def make_loaders(config: FinetuneConfig, splits: Splits, model: Any, processes: int) -> Loaders:
    """Makes the loaders for a model."""
    parts = processes * config.accumulation
    if config.batch_size % parts:
        raise DataError(
            f"Expected a batch_size that {processes} processes and {config.accumulation} accumulated passes share "
            f"evenly, a multiple of {parts}; found {config.batch_size}."
        )
    if len(splits.train) < config.batch_size:
        raise DataError(
            f"Expected at least one batch of {config.batch_size} to train on; found {len(splits.train)} examples. Set "
            "batch_size to at most that."
        )
    prepare = text_preparation if splits.is_text else image_preparation
    prepare_train, prepare_eval, collate = prepare(config, model)
    train = Examples(splits.train, splits, prepare_train, config.seed, f"the split {config.data.train!r}")
    evaluation = Examples(splits.eval, splits, prepare_eval, config.seed, f"the split {config.data.eval_name}")
    order = Order(len(train), config.batch_size, config.seed)

    def loader(examples: Examples, sampler: Any, size: int) -> DataLoader[Any]:
        # Making an iterator draws a number; its own generator keeps it from changing what solvers sample.
        own = torch.Generator().manual_seed(config.seed)
        workers = config.data.workers
        return DataLoader(
            examples, size, sampler=sampler, collate_fn=collate, num_workers=workers, generator=own,
            persistent_workers=workers > 0, pin_memory=torch.accelerator.is_available(),
        )  # fmt: skip

    return Loaders(
        loader(train, order, config.batch_size // parts),
        order,
        loader(evaluation, [(0, one) for one in range(len(evaluation))], max(1, config.batch_size // processes)),
    )
