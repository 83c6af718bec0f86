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
    SolverPluginsError,
    UnknownNameError,
    did_you_mean,
)

T = TypeVar("T")


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
    """

    def __init__(self, kind: str, entry_point_group: str | None = None):
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._entries: dict[str, Entry[T]] = {}
        self._failures: dict[str, str] = {}
        self._discovered = entry_point_group is None

    def register(
        self, name: str, target: T, *, description: str | None = None, tags: Iterable[str] = ()
    ) -> T:
        """Adds ``target`` under ``name``.

        Registering the very same object again does nothing, so that a module may be reached twice.

        Raises:
            DuplicateNameError: If the name belongs to another object.
        """
        known = self._entries.get(name)
        if known is not None:
            if known.target is target:
                return target
            raise DuplicateNameError(
                f"{self.kind} {name!r} is registered already, by {known.source}; "
                f"give the new one, from {_source_of(target)}, another name."
            )
        if description is None:
            description = (inspect.getdoc(target) or "").partition("\n")[0]
        self._entries[name] = Entry(name, target, description, frozenset(tags), _source_of(target))
        return target

    def names(self, filter: str | Iterable[str] | None = None) -> list[str]:
        """Lists names in order, all of them or those that match.

        Args:
            filter: A glob on the name ("*gd"), a tag ("deterministic"), or several of either: a name is listed if any of
                them fits. As in timm, a pattern that fits nothing gives an empty list.
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
        entry = self._entries.get(name)
        if entry is None:
            failed = f" A plugin offers it but failed to load: {self._failures[name]}." if name in self._failures else ""
            raise UnknownNameError(f"Unknown {self.kind} {name!r}.{failed}{did_you_mean(str(name), self._entries)}")
        return entry

    def get(self, name: str) -> T:
        """Returns the object registered under ``name``; raises like :meth:`info`."""
        return self.info(name).target

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def _discover(self) -> None:
        if self._discovered:
            return
        # Set first: a plugin's module may itself look something up while it is being imported.
        self._discovered = True
        assert self.entry_point_group is not None
        for point in importlib.metadata.entry_points(group=self.entry_point_group):
            try:
                target = point.load()
                # A module, or an object that registered itself on import, has nothing left to add.
                if not inspect.ismodule(target) and not any(e.target is target for e in self._entries.values()):
                    self._check(point.name, target)
                    self.register(point.name, target, tags=getattr(target, "tags", ()))
            except Exception as error:
                # Whatever a stranger's import raises must not take every other solver down with it.
                self._failures[point.name] = f"{type(error).__name__}: {error}"
                owner = point.dist.name if point.dist is not None else point.value
                warnings.warn(
                    f"The {self.kind} plugin {point.name!r} of {owner!r} could not be loaded and is left out "
                    f"({type(error).__name__}: {error}). Upgrade or uninstall {owner!r}.",
                    PluginWarning,
                    stacklevel=3,
                )

    def _check(self, name: str, target: Any) -> None:
        """Raises if a plugin's object cannot be one of this kind."""
        check: Callable[[str, Any], None] | None = getattr(self, "check", None)
        if check is not None:
            check(name, target)


def _source_of(target: object) -> str:
    return getattr(target, "__module__", None) or type(target).__module__


SOLVERS: Registry[Any] = Registry("solver", entry_point_group="solver_plugins.solvers")


def register_solver(solver: type) -> type:
    """Class decorator: registers a solver under its ``name``.

    The class needs the attributes ``name``, ``Config`` and ``tags`` of
    :class:`solver_plugins.solvers.base.Solver`; the first line of its docstring becomes the description.
    """
    for attribute in ("name", "Config", "tags"):
        if not hasattr(solver, attribute):
            raise SolverPluginsError(
                f"A solver needs the class attributes name, Config and tags; {solver.__qualname__} has no {attribute!r}. "
                "Derive it from solver_plugins.solvers.Solver."
            )
    return SOLVERS.register(solver.name, solver, tags=solver.tags)


def list_solvers(filter: str | Iterable[str] | None = None) -> list[str]:
    """Lists the registered solvers; ``filter`` is a glob on the name or a tag (see :meth:`Registry.names`)."""
    return SOLVERS.names(filter)


def solver_info(name: str) -> Entry[Any]:
    """Returns name, class, description, tags and origin of a solver."""
    return SOLVERS.info(name)
