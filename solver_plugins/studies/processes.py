"""The processes of a launch, who share out the cells of a study."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from solver_plugins.studies.errors import OtherProcessError
from solver_plugins.train.errors import LaunchError

_PATIENCE = timedelta(days=30)
"""How long a process waits for the last cell of another one."""


class Team:
    """All processes of a launch, or the only one. A context manager.

    Attributes:
        count: How many there are.
        index: Which one this is.
        device: Its own.
    """

    def __init__(self) -> None:
        cpu = not torch.cuda.is_available()
        self.count, self.index = 1, 0
        self.device = torch.device("cpu" if cpu else "cuda")
        self._state: Any = None
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started == 1:
            return
        from accelerate import PartialState

        from solver_plugins.train.processes import end_processes

        try:
            state: Any = PartialState(cpu=cpu, timeout=_PATIENCE)
        except (ValueError, RuntimeError) as error:
            # What was half made would be found by the next one who asks Accelerate.
            end_processes(None)
            raise LaunchError(
                f"WORLD_SIZE says that {started} processes were started, and they do not find each other: {error}. Use "
                "`accelerate launch`, or unset WORLD_SIZE."
            ) from error
        self._state, self.count, self.index, self.device = state, state.num_processes, state.process_index, state.device
        if started != self.count:
            self.__exit__()
            raise LaunchError(
                f"{started} processes were started, and this one believes to be one of {self.count}: each would "
                "measure everything. Launch with `accelerate launch --multi_gpu --num_processes "
                f"{started}` (with ACCELERATE_USE_CPU=true on a machine without GPUs)."
            )

    def first(self, do: Callable[[], None]) -> None:
        """Does something in the first process, while the others wait; raises in all of them if it fails there."""
        error: Exception | None = None
        if self.index == 0:
            try:
                do()
            except Exception as caught:
                error = caught
        self.agree(error)

    def agree(self, error: Exception | None) -> None:
        """Waits for all processes, and raises in all of them if one has failed."""
        told = [None if error is None else f"{type(error).__name__}: {error}"]
        if self._state is not None:
            from accelerate.utils import gather_object

            told = gather_object(told)
        if error is not None:
            raise error
        others = [text for text in told if text is not None]
        if others:
            raise OtherProcessError(f"Another process has stopped: {others[0]}")

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *error: object) -> None:
        if self._state is not None:
            from solver_plugins.train.processes import end_processes

            self._state.destroy_process_group()
            end_processes(None)
            self._state = None
