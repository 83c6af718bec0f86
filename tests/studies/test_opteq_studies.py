"""What the OptEq studies measure: training, gradients and their memory, heads on one backbone, regularisers."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from solver_plugins.equilibrium import DeepOptEq, OptEqHead, OptEqLayer
from solver_plugins.errors import OptionError, UnknownNameError
from solver_plugins.integrations.models import ModelError
from solver_plugins.studies import Cell, Context, read_study_config
from solver_plugins.studies.images import ImageData, Images, normalised
from solver_plugins.studies.opteq_alpha import OptEqAlpha, OptEqNetwork
from solver_plugins.studies.opteq_grad import MODES, OptEqGrad, _gradient, _peak_bytes, _with
from solver_plugins.studies.opteq_head import LINEAR, MLP, OPTEQ, OptEqHeadStudy
from solver_plugins.studies.opteq_regularizers import PAPER, OptEqRegularizers
from solver_plugins.studies.searched import FINAL
from solver_plugins.studies.study import mean, spread
from solver_plugins.studies.training import Fitting, fit, parameters_of
from solver_plugins.train.additions import Additions
from solver_plugins.train.randomness import seed_for
from solver_plugins.train.tensors import Part


def data(count=12, features=3):
    generator = torch.Generator().manual_seed(0)
    return Part(torch.randn(count, features, generator=generator), torch.arange(count) % 2)


def trained(model, part, settings, seed=0, **more):
    return fit(model, settings.batches(part, seed), settings.settings(), **more)


class Squares(Additions):
    """A tenth of the squares of a layer's weights."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def penalty(self, batch):
        return 0.1 * self.layer.weight.square().sum()


def test_training_is_torchs_own():
    """Against a loop written out: two epochs of two batches and a rest, step sizes along a cosine."""
    part, model = data(11), nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    settings = Fitting(lr=0.3, momentum=0.5, weight_decay=0.1, batch_size=4, epochs=2)
    done = trained(model, part, settings, 7)
    optimizer = torch.optim.SGD(reference.parameters(), 1.0, momentum=0.5, weight_decay=0.1)
    for epoch in range(2):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(seed_for(7, "order", epoch)))
        for step, rows in enumerate((order[:4], order[4:8])):
            optimizer.param_groups[0]["lr"] = 0.3 * (1 + math.cos(math.pi * (2 * epoch + step) / 4)) / 2
            loss = functional.cross_entropy(reference(part.images[rows]), part.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert done.steps == 4 and done.loss == float(loss.detach())


def test_the_papers_schedule_decays_in_steps():
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    part = data(4)
    settings = Fitting(lr=1.0, momentum=0.0, weight_decay=0.0, decay_epochs=1, decay_rate=0.25, batch_size=4, epochs=2)
    expected = before.clone().requires_grad_()
    for rate in (1.0, 0.25):
        (grad,) = torch.autograd.grad(functional.cross_entropy(part.images @ expected.T, part.labels), expected)
        expected = (expected - rate * grad).detach().requires_grad_()
    trained(model, part, settings)
    assert torch.allclose(model.weight, expected, atol=1e-6)


def test_what_is_added_to_the_loss_is_descended_on():
    """One step of size one: the difference is the gradient of what was added."""
    plain, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(plain.state_dict())
    settings = Fitting(lr=1.0, momentum=0.0, weight_decay=0.0, decay_epochs=1, batch_size=12, epochs=1)
    start = plain.weight.detach().clone()
    first = trained(plain, data(), settings)
    second = trained(other, data(), settings, additions=Squares(other))
    assert torch.allclose(plain.weight - other.weight, 0.2 * start, atol=1e-6)
    assert second.loss == pytest.approx(first.loss + 0.1 * float(start.square().sum()))


def test_training_that_diverges_is_told():
    assert trained(nn.Linear(3, 2), data(), Fitting(lr=1e30, epochs=9)).loss is None
    layer = OptEqLayer.linear(3, 3, constraint="none")
    with torch.no_grad():
        layer.W.weight.copy_(5 * torch.eye(3))
        layer.U.bias.fill_(3)
    model = DeepOptEq([layer], iters=40)
    assert trained(model, data(), Fitting(epochs=1)).loss is None


def test_what_is_missing_is_counted():
    assert spread([1.0, 3.0], ".1f") == "2.0 ± 1.4" and spread([2.0], ".1f") == "2.0"
    assert spread([1.0, None], ".1f") == "1.0 (- in 1 of 2)" and spread([None], ".1f") == "-"
    assert mean([1.0, None, 3.0]) == 2.0 and mean([None]) is None


def test_normalised_by_the_training_split():
    known, other = Part(torch.rand(5, 1, 4, 4) * 3, torch.zeros(5)), Part(torch.ones(2, 1, 4, 4), torch.zeros(2))
    found = normalised(known, known, torch.device("cpu")).images
    assert abs(float(found.mean())) < 1e-6 and abs(float(found.std()) - 1) < 1e-6
    wide = normalised(other, known, torch.device("cpu"), 8).images
    assert wide.shape == (2, 1, 8, 8)
    assert torch.allclose(wide, ((1 - known.images.mean()) / known.images.std()).expand_as(wide))


def test_bytes_that_a_call_holds():
    def call():
        first = torch.zeros(1000)
        second = first.view(10, 100).add_(1)
        del first
        return torch.ones(500) + second.flatten()[:500]

    # The zeros, the ones and their sum; views and what is changed in place are nothing new.
    assert _peak_bytes(call) == 4 * (1000 + 500 + 500)


@pytest.mark.parametrize("layers", [1, 2])
def test_all_modes_tend_to_one_gradient(layers):
    study = OptEqGrad(read_study_config("opteq-grad", "smoke"))
    wanted = study.config.maps[0].model_copy(update={"layers": layers, "width": 6, "batch": 3})
    torch.manual_seed(0)
    model, x = study._make(wanted).double(), wanted.inputs().double()
    towards = torch.randn_like(x)

    def loss(at):
        z = at.new_zeros(at.shape)
        for _ in range(600):
            for layer in model.layers:
                z = layer(z, at, model.alpha)
        return (towards * z).sum() + z.square().sum() / 2

    at = x.clone().requires_grad_()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss(at), [*model.parameters(), at])])
    for options in MODES.values():
        found = _gradient(_with(model, options["solver"], options["gradient"], 200, 1e-12), x, towards)
        # Unrolled Anderson's own steps are differentiated, too, where differences are rounding.
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_implicit_memory_stays_unrolled_grows():
    config = read_study_config("opteq-grad", "smoke").model_copy(update={"iterations": [16, 64]})
    study = OptEqGrad(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        curves = study.run(study.cells()[0], Context())["curves"]
    few, many = curves["implicit, plain"]["megabytes"]
    assert many == few
    few, many = curves["unrolled, plain"]["megabytes"]
    assert many > 2 * few
    assert all(curves[mode]["error"][1] < 1e-3 for mode in MODES)


def test_the_papers_network():
    one = Part(torch.zeros(1, 3, 32, 32), torch.zeros(1))
    images = Images(one, one, None, 10)
    for name in ("opteq-alpha", "opteq-regularizers"):
        model = read_study_config(name, "paper").network.make(images)
        assert abs(parameters_of(model) / 199_000 - 1) < 0.03
    assert OptEqNetwork().iters == 20


def test_small_alphas_need_more_iterations():
    study = OptEqAlpha(read_study_config("opteq-alpha", "smoke", ["limit=3000"]))
    study.prepare()
    test = normalised(study._images.validation, study._images.train, torch.device("cpu"))
    found = {}
    for alpha in (0.05, 1.0):
        torch.manual_seed(0)
        model = study._make("implicit", alpha)
        solver = model.equilibrium.solver
        found[alpha] = [study._iterations(model, test, name) for name in ("fixed_point", "anderson")]
        assert model.equilibrium.solver is solver
    assert found[0.05][0] > 5 * found[1.0][0] and found[0.05][1] < found[0.05][0]


def head_cell(arm):
    return Cell(arm, 0, (("backbone", "test_resnet"), ("stage", FINAL)))


def test_heads_share_a_backbone_that_stays():
    study = OptEqHeadStudy(read_study_config("opteq-head", "smoke"))
    study.prepare()
    first = study._backbone(0, Context())
    before = {name: value.clone() for name, value in first.state_dict().items()}
    values = {arm: study.run(head_cell(arm), Context()) for arm in study.arms()}
    after = study._backbones[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    features = first.num_features
    assert values[LINEAR]["head_parameters"] == features * 10 + 10
    assert values[MLP]["head_parameters"] == features * 16 + 16 + 16 * 10 + 10
    assert values[OPTEQ]["head_parameters"] == 2 * (16 * 16 + features * 16 + 16) + 16 * 10 + 10
    # A cell depends on nothing but itself.
    other = OptEqHeadStudy(study.config)
    other.prepare()
    again = other.run(head_cell(OPTEQ), Context())
    assert again["loss"] == values[OPTEQ]["loss"] != values[LINEAR]["loss"]


def test_the_whole_network_is_trained_where_it_is_not_frozen():
    changes = ["backbone.frozen=false", "backbone.train=null", "data.train=train[:32]", "fitting.epochs=1"]
    study = OptEqHeadStudy(read_study_config("opteq-head", "smoke", changes))
    study.prepare()
    seen = {}

    class Watched(OptEqHeadStudy):
        def _put(self, model, arm):
            seen["before"], seen["model"] = copy.deepcopy(model.state_dict()), model
            return super()._put(model, arm)

    watched = Watched(study.config)
    watched.prepare()
    watched.run(head_cell(OPTEQ), Context())
    assert isinstance(seen["model"].get_classifier(), OptEqHead)
    name = next(name for name, _ in seen["model"].named_parameters())
    assert not torch.equal(seen["before"][name], seen["model"].state_dict()[name])


def test_regularisers_are_chosen_or_appended():
    study = OptEqRegularizers(read_study_config("opteq-regularizers", "smoke"))
    study._images = ImageData(train="train[:10]", validation="test[:5]").load()
    made = {cell.arm: study._make(cell).equilibrium for cell in study.cells()}
    assert set(PAPER) <= set(made)
    x = torch.randn(2, study.config.network.extracted, 4, 4)
    chosen, appended = (made[f"{how} inverse_norm"].problem(x) for how in ("sam", "appended"))
    assert chosen.chosen.regularizer.name == "inverse_norm" and chosen.appended is None and chosen.chosen.lam == 1.0
    assert appended.appended.regularizer.name == "inverse_norm" and appended.chosen is None
    assert appended.appended.lam == 0.1 and made["none"].regularizer is None


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("opteq-regularizers", "chosen={half_sqared: 1}", UnknownNameError, "half_squared"),
        ("opteq-regularizers", "alphas=[0]", OptionError, "above 0"),
        ("opteq-alpha", "alphas=[2]", OptionError, "at most 1"),
        ("opteq-grad", "iterations=[0]", OptionError, "at least 1"),
        ("opteq-grad", "maps=[{}, {}]", OptionError, "differ"),
        ("opteq-head", "head.hiden=3", OptionError, "hidden"),
    ],
)
def test_wrong_settings_are_refused(name, change, error, text):
    with pytest.raises(error, match=text):
        read_study_config(name, "smoke", [change])


def test_an_unknown_backbone_is_told_before_anything_is_written():
    study = OptEqHeadStudy(read_study_config("opteq-head", "smoke", ["backbone.model.spec=timm/resnet_of_nobody"]))
    with pytest.raises(ModelError, match="resnet_of_nobody"):
        study.prepare()
