"""transformers' Trainer on converted models: train, checkpoint, resume, save, load."""

import shutil

import pytest
import torch
import transformers

import solver_plugins
from solver_plugins import SolverCallback, conversion_of, convert_model, gates_of, load
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import OptionError, SolverPluginsWarning
from solver_plugins.integrations import LoadingError
from solver_plugins.integrations.steps import STEPS, read_steps, step_state, write_steps
from solver_plugins.surgery import ConversionError
from tests.integrations.cases import converted, hugging_face_inputs, hugging_face_model


class Rows(torch.utils.data.Dataset):
    def __init__(self, name):
        torch.manual_seed(3)
        self.inputs = hugging_face_inputs(name, batch=16)
        self.labels = torch.randint(0, 3, (16,))

    def __len__(self):
        return 16

    def __getitem__(self, row):
        return {**{key: value[row] for key, value in self.inputs.items()}, "labels": self.labels[row]}


def build(name):
    torch.manual_seed(0)
    return converted(hugging_face_model(name), "proxsg", last=False)


def trainer(name, folder, model=None, callback=None, **options):
    options = {"max_steps": 6, "save_steps": 3, "logging_strategy": "no", **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=0.01, report_to=[], use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model=build(name) if model is None else model, args=arguments, train_dataset=Rows(name),
        eval_dataset=Rows(name), callbacks=[callback or SolverCallback()],
    )  # fmt: skip


def constants(model):
    return {name: value.clone() for name, value in step_state(model).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", ["bert", "resnet", "vit"])
def test_train_resume_save_load(name, tmp_path):
    """A run that is resumed ends where the uninterrupted one ends, to the bit; so does what is loaded."""
    whole = trainer(name, tmp_path / "run")
    before = {key: value.clone() for key, value in whole.model.state_dict().items()}
    whole.train()
    expected, steps = whole.model.state_dict(), constants(whole.model)
    assert any(not torch.equal(expected[key], before[key]) for key in expected)

    checkpoint = tmp_path / "run" / "checkpoint-3"
    model = build(name)
    if name == "vit":
        # transformers 5.22 writes a ViT under its old names and resumes under the new ones: a plain ViT starts anew,
        # too, unless it has the weights already. Copied: those of a mapped file round otherwise.
        model.load_state_dict(load(checkpoint).state_dict())
    resumed = trainer(name, tmp_path / "run", model)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 6
    assert same(resumed.model.state_dict(), expected)
    assert same(constants(resumed.model), steps)

    metrics = whole.evaluate()
    whole.save_model(str(tmp_path / "saved"))
    again = load(tmp_path / "saved")
    assert conversion_of(again).to_json() == conversion_of(whole.model).to_json()
    inputs = hugging_face_inputs(name)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], whole.model.eval()(**inputs)[0])
    assert metrics["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"])
    # A checkpoint is a saved model, too.
    assert conversion_of(load(checkpoint)).to_json() == conversion_of(again).to_json()


def test_the_state_of_the_steps_is_needed(tmp_path):
    """Without the file a resumed run says so, and is another one: the test above can fail."""
    whole = trainer("bert", tmp_path / "run")
    whole.train()
    (tmp_path / "run" / "checkpoint-3" / STEPS).unlink()
    resumed = trainer("bert", tmp_path / "run")
    with pytest.warns(SolverPluginsWarning, match=r"No solver_steps.safetensors in .*certified"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert not same(constants(resumed.model), constants(whole.model))


def test_a_checkpoint_that_was_moved(tmp_path):
    whole = trainer("bert", tmp_path / "run")
    whole.train()
    moved = shutil.move(tmp_path / "run" / "checkpoint-3", tmp_path / "moved")
    resumed = trainer("bert", tmp_path / "other", resume_from_checkpoint=str(moved))
    resumed.train(resume_from_checkpoint=str(moved))
    assert same(resumed.model.state_dict(), whole.model.state_dict())


def test_gates_have_a_group_of_their_own_also_in_a_run_that_is_resumed(tmp_path):
    def made():
        torch.manual_seed(0)
        return convert_model(hugging_face_model("bert"), "proxgd", 3, pattern="all", gate="channel", last=False)

    def run(resume=None):
        bert = trainer("bert", tmp_path / "run", made(), weight_decay=0.1)
        bert.remove_callback(SolverCallback)
        SolverCallback(gate_rate=5).add_to(bert)
        bert.train(resume_from_checkpoint=resume)
        return bert

    whole = run()
    groups = whole.optimizer.param_groups
    gates = gates_of(whole.model)
    assert {id(one) for one in groups[-1]["params"]} == {id(one) for one in gates.values()}
    assert groups[-1]["weight_decay"] == 0 and groups[-1]["initial_lr"] == 5 * groups[0]["initial_lr"]
    assert any(bool((gate > 0).any()) for gate in gates.values())
    again = run(str(tmp_path / "run" / "checkpoint-3"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())
    alone = trainer("bert", tmp_path / "alone", made(), max_steps=1, save_strategy="no")
    with pytest.warns(SolverPluginsWarning, match="add_to"):
        alone.train()


def test_when_steps_are_certified(tmp_path, monkeypatch):
    """At the end of each epoch of four steps, every three steps, and before an evaluation at step five."""
    seen = []

    def refresh(model, tolerance):
        seen.append(run.state.global_step)
        return solver_plugins.refresh_steps(model, tolerance=tolerance)

    monkeypatch.setattr("solver_plugins.integrations.trainer.refresh_steps", refresh)
    monkeypatch.setattr(SolverBlock, "certify_in_evaluation", False)
    run = trainer("bert", tmp_path, callback=SolverCallback(every_steps=3), max_steps=8, save_strategy="no",
                  eval_strategy="steps", eval_steps=5)  # fmt: skip
    run.train()
    assert seen == [3, 4, 5, 6, 8]


def test_logs(tmp_path):
    run = trainer("bert", tmp_path, model=_implicit(), logging_strategy="steps", logging_steps=1, save_strategy="no")
    run.train()
    rows = [row for row in run.state.log_history if "loss" in row]
    assert len(rows) == 6
    assert all(row["solver_residual"] > 0 and row["solver_staleness"] >= 0 for row in rows)
    assert rows[0]["solver_staleness"] > 0, "the weights have moved since the conversion"
    assert "solver_staleness" not in run.state.log_history[-1], "the summary"


def _implicit():
    torch.manual_seed(0)
    model = hugging_face_model("bert")
    return convert_model(model, "fista", iters=60, pattern="all", last=False, gradient="implicit", lam=0.1)


def test_trackers_see_the_logs(tmp_path):
    class Tracker(transformers.TrainerCallback):
        seen = ()

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen = (*self.seen, dict(logs))

    tracker = Tracker()
    run = trainer("bert", tmp_path, callback=tracker, logging_strategy="steps", logging_steps=3, save_strategy="no")
    SolverCallback().add_to(run)
    run.train()
    assert ["solver_staleness" in logs for logs in tracker.seen] == [True, True, False]


def test_bad_input(tmp_path):
    with pytest.raises(ConversionError, match="found BertForSequenceClassification without a solver block"):
        trainer("bert", tmp_path, hugging_face_model("bert")).train()
    for options in ({"every_steps": 0}, {"tolerance": 0.0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            SolverCallback(**options)
    model = build("bert")
    place = write_steps(model, tmp_path)
    before = constants(model)
    with torch.no_grad():
        weight = next(m for m in model.modules() if isinstance(m, SolverBlock)).weight
        weight.mul_(2)
    with pytest.raises(LoadingError, match="of other weights"):
        read_steps(model, tmp_path)
    other = converted(hugging_face_model("resnet"), "proxsg", last=False)
    with pytest.raises(LoadingError, match="of another conversion"):
        read_steps(other, tmp_path)
    place.write_bytes(place.read_bytes()[:-8])
    with pytest.raises(LoadingError, match="Cannot read the step sizes"):
        read_steps(model, tmp_path)
    assert same(constants(model), before)
