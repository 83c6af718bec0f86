"""Labels as data sets hold them: which problem they pose, what the classes or targets are called, and their numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from solver_plugins.train.config import DataSection
from solver_plugins.train.errors import DataError
from solver_plugins.train.problems import ProblemType

Label = str | tuple[str, ...]
"""The column of labels, or several of them."""


def values_of(found: Any, label: Label, separator: str | None = None) -> list[Any]:
    """Returns the labels of all examples, as they are stored."""
    if isinstance(label, tuple):
        return list(zip(*(found[name] for name in label), strict=True))
    return [one if separator is None else split_text(one, separator) for one in found[label]]


def value_of(row: dict[str, Any], label: Label, separator: str | None = None) -> Any:
    """Returns the label of one example, as it is stored."""
    if isinstance(label, tuple):
        return tuple(row[name] for name in label)
    return row[label] if separator is None else split_text(row[label], separator)


def split_text(value: Any, separator: str) -> Any:
    """Returns the labels in a text, such as 'cat dog'; none in an empty one."""
    if value is None:
        return []
    return [part.strip() for part in value.split(separator) if part.strip()] if isinstance(value, str) else value


def problem_of(found: Any, label: Label, config: DataSection) -> ProblemType:
    """Returns the problem that the labels pose: the given one, or that of their kind."""
    if config.problem_type is not None:
        return config.problem_type
    if config.separator is not None:
        return "multi_label_classification"
    if isinstance(label, tuple):
        kinds = {_kind(found.features[name]) for name in label}
        if kinds == {"number"}:
            return "regression"
        if kinds <= {"whole"} and all(set(found[name]) <= {0, 1} for name in label):
            return "multi_label_classification"
        raise DataError(
            f"Expected the columns {', '.join(label)} to hold 0 and 1 each (labels), or numbers with a fraction "
            "(targets); found others. Say what they are with data.problem_type."
        )
    feature = found.features[label]
    inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else None)
    if inner is not None:
        numbers = _kind(inner) == "number"
        hot = numbers and all(value in (0, 1) for row in found[label] for value in row or ())
        return "regression" if numbers and not hot else "multi_label_classification"
    return "regression" if _kind(feature) == "number" else "single_label_classification"


def _kind(feature: Any) -> str:
    dtype = str(getattr(feature, "dtype", ""))
    if dtype.startswith(("float", "double", "decimal")):
        return "number"
    return "whole" if dtype.startswith(("int", "uint", "bool")) else "other"


def names_of(found: Any, label: Label, problem: ProblemType, values: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of the classes, in the order of their numbers, or those of the targets."""
    if isinstance(label, tuple):
        return label
    if problem == "regression":
        width = {len(value) if isinstance(value, (list, tuple)) else 1 for value in values}
        if len(width) > 1:
            raise DataError(f"Expected as many numbers in {label!r} of every example; found {sorted(width)[:5]}.")
        count = width.pop()
        return (label,) if count == 1 else tuple(f"{label}[{place}]" for place in range(count))
    several = problem == "multi_label_classification"
    if several and any(not isinstance(value, (list, tuple)) for value in values):
        raise DataError(
            f"Expected lists of labels in {label!r} for {problem}; found {values[0]!r}. A text that names several "
            "is read with data.separator, columns of 0 and 1 with data.label=[...]."
        )
    feature = found.features[label]
    inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else None)
    names = getattr(feature if inner is None else inner, "names", None)
    if names:
        return tuple(names)
    if several and any(map(_is_hot, values)):
        return tuple(str(place) for place in range(max(map(len, values))))
    kinds = list(dict.fromkeys(one for value in values for one in (value if several else [value])))
    if kinds and all(isinstance(one, str) for one in kinds):
        return tuple(sorted(kinds))
    if kinds and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in kinds):
        return tuple(str(number) for number in range(max(kinds) + 1))
    raise DataError(
        f"Expected labels that are class numbers from 0 on, or names; found {sorted(map(repr, kinds))[:5]} in "
        f"{label!r}."
    )


class LabelReader:
    """Turns a stored label into a class number, or into a row of numbers; it can be sent to workers."""

    def __init__(self, problem: ProblemType, names: tuple[str, ...], label: Label):
        self.names, self.columns = names, isinstance(label, tuple)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.problem = problem

    def __call__(self, value: Any) -> int | list[float]:
        """Returns the target; raises ValueError, with what is wrong, for a label that does not fit."""
        if self.problem == "single_label_classification":
            return self._number(value)
        if self.problem == "regression" or self.columns or _is_hot(value):
            made = self._row(value)
            if self.problem != "regression" and not {*made} <= {0.0, 1.0}:
                raise ValueError(f"{next(one for one in made if one not in (0, 1))!r} in place of 0 or 1")
            return made
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{value!r} in place of a list")
        row = [0.0] * len(self.names)
        for one in value:
            row[self._number(one)] = 1.0
        return row

    def _number(self, value: Any) -> int:
        number = self.numbers.get(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.names):
            raise ValueError(f"{value!r}")
        return number

    def _row(self, value: Any) -> list[float]:
        made = list(value) if isinstance(value, (list, tuple)) else [value]
        for one in made:
            if not isinstance(one, (int, float)) or not math.isfinite(one):
                raise ValueError(f"{one!r}")
        if len(made) != len(self.names):
            raise ValueError(f"{len(made)} numbers in place of {len(self.names)}")
        return [float(one) for one in made]


def _is_hot(value: Any) -> bool:
    """Whether a list has a number for each class in place of the classes that are there."""
    return isinstance(value, (list, tuple)) and any(isinstance(one, (float, bool)) for one in value)


def check_labels(values: Sequence[Any], read: Callable[[Any], Any], what: str, where: str) -> None:
    """Reads every label once; DataError names those that do not fit."""
    wrong: dict[str, int] = {}
    for place, value in enumerate(values):
        try:
            read(value)
        except ValueError as error:
            wrong.setdefault(str(error), place)
    if wrong:
        told = ", ".join(f"{text} (example {place})" for text, place in sorted(wrong.items())[:5])
        raise DataError(f"Expected {what}; found {told} in {where}.")
