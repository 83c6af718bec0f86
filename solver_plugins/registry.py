"""One generic registry, and the registry of solvers built on it.

A third-party distribution adds a solver by an entry point of the group ``solver_plugins.solvers``::

    [project.entry-points."solver_plugins.solvers"]
    my_solver = "my_package.my_module:MySolver"

Entry points are loaded at the first look-up, so ``import solver_plugins`` stays cheap and a broken plugin cannot break
it. A plugin that cannot be loaded causes one warning, and the error for its missing name repeats the reason.
"""

import fnmatch
import importlib
import importlib.metadata
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from solver_plugins.errors import (
    DuplicateNameError,
    OptionError,
    PluginWarning,
    RegistrationError,
    UnknownNameError,
    did_you_mean,
)

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What a registry knows about one name: the object, one line about it, words to filter by, and its module."""

    name: str
    target: T
    description: str
    tags: frozenset[str]
    source: str


class Registry(Generic[T]):
    """Maps names to objects of one kind; a duplicate raises, and a miss lists similar names.

    Args:
        kind: What is registered, as a noun for messages ("solver").
        entry_point_group: Entry points of this group are added at the first look-up.
        check: Called with the name and the object before each registration; raises if the object is not of this kind.
    """

    def __init__(
        self,
        kind: str,
        entry_point_group: str | None = None,
        check: Callable[[str, Any], None] | None = None,
    ):
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._check = check
        self._entries: dict[str, Entry[T]] = {}
        self._failures: dict[str, str] = {}
        self._discovered = entry_point_group is None

    def register(self, name: str, target: T, *, description: str | None = None, tags: Iterable[str] = ()) -> T:
        """Adds ``target`` under ``name``, and returns it.

        The description is the first line of its docstring by default. Registering the same object again does nothing,
        so a module may be imported twice. DuplicateNameError if the name belongs to another object, RegistrationError
        if this one is not of the registry's kind.
        """
        if self._check is not None:
            self._check(name, target)
        if not isinstance(name, str) or not name:
            raise RegistrationError(f"The name of a {self.kind} has to be a string, and not empty; found {name!r}.")
        # A string is an iterable of strings: its letters would become tags.
        if isinstance(tags, str):
            raise RegistrationError(f"{self.kind} {name!r}: tags have to be a list of strings; found {tags!r}.")
        known = self._entries.get(name)
        if known is not None:
            if known.target is target:
                return target
            raise DuplicateNameError(
                f"{self.kind} {name!r} is registered already, by {known.source}; "
                f"give the new one from {_source_of(target)} another name."
            )
        if description is None:
            # Not inspect.getdoc, which describes a class without a docstring by its base class.
            description = inspect.cleandoc(target.__doc__ or "").partition("\n")[0]
        self._entries[name] = Entry(name, target, description, frozenset(tags), _source_of(target))
        return target

    def register_class(self, target: C) -> C:
        """Adds a class under its ``name`` with its ``tags``; a class decorator that raises like :meth:`register`."""
        found: Any = target
        # The default lets a class without a name reach the check, which lists everything that is missing.
        self.register(getattr(found, "name", ""), found, tags=getattr(found, "tags", ()))
        return target

    def names(self, filter: str | Iterable[str] | None = None) -> list[str]:
        """Returns the names in alphabetical order, all of them or those that match.

        ``filter`` is a glob on the name ("*gd"), a tag ("deterministic"), or several of these: a name is listed if any
        of them fits. As in timm, a pattern that fits nothing gives an empty list.
        """
        self._discover()
        if filter is None:
            return sorted(self._entries)
        patterns = [filter] if isinstance(filter, str) else list(filter)
        return sorted(
            name
            for name, entry in self._entries.items()
            if any(fnmatch.fnmatchcase(name, pattern) or pattern in entry.tags for pattern in patterns)
        )

    def info(self, name: str) -> Entry[T]:
        """Returns the entry of ``name``; UnknownNameError lists similar names and all options."""
        self._discover()
        entry = self._entries.get(name) if isinstance(name, str) else None
        if entry is None:
            failure = self._failures.get(name) if isinstance(name, str) else None
            failed = f" A plugin offers it but failed to load: {failure}." if failure is not None else ""
            raise UnknownNameError(f"Unknown {self.kind} {name!r}.{failed}{did_you_mean(str(name), self._entries)}")
        return entry

    def get(self, name: str) -> T:
        """Returns the object registered under ``name``; raises like :meth:`info`."""
        return self.info(name).target

    def make(self, name: str, parameters: Mapping[str, Any]) -> Any:
        """Builds an instance of the class registered under ``name``; OptionError lists the valid parameters."""
        made: Any = self.get(name)
        # A class without fields inherits object.__init__, whose signature claims to take anything.
        own = made.__init__ is not object.__init__
        valid = dict(inspect.signature(made).parameters) if own else {}
        label = f"{self.kind.capitalize()} {name!r}"
        for parameter in parameters:
            if parameter not in valid:
                raise OptionError(f"{label} has no parameter {parameter!r}.{did_you_mean(parameter, valid)}")
        missing = [key for key, value in valid.items() if value.default is value.empty and key not in parameters]
        if missing:
            raise OptionError(f"{label} needs {', '.join(missing)}; parameters: {', '.join(valid)}.")
        return made(**parameters)

    def __contains__(self, name: object) -> bool:
        self._discover()
        return isinstance(name, str) and name in self._entries

    def _discover(self) -> None:
        if self._discovered:
            return
        # Set first, because a plugin's module may look something up while it is being imported.
        self._discovered = True
        assert self.entry_point_group is not None
        # Sorted, so that the same one of two plugins with one name wins on every machine.
        points = sorted(
            importlib.metadata.entry_points(group=self.entry_point_group), key=lambda p: (p.name, _owner(p), p.value)
        )
        messages = []
        for point in points:
            before = set(self._entries)
            try:
                self._load(point)
            except Exception as error:
                # A plugin's import may raise anything; the other plugins must still load.
                reason = f"{type(error).__name__}: {error}"
                self._failures[point.name] = reason
                messages.append(
                    f"The {self.kind} plugin {point.name!r} of {_owner(point)!r} could not be loaded and is left out "
                    f"({reason}). Upgrade or uninstall {_owner(point)!r}."
                )
                # A module that failed may have registered a part of its objects.
                self._entries = {
                    name: entry
                    for name, entry in self._entries.items()
                    if name in before or entry.source != point.module
                }
        # Last, because the first warning must not keep the other plugins out where warnings are errors.
        for message in messages:
            warnings.warn(message, PluginWarning, stacklevel=3)

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        """Registers what an entry point names: an object, or a module that registers its objects on import."""
        target = point.load()
        if not inspect.ismodule(target):
            self.register(point.name, target, tags=getattr(target, "tags", ()))
            return
        package = target.__name__.partition(".")[0]
        if not any(entry.source.partition(".")[0] == package for entry in self._entries.values()):
            raise RegistrationError(f"the module {target.__name__!r} registers no {self.kind} on import")


def import_all(package: str, path: Iterable[str]) -> None:
    """Imports every module of a package, so that what they define registers itself: a new file needs no list."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def subclasses_of(base: type, path: str) -> Callable[[str, Any], None]:
    """Returns a check for :class:`Registry` that only accepts subclasses of ``base``; ``path`` is for its message."""

    def check(name: str, target: Any) -> None:
        if not (inspect.isclass(target) and issubclass(target, base)):
            raise RegistrationError(f"{name or 'What has no name'!r} has to be a subclass of {path}; found {target!r}.")

    return check


def _source_of(target: object) -> str:
    return getattr(target, "__module__", None) or type(target).__module__


def _owner(point: importlib.metadata.EntryPoint) -> str:
    """Returns the distribution of an entry point, or its value where the distribution is not known."""
    return point.dist.name if point.dist is not None else point.value


def _check_solver(name: str, solver: Any) -> None:
    """Raises RegistrationError unless ``solver`` is a class with the attributes of a solver."""
    label = getattr(solver, "__qualname__", repr(solver))
    missing = [repr(attribute) for attribute in ("name", "Config", "tags") if not hasattr(solver, attribute)]
    is_class = inspect.isclass(solver)
    if missing or not is_class:
        found = f"{label} has no {' and no '.join(missing)}" if missing else f"{label} is not a class"
        raise RegistrationError(
            f"A solver is a class with the attributes name, Config and tags; {found}. "
            "Derive it from solver_plugins.solve.Solver."
        )
    if solver.name != name:
        raise RegistrationError(
            f"A solver is registered under its own name; {label}.name is {solver.name!r}, "
            f"but it was registered as {name!r}."
        )


DEFAULT_SOLVER = "proxsg"
"""The solver that is meant where none is named: the paper's."""
SOLVERS: Registry[Any] = Registry("solver", entry_point_group="solver_plugins.solvers", check=_check_solver)

S = TypeVar("S", bound=type)


def register_solver(solver: S) -> S:
    """Class decorator: registers a solver under its ``name``.

    The class needs the attributes ``name``, ``Config`` and ``tags`` of :class:`solver_plugins.solve.Solver`. The first
    line of its docstring becomes the description.
    """
    return SOLVERS.register_class(solver)


def list_solvers(filter: str | Iterable[str] | None = None) -> list[str]:
    """Returns the names of the solvers; ``filter`` is a glob on the name or a tag (see :meth:`Registry.names`)."""
    return SOLVERS.names(filter)


def solver_info(name: str) -> Entry[Any]:
    """Returns the name, class, description, tags and source of a solver."""
    return SOLVERS.info(name)
