"""The processes of a launch, which share the cells of a study."""

import itertools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from solver_plugins.errors import SolverPluginsError
from solver_plugins.train.errors import LaunchError

_PATIENCE = timedelta(minutes=5)
"""How long processes wait for each other at the start."""
_FAREWELL = 10.0
"""How many seconds the first process waits for others to read its last message."""
_LOOK = 0.05
"""Seconds between two checks for messages."""
_TEAMS = itertools.count()


class OtherProcessError(SolverPluginsError, RuntimeError):
    """Another process of the same launch has failed."""


class Team:
    """The processes of a launch, ``count`` of them with an ``index`` and a ``device`` each, or the only one.

    A context manager. They communicate through the launcher's store and do not form a torch process group. Each process
    measures its own cells, and whatever gathers, reduces or broadcasts within a group (``calibrate``, ``ProxProp``,
    ``SyncBatchNorm``) would mix up two cells.
    """

    def __init__(self) -> None:
        self.count, self.index = 1, 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._store: Any = None
        self._said = 0
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started == 1:
            return
        from torch.distributed.rendezvous import rendezvous

        try:
            self._store, self.index, self.count = next(iter(rendezvous("env://", timeout=_PATIENCE)))
        except (ValueError, RuntimeError) as error:
            raise LaunchError(
                f"WORLD_SIZE says that {started} processes were started, but they cannot find each other: {error}. Use "
                "`accelerate launch`, or unset WORLD_SIZE."
            ) from error
        # One launch may run several studies in turn, with one store.
        self._prefix = f"solver_plugins/studies/{next(_TEAMS)}"
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.index)))
            torch.cuda.set_device(self.device)

    def every(self, do: Callable[[], None]) -> None:
        """Does something in every process; raises in all of them if it fails in one."""
        error: Exception | None = None
        try:
            do()
        except Exception as caught:
            error = caught
        self.agree(error)

    def first(self, do: Callable[[], None]) -> None:
        """Does something in the first process while the others wait; raises in all of them if it fails."""
        self.every(do if self.index == 0 else lambda: None)

    def agree(self, error: Exception | None) -> None:
        """Waits for all processes; raises in all of them if one has failed."""
        told = self._exchange(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        others = [text for text in told if text is not None]
        if others:
            raise OtherProcessError(f"Another process has stopped: {others[0]}")

    def _exchange(self, text: str | None) -> list[str | None]:
        """Returns the texts of all processes in order, once all have sent theirs."""
        if self._store is None:
            return [text]
        keys = [f"{self._prefix}/{self._said}/{index}" for index in range(self.count)]
        self._said += 1
        self._store.set(keys[self.index], json.dumps(text))
        # Polled: a process that waits inside the store cannot be interrupted.
        while not self._store.check(keys):
            time.sleep(_LOOK)
        return [json.loads(self._store.get(key)) for key in keys]

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *error: object) -> None:
        if self._store is None:
            return
        left = self._store.add(f"{self._prefix}/left", 1)
        # The store may live in the first process.
        until = time.monotonic() + _FAREWELL
        while self.index == 0 and left < self.count and time.monotonic() < until:
            time.sleep(_LOOK)
            left = self._store.add(f"{self._prefix}/left", 0)
        self._store = None
