"""Heads on frozen features: what a situation draws, what the arms share, and solves that leave out what is missing."""

import pytest
import torch
from torch import nn

from solver_plugins import convert_model
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import OptionError
from solver_plugins.studies import Cell, Context, read_study_config, run_study
from solver_plugins.studies.comparison import losses
from solver_plugins.studies.deeplayers_heads import DeepLayersHeads, Observed
from solver_plugins.studies.searched import FINAL, SEARCH

NAME = DeepLayersHeads.name
SITUATIONS = (
    "situations={few: {images: 20}, more: {images: 30}, wrong: {images: 20, wrong_labels: 0.25}, "
    "missing: {images: 20, missing: 0.5}}"
)


@pytest.fixture(scope="module")
def table():
    found = DeepLayersHeads(read_study_config(NAME, "smoke", [SITUATIONS, "controls=[none, linear]"]))
    found.prepare()
    return found


def inputs(table, situation, seed=0):
    return table._inputs(nn.Identity(), Cell("dropout", seed, (("situation", situation), ("stage", FINAL))), Context())


def made(table, arm, p=None):
    torch.manual_seed(0)
    return table._solved(table.make("few"), "few", arm, table._example(), p)


def test_features_are_standardised_and_stay(table):
    parts = table._ready(nn.Identity(), Context())
    assert list(parts) == ["train", "validation", "test"]
    known = parts["train"].images
    assert known.shape == (200, table.backbone().num_features) and known.mean(0).abs().max() < 1e-4
    varying = known.std(0) > 0.5
    assert varying.any() and torch.allclose(known.std(0)[varying], torch.ones(()), atol=1e-4)
    assert not table.backbone().training and table._ready(nn.Identity(), Context()) is parts


def test_a_situation_is_drawn_by_seed(table):
    few, again, other = inputs(table, "few"), inputs(table, "few"), inputs(table, "few", 1)
    assert len(few["train"]) == 20 and torch.equal(few["train"].images, again["train"].images)
    assert not torch.equal(few["train"].images, other["train"].images)
    # More images are those of the smaller draw, and others.
    assert torch.equal(inputs(table, "more")["train"].images[:20], few["train"].images)
    assert few["test"] is table._parts["test"]


def test_wrong_labels_are_those_of_other_classes(table):
    few, wrong = inputs(table, "few"), inputs(table, "wrong")
    assert torch.equal(few["train"].images, wrong["train"].images)
    assert int((few["train"].labels != wrong["train"].labels).sum()) == 5
    assert int(wrong["train"].labels.min()) >= 0 and int(wrong["train"].labels.max()) < 10
    assert all(torch.equal(few[key].labels, wrong[key].labels) for key in ("validation", "test"))


def test_missing_features_are_the_mean_in_all_splits(table):
    few, missing = inputs(table, "few"), inputs(table, "missing")
    for key in ("train", "validation", "test"):
        gone = missing[key].images != few[key].images
        # Features that never vary are the mean anyway.
        assert 0.4 < float(gone[:, gone.any(0)].float().mean()) < 0.6 and not missing[key].images[gone].any()
        assert not torch.equal(gone[0], gone[1])
        assert torch.equal(inputs(table, "missing")[key].images, missing[key].images)


def test_arms_begin_with_the_same_weights(table):
    plain = made(table, "dropout").state_dict()
    x = torch.randn(3, table.backbone().num_features)
    blocks = {}
    for arm in ("proxsg", "proxgd", "observed", "observed-tuned", "proxgd-tuned", "none"):
        model = made(table, arm, 0.2 if arm.endswith("tuned") else None)
        assert all(
            torch.equal(one, plain[key.replace("hidden.layer", "hidden")]) for key, one in model.state_dict().items()
        )
        blocks[arm] = sum(isinstance(part, SolverBlock) for part in model.modules())
        # In evaluation nothing is drawn.
        assert torch.equal(model.eval()(x), model(x))
    assert blocks == {"proxsg": 1, "proxgd": 1, "observed": 0, "observed-tuned": 0, "proxgd-tuned": 1, "none": 0}
    assert made(table, "observed-tuned", 0.2).drop.p == made(table, "proxgd-tuned", 0.2).drop.p == 0.2
    assert made(table, "proxgd-tuned", 0.0).drop.p == 0
    linear = made(table, "linear")
    layers = [part for part in linear.modules() if list(part.parameters(recurse=False))]
    assert len(layers) == 1 and (layers[0].in_features, layers[0].out_features) == (x.shape[1], 10)


def test_an_observed_layer_without_missing_features_is_proxgd():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 7), nn.ReLU()).double()
    solved = nn.Sequential(Observed(plain[0], 6, 1e-2), nn.ReLU())
    x = torch.randn(5, 12, dtype=torch.float64)
    found = solved(x)
    converted = convert_model(plain, "proxgd", iters=6, lam=1e-2, targets=["0"], example_inputs=x, inplace=False)
    # The constant of the library is certified: a bound just above the exact one.
    assert torch.allclose(found, converted(x), rtol=1e-2, atol=1e-3)


def test_an_observed_layer_solves_the_problem_of_what_is_there():
    torch.manual_seed(0)
    layer = nn.Linear(12, 4).double()
    x = torch.randn(3, 12, dtype=torch.float64)
    x[:, ::2] = 0
    found = Observed(layer, 4000, 0.5)(x).relu()
    A, there = layer.weight, torch.arange(12) % 2 == 1
    L = torch.linalg.matrix_norm(A, 2).square() + 0.5
    gradient = (found @ (A[:, there] @ A[:, there].T) + 0.5 * found) / L - layer(x)
    # The optimality conditions of: half of x'(A M A' + lam)x / L - (A u + b)'x, for x that are not negative.
    assert gradient.min() > -1e-9 and (gradient * found).abs().max() < 1e-9 and found.any()


def test_a_run_searches_each_situation_and_reports_losses(tmp_path):
    changes = ["controls=[none, observed-tuned]", "search.rates=[1e-2]", "fitting.epochs=1", "seeds=[0, 1]"]
    outcome = run_study(NAME, read_study_config(NAME, "smoke", changes), tmp_path)
    cells = outcome.metrics["cells"]
    search, final = ([cell for cell in cells if cell["stage"] == stage] for stage in (SEARCH, FINAL))
    assert {cell["arm"] for cell in search} == {"dropout", "proxsg", "proxgd", "observed", "none", "observed-tuned"}
    assert all("accuracy" not in cell for cell in search) and all(0 <= cell["ece"] <= 100 for cell in final)
    assert {cell["p"] for cell in final if cell["arm"] == "observed-tuned"} <= {0.2, 0.5}
    main, *_, likelihood = outcome.tables
    assert {"NLL", "ECE (%)", "training (CPU s)"} <= set(main.columns)
    assert likelihood.columns == ("", "over 'dropout'", "over 'none'")
    by_hand = [
        next(c["loss"] for c in final if (c["situation"], c["arm"], c["seed"]) == ("few", "proxsg", seed))
        - next(c["loss"] for c in final if (c["situation"], c["arm"], c["seed"]) == ("few", "none", seed))
        for seed in (0, 1)
    ]
    assert likelihood.rows[0][0] == "few, proxsg" and likelihood.rows[0][2].startswith(f"{sum(by_hand) / 2:+.3f} ± ")
    assert losses([], [], [], [0]).rows == []


@pytest.mark.parametrize(
    ("change", "text"),
    [("situations.few.images=201", "at most 200"), ("situations={}", "at least 1"), ("controls=[lineer]", "linear")],
)
def test_wrong_settings_are_refused(change, text, tmp_path):
    with pytest.raises(OptionError, match=text):
        run_study(NAME, read_study_config(NAME, "smoke", [change]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
