"""What a checkpoint holds besides weights and optimiser: step sizes, and how far training has come."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from solver_plugins.integrations.steps import step_state


class StepSizes:
    """The buffers behind the step sizes of all blocks: a resumed run needs them, but no state dict holds them."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies of the buffers, by name."""
        return {name: buffer.detach().cpu().clone() for name, buffer in step_state(self.model).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Writes the buffers back, in place."""
        own = step_state(self.model)
        if own.keys() != state.keys():
            raise KeyError(f"Expected the step sizes of {len(own)} buffers; found {len(state)} of other names.")
        with torch.no_grad():
            for name, buffer in own.items():
                buffer.copy_(state[name])


@dataclass
class Progress:
    """How far training has come.

    Attributes:
        epoch: The epoch that is under way.
        step_in_epoch: How many optimiser steps of it are done.
        step: How many are done in all.
        loss: Sum of the losses of this epoch so far.
        last_loss: The loss of the last step; None before the first.
        epoch_loss: The mean loss of the last epoch that was completed; None before that.
        seconds: Spent in training, on the clock.
        cpu_seconds: Spent in training, by all threads of this process.
        stopped: Whether training has ended before its last epoch, as nothing became better.
        rows: What was measured so far, one row per epoch.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    loss: float = 0.0
    last_loss: float | None = None
    epoch_loss: float | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    stopped: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, str]:
        """Returns everything as JSON, so that loading cannot run code."""
        return {"progress": json.dumps(asdict(self))}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Restores everything."""
        found = json.loads(state["progress"])
        for one in fields(self):
            setattr(self, one.name, found[one.name])
