"""The training loop by itself: a model, batches, an objective, settings and hooks, without a config."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import solver_plugins
from solver_plugins import convert_model
from solver_plugins.train import DivergedError
from solver_plugins.train.classification import Classification
from solver_plugins.train.config import OptimizerSection, ScheduleSection
from solver_plugins.train.launch import Alone
from solver_plugins.train.loop import Hooks, Loop, refresh_every
from solver_plugins.train.optimizer import TrainSettings
from solver_plugins.train.tensors import Part, Shuffled

PACKAGE = Path(solver_plugins.__file__).parent


def part(count=22, features=3):
    generator = torch.Generator().manual_seed(0)
    return Part(torch.randn(count, features, generator=generator), torch.arange(count) % 2)


def settings(epochs=2, lr=0.1, schedule=None, **more):
    section = OptimizerSection(opt="momentum", lr=lr, weight_decay=0.1, momentum=0.5, **more)
    return TrainSettings(epochs, section, schedule, decay_all=True)


def loop(model, hooks=None, data=None, **more):
    alone = Alone()
    return Loop(model, Shuffled(data or part(), 4, seed=7), Classification(alone), settings(**more), hooks, alone)


def test_gradients_are_clipped_and_rates_follow_the_schedule():
    """Against steps written out; five steps of four make an epoch of 22 examples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    made = loop(model, clip=0.05, schedule=ScheduleSection(sched="step", decay_epochs=1, decay_rate=0.25))
    progress = made.run()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.5, weight_decay=0.1)
    losses = []
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.25**epoch
        for batch in Shuffled(part(), 4, seed=7).start(epoch, 0):
            loss = functional.cross_entropy(reference(batch["image"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            optimizer.step()
            losses.append(float(loss.detach()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert (progress.epoch, progress.step, progress.step_in_epoch) == (2, 10, 0)
    assert progress.last_loss == losses[-1] and progress.epoch_loss == pytest.approx(sum(losses[5:]) / 5)


def test_weight_decay_spares_biases_unless_told_otherwise():
    made = Loop(nn.Linear(3, 2), Shuffled(part(), 4, 0), Classification(Alone()), TrainSettings(1, OptimizerSection()))
    decays = {len(one.shape): group["weight_decay"] for group in made.optimizer.param_groups for one in group["params"]}
    assert decays == {1: 0.0, 2: 0.05}
    (group,) = loop(nn.Linear(3, 2)).optimizer.param_groups
    assert group["weight_decay"] == 0.1 and len(group["params"]) == 2


def test_actions_come_after_steps_and_epochs():
    seen = []

    def noted(name):
        return lambda one: seen.append((name, one.progress.epoch if name == "epoch" else one.progress.step))

    hooks = Hooks(after_step=(noted("a"), noted("b")), after_epoch=(noted("epoch"),))
    loop(nn.Linear(3, 2), hooks).run()
    steps = [[(name, step) for step in steps for name in "ab"] for steps in (range(1, 6), range(6, 11))]
    assert seen == [*steps[0], ("epoch", 1), *steps[1], ("epoch", 2)]


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_loop_goes_on_where_another_one_stopped(stop):
    """Inside of an epoch, and at the end of its last step before anything else was done."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    whole, first, second = (copy.deepcopy(model) for _ in range(3))
    cosine = ScheduleSection(sched="cosine")
    expected = loop(whole, schedule=cosine).run()
    kept = {}

    def stop_at(one):
        if one.progress.step == stop:
            kept.update(
                model=copy.deepcopy(one.inner.state_dict()), optimizer=copy.deepcopy(one.optimizer.state_dict()),
                progress=one.progress.state_dict(),
            )  # fmt: skip
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(first, Hooks(after_step=(stop_at,)), schedule=cosine).run()
    rest = loop(second, schedule=cosine)
    rest.inner.load_state_dict(kept["model"])
    rest.optimizer.load_state_dict(kept["optimizer"])
    rest.progress.load_state_dict(kept["progress"])
    found = rest.run()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert (found.step, found.epoch_loss) == (expected.step, expected.epoch_loss)


@pytest.mark.parametrize("changes", [{}, {"shift": 1, "flip": True}])
def test_batches_do_not_depend_on_where_an_epoch_is_entered(changes):
    images = torch.randn(10, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    batches = Shuffled(Part(images, torch.arange(10)), 3, seed=1, rest=True, **changes)
    everything, later = list(batches.start(4, 0)), list(batches.start(4, 2))
    assert batches.steps == len(everything) == 4 and [len(one["labels"]) for one in later] == [3, 1]
    for one, other in zip(everything[2:], later, strict=True):
        assert torch.equal(one["image"], other["image"]) and torch.equal(one["labels"], other["labels"])
    assert sorted(torch.cat([one["labels"] for one in everything]).tolist()) == list(range(10))
    assert Shuffled(Part(images, torch.arange(10)), 3, seed=1).steps == 3


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_spoiled():
    model = nn.Linear(3, 2)
    data = Part(torch.full((4, 3), 1e38), torch.zeros(4, dtype=torch.long))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e10] * 3, [-1e10] * 3]))
    before = model.weight.clone()
    seen = []
    hooks = Hooks(after_step=(lambda one: seen.append(1),), diverged=lambda batch: f" Saw {len(batch['labels'])}.")
    with pytest.raises(DivergedError, match=r"The loss of the model is nan at step 1 \(epoch 1\)\. Saw 4\."):
        loop(model, hooks, data).run()
    assert torch.equal(model.weight, before) and not seen


def test_weights_that_are_not_finite_end_no_epoch():
    """The loss of the last step was finite; nothing is evaluated or saved with what it left."""
    seen = []
    data = Part(1e4 * part(4).images, part(4).labels)
    with pytest.raises(DivergedError, match=r"The weights of the model are not finite after step 1 \(epoch 1\)"):
        loop(nn.Linear(3, 2), Hooks(after_epoch=(lambda one: seen.append(1),)), data, epochs=1, lr=1e37).run()
    assert not seen


def test_step_sizes_are_certified_when_they_are_due(monkeypatch):
    torch.manual_seed(0)
    data = part()
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    convert_model(model, "proxgd", iters=2, example_inputs=data.images)
    seen = []
    monkeypatch.setattr("solver_plugins.train.loop.refresh_steps", lambda one: seen.append(made.progress.step))
    made = loop(model, Hooks(after_step=(refresh_every(3),)), data)
    made.run()
    assert seen == [3, 6, 9] and made.inner is model


def test_a_process_by_itself_makes_no_group(environment):
    """Also where a launcher says that there are two: an Accelerator would wait for the other one."""
    environment.update(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert loop(nn.Linear(3, 2)).run().step == 10
    assert not torch.distributed.is_initialized()


def test_there_is_one_loop_for_networks():
    """Whoever takes a step of an optimiser is the loop, or that of the closed-form matrix problems."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for room in ("train", "studies", "cli")
        for path in (PACKAGE / room).rglob("*.py")
        if "optimizer.step()" in path.read_text()
    }
    assert found == {"train/loop.py", "studies/dropblock_shallow.py"}
