"""How to convert a pretrained network: what the arms are, what they share, and what the report says."""

import copy

import pytest
import timm
import torch
from torch.nn import functional

from solver_plugins import calibrate, convert_model
from solver_plugins.blocks import SolverBlock, gates_of
from solver_plugins.errors import SolverPluginsError
from solver_plugins.studies import Cell, Context, Results, read_study_config, run_study
from solver_plugins.studies.deeplayers import _sampling_off
from solver_plugins.studies.deeplayers_pretrained import DeepLayersPretrained
from solver_plugins.studies.images import Images, prepared
from solver_plugins.studies.searched import FINAL, SEARCH
from solver_plugins.studies.study import Measured
from solver_plugins.train.randomness import seeded
from solver_plugins.train.tensors import Part

NAME = DeepLayersPretrained.name
LAYERS = ["layer3.0.conv1", "layer4.0.conv1"]


def study(*changes, scale="smoke"):
    return DeepLayersPretrained(read_study_config(NAME, scale, changes))


def ready(*changes):
    found = study("data.train=train[:48]", *changes)
    found.prepare()
    return found


def cell_of(table, arm, seed=0, stage=FINAL):
    return Cell(arm, seed, ((table.group, table.groups()[0]), ("stage", stage)))


def begun(table, arm, seed=0):
    """Returns a network right before it is finetuned, and what is known of it."""
    with seeded(table.name, seed):
        model = table.make(table.groups()[0])
        parts = table._inputs(model, cell_of(table, arm, seed), Context())
        return model, table._convert(cell_of(table, arm, seed), model, parts)


def blocks(model):
    return {name: part for name, part in model.named_modules() if isinstance(part, SolverBlock)}


def test_the_arms_of_the_short_scale():
    table = study("model={spec: timm/tf_efficientnet_lite0}", scale="short")
    part = Part(torch.zeros(1, 3, 64, 64), torch.zeros(1))
    table._images = Images(part, part, part, 10)
    found = {}
    for arm in table.arms():
        model = table._solved(table.make(table.groups()[0]), table.groups()[0], arm, part.images)
        made = blocks(model)
        if arm == "plain":
            assert not made
            continue
        assert list(made) == ["blocks.5.3.conv_pw", "blocks.6.0.conv_pw", "conv_head"]
        (one,) = {
            (block.solver.name, block.solver.config.iters, block.solver.config.formulation, block.solver.config.lam)
            for block in made.values()
        }
        assert ("gate" in arm) == bool(gates_of(model))
        blends = {1.0 if block.blend is None else round(float(block.blend), 6) for block in made.values()}
        found[arm] = (*one, *blends, table.config.arms[arm].calibrate)
    assert found == {
        "normalized-raw": ("proxgd", 10, "normalized", 1e-3, 1.0, False),
        "normalized-calibrated": ("proxgd", 10, "normalized", 1e-3, 1.0, True),
        "normalized-blend-half": ("proxgd", 10, "normalized", 1e-3, 0.5, True),
        "normalized-blend-tenth": ("proxgd", 10, "normalized", 1e-3, 0.1, True),
        "normalized-iters-3": ("proxgd", 3, "normalized", 1e-3, 1.0, True),
        "gate-3": ("proxgd", 3, "normalized", 1e-3, 1.0, False),
        "gate-10": ("proxgd", 10, "normalized", 1e-3, 1.0, False),
        "paper-raw": ("proxgd", 10, "paper", 1e-3, 1.0, False),
        "paper-calibrated": ("proxgd", 10, "paper", 1e-3, 1.0, True),
    }
    arms = read_study_config(NAME, "paper").arms
    assert arms.items() > table.config.arms.items()
    assert arms.keys() - table.config.arms.keys() == {"fista-calibrated", "anderson-calibrated"}


def test_arguments_of_an_arm_are_in_place_of_the_studys():
    table = study("arms.mine={solver: fista, args: {targets: [conv1.6], lam: 0.5, gradient: implicit}}")
    options = table.conversion(table.groups()[0], "mine")
    assert (options["targets"], options["lam"], options["gradient"]) == (["conv1.6"], 0.5, "implicit")
    assert options["iters"] == 5 and "mine" in table.arms()


def test_arms_of_a_seed_begin_with_the_same_weights():
    table = ready()
    plain = begun(table, "plain")[0].state_dict()
    for arm in table.arms()[1:]:
        model, _ = begun(table, arm)
        assert list(blocks(model)) == LAYERS
        state = model.state_dict()
        assert all(torch.equal(state[key], plain[key]) for key in plain)
        gates = gates_of(model)
        assert bool(gates) == (arm == "gate") and state.keys() - plain.keys() == set(gates)
        assert not any(state[name].any() for name in gates)
    assert not torch.equal(begun(table, "plain", 1)[0].get_classifier().weight, plain["fc.weight"])


def test_weights_of_a_file_and_a_new_classifier(tmp_path):
    torch.manual_seed(5)
    trained = timm.create_model("test_resnet", num_classes=7, in_chans=1, zero_init_last=False)
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    table = ready(f"model.weights={tmp_path / 'weights.pth'}")
    plain, solved, other = (
        begun(table, arm, seed)[0] for arm, seed in (("plain", 0), ("normalized-raw", 0), ("plain", 1))
    )
    assert torch.equal(solved.get_classifier().weight, plain.get_classifier().weight)
    assert not torch.equal(other.get_classifier().weight, plain.get_classifier().weight)
    for model in (plain, solved, other):
        assert torch.equal(model.layer4[0].conv1.weight, trained.layer4[0].conv1.weight)
    # A pretrained network gets images of its own mean and spread, in all splits.
    parts, given = table._inputs(plain, cell_of(table, "plain"), Context()), table._splits()
    assert list(parts) == ["train", "validation", "test"]
    for key, part in given.items():
        expected = prepared(table.config.model, plain, part, given["train"], torch.device("cpu"), 16)
        assert torch.equal(parts[key].images, expected.images) and part.images.shape[-1] == 8


def test_similarity_is_that_of_what_the_classifier_reads():
    table = ready("calibration.batches=2", "fitting.batch_size=16", "solver.iters=4")
    model, known = begun(table, "normalized-blend-half")
    plain, none = begun(table, "plain")
    parts = table._inputs(plain, cell_of(table, "plain"), Context())
    by_hand = convert_model(
        copy.deepcopy(plain), "proxgd", iters=4, targets=LAYERS, pattern="linear-norm-act", blend=0.5,
        example_inputs=parts["train"].images[:1],
    )  # fmt: skip
    batches = table._batches(parts["train"], 0)
    assert [len(batch) for batch in batches] == [16, 16] and not torch.equal(batches[0], parts["train"].images[:16])
    calibrate(by_hand, batches, progress=False)
    read = []
    for one in (by_hand, plain, model):
        one.eval().get_classifier().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        with torch.no_grad():
            one(parts["validation"].images)
    expected = functional.cosine_similarity(read[0], read[1]).mean()
    assert known["similarity"] == pytest.approx(float(expected), abs=1e-5)
    assert known["feature_scale"] == pytest.approx(float(read[0].std() / read[1].std()), rel=1e-4)
    assert torch.allclose(read[2], read[0], atol=1e-5)
    assert none == {"similarity": 1.0, "feature_scale": 1.0}


def test_a_gate_begins_as_the_network_and_is_trained():
    table = ready("arms={gated: {args: {gate: channel}}}", "search.rates=[1e-2]")
    model, known = begun(table, "gated")
    assert known["similarity"] == pytest.approx(1, abs=1e-6) and known["feature_scale"] == pytest.approx(1, abs=1e-5)
    parts = table._inputs(model, cell_of(table, "gated"), Context())
    fitting = table.config.fitting.model_copy(update={"lr": 1e-2})
    table._train(cell_of(table, "gated"), model, parts, fitting, Context())
    assert all((gate > 0).any() for gate in gates_of(model).values())


def test_a_tuned_dropout_stands_before_the_classifier(tmp_path):
    table = ready("controls=[plain-tuned]", "search.drop_rates=[0.4]", "arms={raw: {}}", "fitting.epochs=1")
    plain = begun(table, "plain")[0]
    with seeded(table.name, 0):
        model = table.make(table.groups()[0])
        table._convert(
            cell_of(table, "plain-tuned"), model, table._inputs(model, cell_of(table, "plain"), Context()), 0.4
        )
    dropout, classifier = model.get_classifier()
    assert dropout.p == 0.4 and torch.equal(classifier.weight, plain.get_classifier().weight)
    outcome = run_study(NAME, table.config, tmp_path)
    (found,) = [cell for cell in outcome.metrics["cells"] if (cell["arm"], cell["stage"]) == ("plain-tuned", FINAL)]
    # At rate zero it is the plain network, which is searched anyway.
    assert found["p"] in (0.0, 0.4)
    with pytest.raises(SolverPluginsError, match="Unknown control 'raw-tuned'"):
        run_study(NAME, study("controls=[raw-tuned]").config, tmp_path / "other")


def test_what_calibration_does_before_finetuning():
    table = ready("arms.paper-raw={formulation: paper}")
    known = {arm: begun(table, arm)[1] for arm in table.arms()}
    raw, calibrated = known["normalized-raw"], known["normalized-calibrated"]
    assert raw["similarity"] < calibrated["similarity"] < known["normalized-blend-half"]["similarity"] < 1
    assert abs(calibrated["feature_scale"] - 1) < 0.1 < abs(raw["feature_scale"] - 1)
    # With a ReLU the formulations differ by a factor alone, which calibration takes away.
    assert known["paper-calibrated"]["similarity"] == pytest.approx(calibrated["similarity"], abs=1e-3)
    assert abs(known["paper-raw"]["similarity"] - raw["similarity"]) > 0.01


def test_the_original_network_is_an_arm_with_one_iteration_or_no_blend(tmp_path):
    changes = [
        "arms={one: {iters: 1, calibrate: true}, none: {blend: 0.0}}", "search.rates=[0.01]", "fitting.optimizer=sgd",
        "seeds=[0, 1]",
    ]  # fmt: skip
    outcome = run_study(NAME, read_study_config(NAME, "smoke", changes), tmp_path)
    found = {(cell["arm"], cell["seed"]): cell for cell in outcome.metrics["cells"]}
    for arm in ("one", "none"):
        for seed in (0, 1):
            cell, plain = found[arm, seed], found["plain", seed]
            assert cell["similarity"] == pytest.approx(1, abs=1e-5)
            assert cell["accuracy"] == plain["accuracy"] and cell["lr"] == 0.01
    assert [table.title.split(":")[0] for table in outcome.tables] == ["Accuracy on the test split", "Arms"]


def test_the_search_sees_no_test_images(tmp_path, monkeypatch):
    looked = []
    scores = DeepLayersPretrained._scores

    def look(self, model, part, *place, **more):
        looked.append("test" if part is self._parts["test"] else "validation")
        return scores(self, model, part, *place, **more)

    monkeypatch.setattr(DeepLayersPretrained, "_scores", look)
    config = read_study_config(NAME, "smoke", ["arms={raw: {}}", "search.rates=[1e-3, 1e30]"])
    outcome = run_study(NAME, config, tmp_path)
    cells = outcome.metrics["cells"]
    search, final = ([cell for cell in cells if cell["stage"] == stage] for stage in (SEARCH, FINAL))
    assert all("accuracy" not in cell and "similarity" not in cell for cell in search)
    assert {(cell["arm"], cell["lr"]) for cell in final} == {("plain", 1e-3), ("raw", 1e-3)}
    # The search of two arms, one epoch each; then two epochs each, and one look at the test split.
    assert looked == ["validation"] * 2 + ["validation", "validation", "test"] * 2
    main, arms, searched = outcome.tables
    assert [row[0] for row in main.rows] == ["plain", "raw"]
    assert arms.rows[0][:5] == ("raw", "proxgd", "5", "normalized", "no")
    assert [row[2] for row in searched.rows] == ["-", "-"]
    summary = outcome.metrics["summary"]
    assert summary["test_resnet_raw_gain"] == pytest.approx(final[1]["accuracy"] - final[0]["accuracy"])
    assert summary["test_resnet_raw_similarity"] == final[1]["similarity"]
    assert summary["test_resnet_plain_times_plain"] == 1 < summary["test_resnet_raw_times_plain"]


def measured(arm, seed, accuracy, seconds, curve):
    values = {
        "lr": 1e-3, "similarity": 0.5, "feature_scale": 2.0, "accuracy": accuracy, "diverged": accuracy is None,
        "training_cpu_seconds": seconds, "curves": {"validation_accuracy": curve},
    }  # fmt: skip
    return Measured(Cell(arm, seed, (("model", "test_resnet"), ("stage", FINAL))), values, 0.0, 0.0)


def test_the_report_counts_seed_by_seed_and_leaves_out_what_diverged():
    table = study("arms={raw: {iters: 7, args: {lam: 0.1}}}", "seeds=[0, 1]", "search.rates=[1e-3]")
    table._images = Images(*[Part(torch.zeros(3, 1, 8, 8), torch.zeros(3))] * 3, 10)
    results = Results(
        [
            measured("plain", 0, 50.0, 10.0, [20.0, 30.0]), measured("raw", 0, 53.0, 25.0, [40.0, 41.0]),
            measured("plain", 1, 60.0, 20.0, [30.0, 31.0]), measured("raw", 1, None, None, []),
        ]
    )  # fmt: skip
    main, arms = table.tables(results)
    plain, raw = (dict(zip(main.columns, row, strict=True)) for row in main.rows)
    assert (
        plain["accuracy (%)"] == "55.00 ± 7.07"
        and plain["over 'plain'"] == ""
        and plain["times 'plain'"] == "1.00 ± 0.00"
    )
    assert raw["over 'plain'"] == "+3.00 (- in 1 of 2)" and raw["seeds that gain"] == "1 of 2"
    assert raw["validation after one epoch (%)"] == "40.00 (- in 1 of 2)"
    assert raw["times 'plain'"] == "2.50 (- in 1 of 2)" and raw["training (CPU s)"] == "25.0 (- in 1 of 2)"
    assert arms.rows == [("raw", "proxgd", "7", "normalized", "no", "1", "lam=0.1")]
    summary = table.summary(results)
    assert summary["test_resnet_raw_first_epoch"] == 40.0 and summary["test_resnet_raw_times_plain"] == 2.5
    table.draw(results)


def test_an_arm_that_samples_keeps_its_calibration_with_sampling_off():
    table = ready("arms={sampled: {solver: proxsg, calibrate: true, blend: 0.5, args: {p: 0.1}}}", "trials=2")
    model, known = begun(table, "sampled")
    before = {name: (block.channel_gain, block.channel_shift) for name, block in blocks(model).items()}
    assert 0.5 < known["similarity"] < 1
    images = table._inputs(model, cell_of(table, "sampled"), Context())["test"].images
    assert not torch.equal(model.eval()(images), model(images))
    off = _sampling_off(model).eval()
    assert torch.equal(off(images), off(images))
    for name, block in blocks(off).items():
        assert torch.equal(block.channel_gain, before[name][0]) and torch.equal(block.channel_shift, before[name][1])
        assert float(block.blend) == 0.5
    table = ready("arms={sampled: {solver: proxsg, args: {p: 0.1}}}", "trials=2", "search.rates=[1e-3]")
    found = table.run(cell_of(table, "sampled"), Context())
    assert found["trial_spread"] is not None and found["deterministic_accuracy"] is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("arms={}", "at least 1"),
        ("arms.plain={}", "another name than 'plain'"),
        ("arms.first={}", "another name than 'first'"),
        ("arms.mine={solver: proxgdd}", "proxgd"),
        ("arms.mine={formulation: papers}", "'normalized' or 'paper'"),
        ("arms.mine={blend: 1.5}", "less than or equal to 1"),
        ("arms.mine={iters: 0}", "greater than or equal to 1"),
        ("arms.mine={calibrated: true}", "calibrate"),
        ("arms.mine={args: {iters: 3}}", "no 'iters' in args"),
        ("arms.mine={args: {eval_mode: stochastic}}", "no 'eval_mode' in args"),
        ("first={epochs: 1}", "no 'first'"),
        ("data.test=null", "no test"),
    ],
)
def test_wrong_settings_are_refused(change, text):
    with pytest.raises(SolverPluginsError, match=text):
        read_study_config(NAME, "smoke", [change])


@pytest.mark.parametrize(
    ("change", "text"),
    [("targets=layer9", "layer9"), ("arms.mine={args: {lamm: 1}}", "lam"), ("model.spec=hf/some-model", "timm/NAME")],
)
def test_what_cannot_be_made_is_told_before_anything_is_written(tmp_path, change, text):
    config = read_study_config(NAME, "smoke", [change, "data.train=train[:8]"])
    with pytest.raises(SolverPluginsError, match=text):
        run_study(NAME, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
