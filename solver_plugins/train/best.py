"""The weights of a run's best epoch: kept in a file while training goes on, and put back at its end."""

import math
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from solver_plugins.errors import OptionError
from solver_plugins.train.launch import is_sharded
from solver_plugins.train.outputs import whole_file
from solver_plugins.train.problems import PROBLEMS, SINGLE, Problem
from solver_plugins.train.sections import BestSection


class BestWeights:
    """Keeps the weights of the best epoch, and says when to stop; without a section it does neither."""

    def __init__(
        self,
        section: BestSection | None,
        file: Path,
        accelerator: Accelerator,
        problem: Problem = PROBLEMS[SINGLE],
        classes: int | None = None,
    ):
        self.section, self.file, self.accelerator = section, file, accelerator
        self.metric = problem.main if section is None or section.metric is None else section.metric
        self.sign = -1 if self.metric == "loss" or self.metric in problem.smaller else 1
        known = [key for key in ("loss", *problem.headings) if key != "top5" or classes is None or classes > 5]
        if self.metric not in known:
            raise OptionError(
                f"best.metric={self.metric!r} is not measured for {problem.name}"
                f"{'' if classes is None else f' with {classes} outputs'}; expected {', '.join(known)}."
            )
        if section is not None and is_sharded(accelerator):
            raise OptionError("best needs whole weights in each process, which FSDP does not have; leave one out.")

    def epoch(self, rows: list[dict[str, Any]]) -> int:
        """Returns the best epoch so far; the first of equal ones."""
        values = [row[f"eval_{self.metric}"] for row in rows]
        if None in values:
            raise OptionError(f"best.metric={self.metric!r} is not defined for these examples; compare the loss.")
        # One that is not a number, as after a loss that is too large, is the worst.
        signed = [-math.inf if math.isnan(value) else self.sign * value for value in values]
        return int(rows[signed.index(max(signed))]["epoch"])

    def look(self, model: nn.Module, rows: list[dict[str, Any]]) -> bool:
        """Keeps the weights if the last epoch is the best; returns whether to stop. Call it in all processes."""
        if self.section is None:
            return False
        best, last = self.epoch(rows), int(rows[-1]["epoch"])
        if best == last and self.accelerator.is_main_process:
            # Clones: tied weights share memory, which the file format refuses.
            state = self.accelerator.unwrap_model(model).state_dict()
            with whole_file(self.file) as partial:
                save_file({name: value.detach().cpu().clone().contiguous() for name, value in state.items()}, partial)
        return self.section.patience is not None and last - best >= self.section.patience

    def restore(self, model: nn.Module, rows: list[dict[str, Any]]) -> int | None:
        """Puts the best weights into the unwrapped model and returns their epoch; None if nothing is kept."""
        if self.section is None:
            return None
        self.accelerator.wait_for_everyone()
        model.load_state_dict(load_file(self.file))
        return self.epoch(rows)
