"""What the ProxProp studies measure: training, divergence, limits, the paper's networks."""

import math

import datasets
import pytest
import torch
import transformers
from torch.nn import functional

from solver_plugins.errors import OptionError
from solver_plugins.studies import STUDIES, Cell, Context, Results, read_study_config, run_study
from solver_plugins.studies.images import ImageData, Images
from solver_plugins.studies.proxprop_convergence import Training, conv_net, mlp, train_network
from solver_plugins.studies.proxprop_stability import PAPER, ProxPropStability
from solver_plugins.studies.study import Measured
from solver_plugins.studies.training import scores
from solver_plugins.train import DataError
from solver_plugins.train.tensors import Part
from tests.train.test_recipes import small_bert


@pytest.fixture(scope="module")
def images() -> Images:
    return ImageData(train="train[:60]", validation="test[:20]", test="test[20:30]").load()


def test_digits_are_read_as_they_are(images):
    from sklearn.datasets import load_digits

    found = load_digits()
    assert images.shape == (1, 8, 8) and images.classes == 10 and len(images.test) == 10
    expected = torch.tensor(found.images[:60]).round().float() / 16
    assert float((images.train.images[:, 0] - expected).abs().max()) < 1 / 255
    assert images.train.labels.tolist() == found.target[:60].tolist()


def test_the_papers_networks():
    net = mlp((3, 32, 32), [4000, 1000, 4000], 10)
    assert [tuple(p.shape) for p in net.parameters() if p.ndim == 2] == [
        (4000, 3072), (1000, 4000), (4000, 1000), (10, 4000)
    ]  # fmt: skip
    net = conv_net((3, 32, 32), [16, 20, 20], 10)
    # "-> Pool[20 x 4 x 4] -> FC": section 5.3.
    assert net[-1].in_features == 20 * 4 * 4 and net(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_plain_training_is_torchs_own(images):
    """Against a loop written out: one epoch of two batches, Nesterov momentum, in the study's order."""
    from solver_plugins.train.randomness import seed_for

    torch.manual_seed(0)
    model = mlp(images.shape, [7], 10)
    torch.manual_seed(0)
    reference = mlp(images.shape, [7], 10)
    values = train_network(model, images, Training(batch_size=30, epochs=1), "backprop", 0.1, 1.0, 5, Context())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.95, nesterov=True)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed_for(5, "order", 0)))
    for rows in (order[:30], order[30:]):
        optimizer.zero_grad()
        functional.cross_entropy(reference(images.train.images[rows]), images.train.labels[rows]).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    reference.requires_grad_(False)
    loss = float(functional.cross_entropy(reference(images.train.images), images.train.labels))
    assert values["loss"] == pytest.approx(loss, rel=1e-6) and len(values["curves"]["loss"]) == 2
    assert not values["diverged"]
    right = (reference(images.test.images).argmax(1) == images.test.labels).float().mean()
    assert values["test_accuracy"] == pytest.approx(100 * float(right))


def test_proxprop_is_attached_and_detached(images):
    torch.manual_seed(0)
    model = mlp(images.shape, [7], 10)
    before = [parameter.clone() for parameter in model.parameters()]
    values = train_network(model, images, Training(batch_size=30, epochs=1), "cg3", 0.1, 1.0, 5, Context())
    assert not values["diverged"] and not any(module._forward_hooks for module in model.modules())
    torch.manual_seed(0)
    plain = mlp(images.shape, [7], 10)
    train_network(plain, images, Training(batch_size=30, epochs=1), "backprop", 0.1, 1.0, 5, Context())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    moved = [float((a - b).detach().norm()) for a, b in zip(model.parameters(), before, strict=True)]
    explicit = [float((a - b).detach().norm()) for a, b in zip(plain.parameters(), before, strict=True)]
    # The first layer's implicit step is damped by its inputs; both are steps.
    assert 0 < moved[0] < explicit[0]


@pytest.mark.parametrize("mode", ["backprop", "exact", "cg3"])
def test_divergence_is_a_result(images, mode):
    torch.manual_seed(0)
    model = mlp(images.shape, [7, 7], 10)
    values = train_network(model, images, Training(batch_size=30, epochs=20), mode, 1e20, 1.0, 0, Context())
    assert values["diverged"] and values["loss"] is None and values["test_accuracy"] is None
    assert all(math.isfinite(value) for value in values["curves"]["loss"])


def test_evaluation_over_uneven_batches():
    torch.manual_seed(0)
    part = Part(torch.rand(1203, 1, 2, 2), torch.randint(0, 3, (1203,)))
    model = mlp((1, 2, 2), [5], 3).requires_grad_(False)
    found = scores(model, part)
    outputs = model(part.images)
    assert found.loss == pytest.approx(float(functional.cross_entropy(outputs, part.labels)), rel=1e-5)
    assert found.accuracy == pytest.approx(100 * float((outputs.argmax(1) == part.labels).float().mean()))


def test_limits_count_every_seed():
    config = read_study_config(
        "proxprop-stability", "smoke", ["arms=[backprop,cg3]", "seeds=[0,1]", "rates=[10,1,0.1]"]
    )
    study = ProxPropStability(config)

    def measured(arm, rate, seed, loss):
        return Measured(Cell(arm, seed, (("lr", rate),)), {"loss": loss, "diverged": loss is None,
                        "trained": loss is not None and loss < 2}, 0, 0)  # fmt: skip

    losses = {"backprop": {10: (None, None), 1: (None, 3.0), 0.1: (1.0, 1.0)},
              "cg3": {10: (1.0, 1.5), 1: (1.0, 1.0), 0.1: (1.0, 1.0)}}  # fmt: skip
    results = Results(
        measured(arm, rate, seed, loss)
        for arm, by_rate in losses.items()
        for rate, found in by_rate.items()
        for seed, loss in enumerate(found)
    )
    limits = study.summary(results)["limits"]
    assert limits["backprop"] == {
        "finite": 0.1, "trains": 0.1, "finite_over_backprop": 1, "trains_over_backprop": 1
    }  # fmt: skip
    assert limits["cg3"]["finite"] == 10 and limits["cg3"]["trains_over_backprop"] == pytest.approx(100)
    ours = study.tables(results)[0]
    assert ours.rows[0] == ("BackProp", "-", "3 (- in 1 of 2)", "1")
    assert ours.rows[1] == ("BackProp, paper", "-", "-", "0.524") and ours.rows[3][2] == "0.002"
    assert PAPER["cg5"][50] == 66.5


@pytest.mark.parametrize(
    ("study", "change", "message"),
    [
        ("proxprop-stability", "arms=[cg0]", "cgN"),
        ("proxprop-stability", "rates=[0]", "above zero"),
        ("proxprop-stability", "training.optimizer=sgd", "nesterov"),
        ("proxprop-convergence", "mlp.arms=[bakprop]", "cgN"),
        ("proxprop-convergence", "data.nam=x", "name"),
    ],
)
def test_mistakes(study, change, message):
    with pytest.raises(OptionError, match=message):
        read_study_config(study, "smoke", [change])


def test_data_that_is_missing_or_too_small(tmp_path):
    config = read_study_config("proxprop-stability", "smoke", ["data.name=/none"])
    with pytest.raises(DataError, match="There is no data set at '/none'"):
        run_study("proxprop-stability", config, tmp_path / "run")
    config = read_study_config("proxprop-convergence", "smoke", ["conv.filters=[2,2,2,2]"])
    with pytest.raises(DataError, match="at least 16x16 for 4 poolings; found 8x8"):
        run_study("proxprop-convergence", config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_arms_are_optimisers_with_and_without_proxprop():
    from solver_plugins.studies.proxprop_optimizers import ProxPropOptimizers
    from solver_plugins.train.optimizer import make_optimizer

    study = ProxPropOptimizers(read_study_config("proxprop-optimizers", "short", ["norm=true"]))
    study._images = Images(*[Part(torch.zeros(1, 3, 32, 32), torch.zeros(1))] * 3, 10)
    made = {}
    for arm in study.arms():
        fitting, model = study.fitting("conv-norm", arm), study.make("conv-norm")
        made[arm] = (type(make_optimizer(fitting.settings(), model)).__name__, fitting.epochs)
        section, _ = study.additions(arm).sections
        assert (section is not None and section.mode == "cg3") == arm.startswith("proxprop")
    assert made["adamw-7"] == ("AdamW", 7) and made["proxprop-muon-4"] == ("Muon", 4) == made["muon-4"]
    assert sum(isinstance(part, torch.nn.BatchNorm2d) for part in model.modules()) == 3
    # Every arm is searched at its own length, and for the first seed alone.
    search, final = study.stages()
    assert len(search) == len(made) * 5 and {cell.seed for cell in search} == {11}
    assert {cell.seed for cell in final} == {11, 12, 13} and study.config.search.epochs == 7


def test_proxprop_trains_otherwise_than_its_optimiser_alone(tmp_path):
    outcome = run_study("proxprop-optimizers", read_study_config("proxprop-optimizers", "smoke"), tmp_path)
    cells = {cell["arm"]: cell for cell in outcome.metrics["cells"] if cell["stage"] == "final"}
    assert cells["adamw-1"]["training_loss"] != cells["proxprop-adamw-1"]["training_loss"]
    accuracy, differences, arms, search = outcome.tables
    assert differences.columns == ("", "over 'adamw-1'", "over 'adamw-2'") and len(differences.rows) == 1
    assert [row[:4] for row in arms.rows][2] == ("proxprop-adamw-1", "adamw", "cg3", "1")
    assert len(accuracy.rows) == len(search.rows) == 3


def texts(folder):
    """Saves films that are good or bad, which the words tell."""
    rows = [("a good film" if place % 2 else "a film", place % 2) for place in range(24)]
    columns = {"sentence": [text for text, _ in rows], "label": [label for _, label in rows]}
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(2)})
    split = datasets.Dataset.from_dict(columns, features)
    datasets.DatasetDict(train=split, validation=split).save_to_disk(folder / "texts")
    return [
        f"data.name={folder / 'texts'}", "data.text=sentence", "data.max_length=6", "data.train=train[:12]",
        "data.validation=train[12:]", "data.test=validation", f"model={{spec: hf/{small_bert(folder / 'bert')}}}",
    ]  # fmt: skip


@pytest.mark.parametrize("scenario", ["norm", "resnet", "texts"])
def test_scenarios_of_optimisers(scenario, tmp_path):
    more = {"norm": ["norm=true"], "resnet": ["model={spec: timm/test_resnet}", "image_size=16"]}
    changes = texts(tmp_path) if scenario == "texts" else more[scenario]
    config = read_study_config("proxprop-optimizers", "smoke", [*changes, "fitting.batch_size=6"])
    outcome = run_study("proxprop-optimizers", config, tmp_path / "run")
    final = [cell for cell in outcome.metrics["cells"] if cell["stage"] == "final"]
    (network,) = {cell["network"] for cell in final}
    assert network == {"norm": "conv-norm", "resnet": "test_resnet", "texts": "bert"}[scenario]
    assert len({cell["training_loss"] for cell in final}) == 3 and all(0 < cell["loss"] < 10 for cell in final)
    assert outcome.tables[2].columns[-2:] == ("rates within 1 point", "decades")


def test_tokens_are_those_of_the_tokenizer(tmp_path):
    config = read_study_config("proxprop-optimizers", "smoke", texts(tmp_path))
    study = STUDIES.get("proxprop-optimizers")(config)
    study.prepare()
    images, model = study._images, study.make("").eval()
    assert images.classes == 2 and images.train.images.shape == (12, 2, 1, 6)
    assert images.test.labels[:3].tolist() == [0, 1, 0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    expected = tokenizer(["a film", "a good film"], return_tensors="pt", padding=True)
    with torch.no_grad():
        # Padding to the full length changes nothing but rounding.
        assert torch.allclose(model(images.train.images[:2]), model.model(**expected).logits, atol=1e-6)


def test_width_is_in_decades():
    study = STUDIES.get("proxprop-optimizers")(read_study_config("proxprop-optimizers", "smoke"))
    search = [
        Measured(Cell("a", 0, (("lr", rate),)), {"validation_accuracy": score}, 0.0, 0.0)
        for rate, score in ((1e-3, 59.2), (1e-2, 60.0), (1e-1, 58.0), (1.0, None))
    ]
    assert study._width(Results(search)) == ("2", "1.0") and study._width(Results()) == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("arms.mine={optimizer: adamw, proxprop: cg0}", "cgN"),
        ("search.epochs=1", "search.epochs of 2"),
        ("arms.mine={optimizer: adamww, epochs: 1}", "adamww"),
    ],
)
def test_wrong_arms_are_refused(change, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        run_study("proxprop-optimizers", read_study_config("proxprop-optimizers", "smoke", [change]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
