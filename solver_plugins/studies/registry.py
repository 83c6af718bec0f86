"""The registry of studies.

A third-party distribution adds one by an entry point of the group ``solver_plugins.studies``::

    [project.entry-points."solver_plugins.studies"]
    my-study = "my_package.my_module:MyStudy"
"""

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

from solver_plugins.errors import RegistrationError
from solver_plugins.registry import Entry, Registry
from solver_plugins.studies.base import Study


def _check_study(name: str, study: Any) -> None:
    label = getattr(study, "__qualname__", repr(study))
    if not (inspect.isclass(study) and issubclass(study, Study)):
        raise RegistrationError(f"A study is a class derived from solver_plugins.studies.Study; found {label}.")
    missing = [repr(one) for one in ("name", "Config", "reference") if not hasattr(study, one)]
    missing += [f"{one}()" for one in sorted(getattr(study, "__abstractmethods__", ()))]
    if missing:
        raise RegistrationError(f"A study needs name, Config, reference and methods; {label} has no {missing[0]}.")
    if study.name != name:
        raise RegistrationError(
            f"A study is registered under its own name; {label}.name is {study.name!r}, but it was to be registered "
            f"as {name!r}."
        )


STUDIES: Registry[type[Study[Any]]] = Registry("study", entry_point_group="solver_plugins.studies", check=_check_study)

S = TypeVar("S", bound=type)


def register_study(study: S) -> S:
    """Class decorator: registers a study under its ``name``; its docstring's first line becomes the description."""
    return STUDIES.register_class(study)


def list_studies(filter: str | Iterable[str] | None = None) -> list[str]:
    """Lists the registered studies; ``filter`` is a glob on the name or a tag."""
    return STUDIES.names(filter)


def study_info(name: str) -> Entry[type[Study[Any]]]:
    """Returns name, class, description, tags and origin of a study."""
    return STUDIES.info(name)
