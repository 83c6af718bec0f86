"""One generic registry, and the registry of solvers built on it.

A third-party distribution adds a solver by an entry point of the group ``solver_plugins.solvers``::

    [project.entry-points."solver_plugins.solvers"]
    my_solver = "my_package.my_module:MySolver"

Entry points are loaded at the first look-up, so that ``import solver_plugins`` stays cheap and a broken plugin cannot
break it. One that cannot be loaded is warned of once, and named again when its solver is asked for.
"""

import fnmatch
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from solver_plugins.errors import (
    DuplicateNameError,
    PluginWarning,
    RegistrationError,
    UnknownNameError,
    did_you_mean,
)

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What a registry knows of one name.

    Attributes:
        name: The registered name.
        target: The registered object.
        description: One line for tables and error messages.
        tags: Words to filter by.
        source: The module that the target comes from.
    """

    name: str
    target: T
    description: str
    tags: frozenset[str]
    source: str


class Registry(Generic[T]):
    """Names mapped to objects of one kind; a duplicate raises, a miss lists near names.

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
        """Adds ``target`` under ``name``.

        Registering the very same object again does nothing, so that a module may be reached twice.

        Args:
            name: The name.
            target: The object.
            description: One line; by default the first line of the object's docstring.
            tags: Words to filter by.

        Returns:
            The object.

        Raises:
            DuplicateNameError: If the name belongs to another object.
            RegistrationError: If the name or the tags are not what they have to be, or the object is not of this kind.
        """
        if self._check is not None:
            self._check(name, target)
        if not isinstance(name, str) or not name:
            raise RegistrationError(f"The name of a {self.kind} has to be a string that is not empty; found {name!r}.")
        # A string is an iterable of strings: its letters would become tags.
        if isinstance(tags, str):
            raise RegistrationError(f"{self.kind} {name!r}: tags have to be a list of strings; found {tags!r}.")
        known = self._entries.get(name)
        if known is not None:
            if known.target is target:
                return target
            raise DuplicateNameError(
                f"{self.kind} {name!r} is registered already, by {known.source}; "
                f"give the new one, from {_source_of(target)}, another name."
            )
        if description is None:
            # Not inspect.getdoc: a class without a docstring would be described by its base class.
            description = inspect.cleandoc(target.__doc__ or "").partition("\n")[0]
        self._entries[name] = Entry(name, target, description, frozenset(tags), _source_of(target))
        return target

    def register_class(self, target: C) -> C:
        """Adds a class under its attribute ``name``, with its ``tags``, for class decorators; raises as `register`."""
        found: Any = target
        # Given a default, so that a class without a name meets the check, which says everything that is missing.
        self.register(getattr(found, "name", ""), found, tags=getattr(found, "tags", ()))
        return target

    def names(self, filter: str | Iterable[str] | None = None) -> list[str]:
        """Lists names in order, all of them or those that match.

        Args:
            filter: A glob on the name ("*gd"), a tag ("deterministic"), or several of either: a name is listed if any
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
        """Returns what is known of ``name``.

        Raises:
            UnknownNameError: If there is no such name; the message lists near ones and all options.
        """
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

    def __contains__(self, name: object) -> bool:
        self._discover()
        return isinstance(name, str) and name in self._entries

    def _discover(self) -> None:
        if self._discovered:
            return
        # Set first: a plugin's module may itself look something up while it is being imported.
        self._discovered = True
        assert self.entry_point_group is not None
        # Sorted, so that of two plugins with one name the same one wins on every machine.
        points = sorted(
            importlib.metadata.entry_points(group=self.entry_point_group), key=lambda p: (p.name, _owner(p), p.value)
        )
        messages = []
        for point in points:
            before = set(self._entries)
            try:
                self._load(point)
            except Exception as error:
                # Whatever a stranger's import raises must not take every other solver down with it.
                reason = f"{type(error).__name__}: {error}"
                self._failures[point.name] = reason
                messages.append(
                    f"The {self.kind} plugin {point.name!r} of {_owner(point)!r} could not be loaded and is left out "
                    f"({reason}). Upgrade or uninstall {_owner(point)!r}."
                )
                # What a module registered before it failed would be half a plugin.
                self._entries = {
                    name: entry
                    for name, entry in self._entries.items()
                    if name in before or entry.source != point.module
                }
        # Last: where warnings are errors, the first one must not keep the other plugins out.
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


def subclasses_of(base: type, path: str) -> Callable[[str, Any], None]:
    """Returns a check for :class:`Registry`: what is registered has to be a class derived from ``base``.

    Args:
        base: The class.
        path: Where users import it from, for the message.
    """

    def check(name: str, target: Any) -> None:
        if not (inspect.isclass(target) and issubclass(target, base)):
            raise RegistrationError(f"{name or 'What has no name'!r} has to be a subclass of {path}; found {target!r}.")

    return check


def _source_of(target: object) -> str:
    return getattr(target, "__module__", None) or type(target).__module__


def _owner(point: importlib.metadata.EntryPoint) -> str:
    """Returns the distribution that an entry point belongs to, or its value where that is not known."""
    return point.dist.name if point.dist is not None else point.value


def _check_solver(name: str, solver: Any) -> None:
    """Raises RegistrationError unless ``solver`` is a class with the attributes that a solver has."""
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
            f"but it was to be registered as {name!r}."
        )


SOLVERS: Registry[Any] = Registry("solver", entry_point_group="solver_plugins.solvers", check=_check_solver)

S = TypeVar("S", bound=type)


def register_solver(solver: S) -> S:
    """Class decorator: registers a solver under its ``name``.

    The class needs the attributes ``name``, ``Config`` and ``tags`` of
    :class:`solver_plugins.solve.base.Solver`; the first line of its docstring becomes the description.
    """
    return SOLVERS.register_class(solver)


def list_solvers(filter: str | Iterable[str] | None = None) -> list[str]:
    """Lists the registered solvers; ``filter`` is a glob on the name or a tag (see :meth:`Registry.names`)."""
    return SOLVERS.names(filter)


def solver_info(name: str) -> Entry[Any]:
    """Returns name, class, description, tags and origin of a solver."""
    return SOLVERS.info(name)
