"""A converted model: the same function at one iteration, the same module tree and keys, and the plain model again."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from solver_plugins import conversion_of, convert_model, inspect_model, list_solvers, refresh_steps, revert_model
from solver_plugins.blocks import PassThrough, SolverBlock
from solver_plugins.errors import OptionError, WeightError
from solver_plugins.surgery import ConversionError, ConversionSpec, TargetError, plan_conversion


class ConvNet(nn.Module):
    """Every kind of block: conv-norm-act, conv-norm-skip-act, conv-act, dropout-linear-act, dropout-linear."""

    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), act()
        self.conv2, self.bn2, self.act2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), act()
        self.conv3, self.act3 = nn.Conv2d(4, 6, 3), act()
        self.drop1, self.fc1, self.act4 = nn.Dropout(0.5), nn.Linear(6, 5), act()
        self.drop2, self.fc2 = nn.Dropout(0.2), nn.Linear(5, 3)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)) + x)
        x = self.act3(self.conv3(x)).mean((2, 3))
        x = self.act4(self.fc1(self.drop1(x)))
        return self.fc2(self.drop2(x))


X = torch.randn(4, 3, 12, 11, generator=torch.Generator().manual_seed(0))


def make(**keywords):
    torch.manual_seed(0)
    return ConvNet(**keywords)


def convert(model, *args, **keywords):
    """Converts the small network of this file, whose input nobody could guess."""
    return convert_model(model, *args, **{"example_inputs": X, **keywords})


def without_dropout(model, training):
    model.train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


MODELS = {
    "convnet": (make, X),
    "prelu": (lambda: make(act=nn.PReLU), X),
    "tanh": (lambda: make(act=nn.Tanh), X),
    "timm_resnet": (lambda: timm.create_model("test_resnet", num_classes=5), torch.randn(2, 3, 64, 64)),
    "timm_efficientnet": (lambda: timm.create_model("test_efficientnet", num_classes=5), torch.randn(2, 3, 64, 64)),
    "timm_vit": (lambda: timm.create_model("test_vit", num_classes=5), torch.randn(2, 3, 160, 160)),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_iteration_is_the_same_function(name):
    """Promise 1: values, gradients and norm statistics, in training and evaluation."""
    build, x = MODELS[name]
    plain = build()
    converted = convert_model(copy.deepcopy(plain), "proxgd", iters=1, pattern="all", example_inputs=x)
    assert any(isinstance(module, SolverBlock) for module in converted.modules())
    for training in (True, False):
        a, b = without_dropout(converted, training)(x), without_dropout(plain, training)(x)
        assert torch.equal(a, b)
        for out in (a, b):
            out.square().sum().backward()
    for (key, one), (other_key, two) in zip(plain.named_parameters(), converted.named_parameters(), strict=True):
        assert key == other_key
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-6)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[key], value)


@pytest.mark.parametrize("name", MODELS)
def test_copies_keys_and_the_way_back(name):
    """Promises 2 to 4."""
    build, x = MODELS[name]
    model = build().eval()
    classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    parameters, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    expected = model(x)
    convert_model(model, "proxgd", iters=3, pattern="all", example_inputs=x)
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(state)
    changed = model(x)
    assert not torch.allclose(changed, expected)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(clone(x), changed)
        assert torch.equal(revert_model(clone)(x), expected)
    with pytest.raises(ConversionError, match="converted already"):
        convert_model(model, "proxgd")
    revert_model(model)
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(model(x), expected)
    with pytest.raises(ConversionError, match="without a solver block"):
        revert_model(model)


def reference_iterations(chain, activation, u, c, L, iters, lam=1e-3):
    """Prox-GD that knows only the plain chain (A t = chain(t) - chain(0)), its vjp, and the activation as called."""
    offset = chain(torch.zeros_like(u))
    adjoint = torch.func.vjp(chain, u)[1]
    v = c
    for _ in range(iters - 1):
        x = activation(v)
        v = x - (chain(adjoint(x)[0]) - offset + lam * x) / (L + lam) + c
    return v


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.PReLU, nn.Hardtanh])
def test_three_iterations_agree_with_a_reference_that_knows_only_the_plain_modules(act):
    plain = make(act=act).double()
    with torch.no_grad():
        for _ in range(3):
            plain.train()(X.double())
        for norm in (plain.bn1, plain.bn2):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    plain.eval()
    model = convert(copy.deepcopy(plain), "proxgd", iters=3, pattern="all", example_inputs=X.double()).eval()
    found = {}
    for name in ("bn1", "act2", "conv3"):
        module = getattr(model, name)
        module.register_forward_hook(lambda module, args, out, name=name: found.update({name: out.detach()}))
    model(X.double())

    x = X.double()
    c = plain.bn1(plain.conv1(x))
    v = reference_iterations(lambda t: plain.bn1(plain.conv1(t)), plain.act1, x, c, model.conv1.L, 3)
    torch.testing.assert_close(found["bn1"], v, rtol=1e-9, atol=1e-10)
    u = plain.act1(v)
    c = plain.bn2(plain.conv2(u)) + u
    v = reference_iterations(lambda t: plain.bn2(plain.conv2(t)), plain.act2, u, c, model.conv2.L, 3)
    torch.testing.assert_close(found["act2"], plain.act2(v), rtol=1e-9, atol=1e-10)
    u = plain.act2(v)
    v = reference_iterations(plain.conv3, plain.act3, u, plain.conv3(u), model.conv3.L, 3)
    torch.testing.assert_close(found["conv3"], v, rtol=1e-9, atol=1e-10)


def test_training_folds_batch_statistics_and_gradients_flow():
    model = convert(make(), "proxgd", iters=4, pattern="all").train()
    # Norms and skips multiply the scale of such a network: steps of 1e-2 make the training itself diverge.
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        losses.append(loss.item())
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    saved = copy.deepcopy(model)
    assert torch.equal(saved.eval()(X), model.eval()(X))


def test_zero_scales_do_not_void_the_constant():
    """A residual branch that starts closed (gamma = 0) has a finite step, then and after it has opened."""
    plain = make()
    nn.init.zeros_(plain.bn2.weight)
    model = convert(plain, "proxgd", iters=5, pattern="all").train()
    assert torch.isfinite(model(X)).all() and model.conv2.L > 0
    with torch.no_grad():
        model.bn2.weight.fill_(0.3)
    assert torch.isfinite(model(X)).all()


def test_vgg16_as_the_issue_says():
    model = timm.create_model("vgg16", drop_rate=0.5, num_classes=10)
    plan = plan_conversion(model, ConversionSpec(solver="proxsg"))
    assert [(one.block.name, one.block.pattern, one.p) for one in plan.selection.chosen] == [
        ("pre_logits.fc2", "dropout-linear-act", 0.5),
        ("head.fc", "dropout-linear", 0.5),
    ]
    assert plan.solver_for(plan.selection.chosen[0]).tau(4096) == 2048


@pytest.mark.parametrize("name", list_solvers())
def test_every_solver_converts_and_trains(name):
    options = {"p": 0.3} if name in ("proxsg", "ms2gd", "rcd") else {}
    model = convert(make(), name, iters=3, pattern="all", **({"p": 0.3} if name in ("s2gd", "svrg") else options))
    model.train()(X).sum().backward()
    found = [module for module in model.modules() if isinstance(module, SolverBlock)]
    assert len(found) == 5
    assert {module.link is None for module in found} == {True, False}


def test_a_sampling_solver_takes_the_dropout_over():
    model = convert(make(), "proxsg", iters=4)
    assert isinstance(model.drop1, PassThrough) and isinstance(model.drop1, nn.Dropout)
    assert model.fc1.solver.config.p == 0.5 and model.fc2.solver.config.p == 0.2
    assert not torch.equal(model(X), model(X))
    model.eval()
    assert torch.equal(model(X), model(X))
    deterministic = convert(make(), "proxgd", iters=4)
    assert type(deterministic.drop1) is nn.Dropout, "a deterministic solver leaves dropout live"


def test_a_copy_is_converted_with_its_own_partners():
    plain = make(act=nn.PReLU)
    converted = convert(plain, "proxgd", iters=2, inplace=False)
    assert not any(isinstance(module, SolverBlock) for module in plain.modules())
    assert converted.fc1.prior.module is converted.act4


def test_everything_or_nothing(monkeypatch):
    model = make()
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        model.fc2.weight.fill_(torch.nan)
    with pytest.raises(WeightError, match=r"^fc2: Expected finite weights; found"):
        convert(model, "proxgd", pattern="all")
    with pytest.raises(WeightError, match=r"^fc2: Expected finite weights; found"):
        inspect_model(model, "proxgd", pattern="all", example_inputs=X)
    assert [type(module) for module in model.modules()] == classes
    assert all(type(module.__dict__.get("L", None)) is type(None) for module in model.modules())


def test_bad_input():
    with pytest.raises(ConversionError, match="unwrap"):
        convert_model(nn.DataParallel(make()))
    with pytest.raises(ConversionError, match="_orig_mod"):
        convert_model(torch.compile(make()))
    with pytest.raises(OptionError, match="iters"):
        convert(make(), "proxgd", itres=3)
    with pytest.raises(OptionError, match=r"solver 'proxgd' has no option 'target'. Did you mean 'targets'"):
        convert(make(), "proxgd", target=["fc1"])
    with pytest.raises(OptionError, match="Did you mean 'inplace'"):
        convert(make(), "proxgd", in_place=False)
    with pytest.raises(TargetError, match="fc9"):
        convert(make(), "proxgd", targets=["fc9"])
    with pytest.raises(ConversionError, match="No layer of this Sequential"):
        convert_model(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "proxsg", exclude="0", example_inputs=torch.ones(2, 3))
    hooked = make()
    hooked._hf_hook = object()
    with pytest.raises(ConversionError, match="accelerate"):
        convert_model(hooked)
    with pytest.raises(OptionError, match=r"torch\.nn\.Module"):
        convert_model("vgg16")


def test_coordinates_leave_a_dropout_before_the_layer_live():
    model = convert(make(), "rcd", iters=3, p=0.3, targets=["fc1"])
    assert isinstance(model.fc1, SolverBlock) and type(model.drop1) is nn.Dropout


def test_a_folded_norm_that_moves_alone():
    """Weights stand still, running statistics and scales do not: evaluation still equals save and load."""
    model = convert(make(), "proxgd", iters=4, pattern="all").train()
    with torch.no_grad():
        for _ in range(5):
            model(3 * X + 1)
        model.bn1.weight.mul_(2)
    fresh = convert(make(), "proxgd", iters=4, pattern="all")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(X), fresh.eval()(X))


def test_constants_of_a_chain_keep_their_precision():
    model = convert(make(), "proxgd", iters=3, pattern="all").eval().bfloat16()
    assert model.conv1.L.dtype == model.conv1.diagonal_reference.dtype == torch.float32
    assert torch.isfinite(model(X.bfloat16())).all()


@pytest.mark.parametrize("pattern", ["linear-act", "linear-norm-act"])
def test_a_weight_that_moves_when_looked_at_does_not(pattern):
    """spectral_norm in training mode takes a step whenever its weight is computed."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(4)] if pattern == "linear-norm-act" else []
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), *norms, nn.ReLU()).train()
    plain, x = copy.deepcopy(model), torch.randn(5, 6)

    def same(other):
        return all(torch.equal(value, plain.state_dict()[name]) for name, value in other.state_dict().items())

    inspect_model(model, "proxgd", pattern=pattern, example_inputs=x)
    assert same(model)
    convert_model(model, "proxgd", iters=3, pattern=pattern, example_inputs=x)
    assert same(model)
    assert same(model.double().float()) and model[0].training and model[0].parametrizations.weight[0].training
    model.load_state_dict(plain.state_dict())
    assert same(model)
    refresh_steps(model)
    conversion_of(model)
    assert same(model)
    revert_model(model)
    assert same(model)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": "yes"}, "Expected last to be True, False or None; found 'yes'"),
        ({"last": 1}, "Expected last to be True, False or None; found 1"),
        ({"inplace": "no"}, "Expected inplace to be True or False; found 'no'"),
    ],
)
def test_words_are_no_flags(options, message):
    model = make()
    with pytest.raises(OptionError, match=message):
        convert(model, "proxgd", **options)
    assert not any(isinstance(module, SolverBlock) for module in model.modules())


def test_names_of_layers_are_never_empty():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    for option in ("targets", "exclude"):
        with pytest.raises(TargetError, match=r"Options: 0[,.]"):
            convert_model(model, "proxgd", example_inputs=torch.randn(2, 3), **{option: ["zz"]})


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_layer_to_see_says_why():
    x, plain = torch.randn(2, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear})
    for model, reason in (
        (torch.jit.script(plain), "before torch.jit.script"),
        (quantised, "0 is a Linear, whose weights are quantised"),
        (nn.Sequential(nn.ReLU()), "met no linear layer or convolution"),
    ):
        with pytest.raises(ConversionError, match=reason):
            convert_model(model, "proxgd", example_inputs=x)
