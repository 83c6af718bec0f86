"""Training in a cell of a study: the loop of ``finetune`` in a single process, where divergence is a result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import DataLoader

from solver_plugins.config import StrictConfig
from solver_plugins.equilibrium import DivergenceError
from solver_plugins.errors import WeightError
from solver_plugins.proxprop import NonFiniteError
from solver_plugins.studies.study import Context
from solver_plugins.train.additions import Additions
from solver_plugins.train.classification import Classification
from solver_plugins.train.config import OptimizerSection, ScheduleSection
from solver_plugins.train.errors import DivergedError
from solver_plugins.train.evaluate import Scores, evaluate
from solver_plugins.train.launch import Alone
from solver_plugins.train.loop import Batches, Hooks, Loop, Objective
from solver_plugins.train.optimizer import TrainSettings, make_optimizer
from solver_plugins.train.tensors import Part, Shuffled

EVALUATION_BATCH = 500


class Fitting(StrictConfig):
    """How a classifier of images is trained, in the same way for all arms."""

    optimizer: str = Field("sgd", description="SGD with momentum, or a name of timm.optim.list_optimizers().")
    lr: float = Field(0.1, gt=0, description="Step size at the beginning.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Of sgd.")
    weight_decay: float = Field(3e-4, ge=0, description="On all parameters.")
    decay_epochs: int | None = Field(None, ge=1, description="Epochs between two decays; null for a cosine to zero.")
    decay_rate: float = Field(0.5, gt=0, le=1, description="The factor of each decay.")
    batch_size: int = Field(128, ge=1, description="Images of a step; a smaller rest of an epoch is left out.")
    epochs: int = Field(200, ge=1, description="Passes over the training split.")
    shift: int = Field(0, ge=0, description="Images are shifted by up to this many pixels, both ways; 0 for not.")
    flip: bool = Field(False, description="Whether every other image is mirrored, at random.")

    def batches(self, train: Part, seed: int) -> Shuffled:
        return Shuffled(train, self.batch_size, seed, shift=self.shift, flip=self.flip)

    def settings(self) -> TrainSettings:
        schedule = ScheduleSection(sched="cosine")
        if self.decay_epochs is not None:
            schedule = ScheduleSection(sched="step", decay_epochs=self.decay_epochs, decay_rate=self.decay_rate)
        optimizer = OptimizerSection(
            # timm's sgd uses Nesterov's momentum.
            opt="momentum" if self.optimizer == "sgd" else self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
        )
        return TrainSettings(self.epochs, optimizer, schedule, decay_all=True)

    def check(self, model: nn.Module) -> None:
        """Makes the optimiser of a model once, so that a wrong name raises."""
        make_optimizer(self.settings(), model)


@dataclass(frozen=True)
class Fitted:
    """How training went: the loss of the last step (None if it diverged), the steps, and times without evaluation."""

    loss: float | None
    seconds: float
    cpu_seconds: float
    steps: int

    @property
    def diverged(self) -> bool:
        """Whether a loss, an activation, a gradient or a weight was no longer finite."""
        return self.loss is None


def fit(
    model: nn.Module,
    batches: Batches,
    settings: TrainSettings,
    context: Context | None = None,
    *,
    objective: Objective | None = None,
    additions: Additions | None = None,
    hooks: Hooks | None = None,
) -> Fitted:
    """Trains the parameters that require a gradient, until the end or until something is not finite.

    ``objective`` is the loss of a classifier by default; ``additions`` (implicit weight steps, a regulariser) are
    removed after training.
    """
    context, additions = context or Context(), additions or Additions()
    alone = Alone(context.device, context.talks)
    objective = objective or Classification(alone, penalty=additions.penalty)
    loop = Loop(model, batches, objective, settings, hooks, alone)
    additions.attach(loop.inner, loop.optimizer)
    try:
        loop.run()
        loss = loop.progress.last_loss
    except (DivergedError, DivergenceError, NonFiniteError, WeightError):
        # WeightError: the weights of a solver block are not finite, so no step size exists.
        loss = None
    finally:
        additions.remove()
    progress = loop.progress
    return Fitted(loss, progress.seconds, progress.cpu_seconds, progress.step)


def scores(model: nn.Module, part: Part, *place: int | str, size: int = EVALUATION_BATCH, trials: int = 1) -> Scores:
    """Returns loss and accuracy on a split, ``size`` images at a time.

    ``place`` seeds the random numbers of a model that samples; one that samples in evaluation is evaluated ``trials``
    times.
    """
    places: Any = [slice(start, start + size) for start in range(0, len(part), size)]
    loader: Any = DataLoader(part, batch_size=None, sampler=places)  # type: ignore[arg-type]
    return evaluate(Alone(part.labels.device), model, loader, part.images.dtype, place, trials)


@torch.no_grad()
def collected(model: nn.Module, part: Part, forward: Callable[[Tensor], Tensor], size: int = 200) -> Tensor:
    """Returns a function of all images of a split, computed in batches with the model in evaluation mode."""
    model.eval()
    return torch.cat([forward(images) for images in part.images.split(size)])


def features_of(model: nn.Module, part: Part, size: int = 200) -> Tensor:
    """Returns the features that the classifier of a timm model reads."""
    return collected(model, part, lambda x: model.forward_head(model.forward_features(x), pre_logits=True), size)  # type: ignore[operator]


def parameters_of(model: nn.Module) -> int:
    """Returns the number of trained parameters."""
    return sum(one.numel() for one in model.parameters() if one.requires_grad)
