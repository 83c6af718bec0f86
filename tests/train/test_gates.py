"""Gates and a scheduled blend in a finetuning run: their group, the schedule, and runs that are continued."""

import shutil

import pytest
import torch

from solver_plugins import gates_of, load
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import OptionError
from solver_plugins.train import FinetuneConfig
from solver_plugins.train.finetune import FinetunedArm, finetune
from tests.train.runs import tiny

SOLVER = {"name": "proxgd", "iters": 3, "gate": "channel", "blend": {"from": 0, "to": 0.5, "epochs": 1.5}}
OPTIONS = {"solver": SOLVER, "ema": {"decay": 0.5, "warmup": False}, "epochs": 2, "optimizer": {"lr": 0.01},
           "schedule": {"sched": "cosine"}, "checkpoints": {"every": 1, "keep": 9}}  # fmt: skip


def test_a_run_with_gates_and_a_scheduled_blend_is_continued_as_the_same_run(tmp_path, monkeypatch):
    seen, groups, before = [], [], FinetunedArm._blend

    def looked(self, *args):
        before(self, *args)
        group = self.loop.optimizer.param_groups
        groups.append([(len(one["params"]), one["weight_decay"], one["lr"]) for one in group])
        seen.append([float(block.blend) for copy in (self.loop.inner, self.ema.module)
                     for block in blocks_of(copy).values()])  # fmt: skip

    monkeypatch.setattr(FinetunedArm, "_blend", looked)
    config = tiny(tmp_path / "run", **OPTIONS)
    finetune(config)
    # Four steps an epoch; six of them lead to 0.5.
    assert [one[0] for one in seen] == pytest.approx([min(step / 6, 1) * 0.5 for step in range(9)] + [0.5])
    assert all(len(set(one)) == 1 for one in seen)
    assert groups[0][-1] == (len(seen[0]) // 2, 0.0, pytest.approx(10 * groups[0][0][2])), "gates"
    model = load(tmp_path / "run" / "solver" / "model")
    gates = gates_of(model)
    assert any(bool((gate > 0).any()) for gate in gates.values())
    assert all(float(block.blend) == 0.5 for block in blocks_of(model).values())
    assert FinetuneConfig.from_file(tmp_path / "run" / "config.yaml") == config

    shutil.copytree(tmp_path / "run", tmp_path / "again")
    arm = tmp_path / "again" / "solver"
    (arm / "result.json").unlink()
    shutil.rmtree(arm / "model")
    for step in range(4, 9):
        shutil.rmtree(arm / "checkpoints" / f"step-{step:08d}")
    finetune(tiny(tmp_path / "again", **OPTIONS), resume=True)
    resumed = load(arm / "model")
    assert all(torch.equal(gate, gates[name]) for name, gate in gates_of(resumed).items())
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())


def test_a_schedule_that_means_nothing_is_refused(tmp_path):
    for changes, message in (
        ({"solver": {**SOLVER, "blend": {"from": 0, "to": 2, "epochs": 1}}}, "'blend.to': expected a value less"),
        ({"solver": {**SOLVER, "blend": {"to": 1, "epochs": 1}}}, "'blend.from' is required"),
        ({"blend": {"from": 0, "to": 1, "epochs": 1}, "solver": SOLVER}, "found both"),
        ({"blend": {"from": 0, "to": 1, "epochs": 1}, "solver": {"name": "proxgd", "blend": 0.5}}, "of its own"),
        ({"optimizer": {"gate_rate": 0}}, "'optimizer.gate_rate': expected a value greater"),
    ):
        with pytest.raises(OptionError, match=message):
            tiny(tmp_path, **changes)
