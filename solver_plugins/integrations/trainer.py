"""transformers' Trainer: runs that are resumed as if they had never been interrupted."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from solver_plugins.blocks import TrackedStep, refresh_steps


class CertifySteps(TrainerCallback):
    """Certifies the step sizes whenever a checkpoint is written: ``Trainer(..., callbacks=[CertifySteps()])``.

    In training they follow the weights by power steps that depend on the past, and a checkpoint holds weights alone;
    what is loaded has certified ones. With them certified here, too, the run that goes on and the run that is resumed
    are the same. Evaluating before each checkpoint has the same effect.
    """

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Is called by the Trainer behind each checkpoint."""
        if model is not None and any(isinstance(module, TrackedStep) for module in model.modules()):
            refresh_steps(model)
