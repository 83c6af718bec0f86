"""Training on a device without float64: nothing asks it for what it does not have."""

import pytest
import torch
from torch import nn

from solver_plugins import convert_model, solver_report
from solver_plugins.blocks import blocks_of, refresh_steps
from solver_plugins.blocks.noise import effective_rate
from solver_plugins.surgery.apply import difference
from solver_plugins.train.config import OptimizerSection
from solver_plugins.train.launch import Alone
from solver_plugins.train.loop import Loop
from solver_plugins.train.optimizer import TrainSettings
from solver_plugins.train.problems import PROBLEMS
from tests.fake_mps import FakeMps


@pytest.fixture
def images():
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def converted(images, solver="proxgd", **options):
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5), nn.ReLU())
    made = nn.Sequential(*layers, nn.Linear(5, 3))
    return convert_model(made, solver=solver, iters=2, example_inputs=images, **options)


def test_the_device_has_neither_float64_nor_numpy(images):
    with FakeMps():
        assert images.device.type == "mps" and images.cpu().device.type == "cpu"
        assert (images + 1).device.type == "mps" and torch.zeros(2).to(images.device).device.type == "mps"
        assert images.cpu().double().dtype == torch.float64 and images.cpu().numpy().shape == images.shape
        for refused in (images.double, images.numpy, lambda: torch.zeros(2, dtype=torch.float64, device="mps")):
            with pytest.raises(TypeError):
                refused()


@pytest.mark.parametrize("solver", ["proxgd", "anderson", "proxsg"])
def test_blocks_train_and_are_looked_at(solver, images):
    with FakeMps():
        model = converted(images, solver)
        model(images).sum().backward()
        refresh_steps(model)
        assert len(solver_report(model.eval(), images).blocks)
        if solver == "proxsg":
            (block,) = blocks_of(model).values()
            assert 0 < effective_rate(block, torch.ones(2, 64).to(images.device), 4) < 1
        else:
            assert len(converted(images, solver, calibrate=[images], gate="channel")(images)) == 8


def test_checks_and_comparisons(images):
    with FakeMps():
        # The rank of the weight is looked at: it is full.
        made = converted(images, gradient="implicit", lam=0.0, targets=["6"], pattern="all")
        with torch.no_grad():
            outputs = made(images)
        told = difference([outputs], [2 * outputs])
    assert "change by 1 of their norm, the largest one in 0 of 8" in told


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_evaluations(problem):
    outputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8) % 4 if problem.main == "accuracy" else (outputs.roll(1, 0) > 0).float()

    def measured():
        return problem.measure([one.cpu() for one in problem.told(outputs, targets)][:-1], 4)

    with FakeMps():
        found = measured()
    assert found == measured()


def test_the_loop(images):
    class Batches:
        steps = 2

        def start(self, epoch, step):
            return iter([{"image": images}] * self.steps)

    with FakeMps():
        settings = TrainSettings(1, OptimizerSection())
        loop = Loop(nn.Conv2d(3, 2, 3), Batches(), lambda model, batch: model(batch["image"]).square().mean(), settings,
                    accelerator=Alone(images.device))  # fmt: skip
        progress = loop.run()
    assert progress.step == 2 and progress.epoch_loss > 0
