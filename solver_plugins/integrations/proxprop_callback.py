"""transformers' Trainer with implicit weight steps."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from solver_plugins.proxprop import ProxProp


class ProxPropCallback(TrainerCallback):
    """Preconditions the gradients of a Trainer: ``Trainer(..., callbacks=[ProxPropCallback(mode="cg3")])``.

    Options are those of :class:`ProxProp`, which are checked when training begins; its object is then
    ``self.proxprop``. The Trainer clips gradients before its optimizer steps, so ``max_grad_norm`` applies to plain
    gradients. Nothing is kept between two steps: checkpoints do not change, and a resumed run is the same run.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.proxprop: ProxProp | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self._stop()
        self.proxprop = ProxProp(model, **self.options).attach(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.proxprop is not None:
            self.proxprop.detach()
