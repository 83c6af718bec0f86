"""Solvers in residual blocks of torchvision, timm and transformers, against the block written out by hand."""

import copy

import peft
import pytest
import timm
import torch
import torchvision
from timm.utils import reparameterize_model
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter

from solver_plugins import convert_model, revert_model
from tests.blocks.linked import ITERS, assert_same, assert_same_or_refused, diagonal, lively, results, solved
from tests.blocks.linked_models import CASES, build, convert_block, image, output, solve_block, solvers_of

# PEFT 0.21 asks transformers by a name that transformers 5.23 has given up.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1:UserWarning"),
]

MODELS = pytest.mark.parametrize("name", CASES)
RESNETS = pytest.mark.parametrize("name", ["torchvision", "timm", "transformers"])
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def step(model, x):
    """Returns output and gradients by name, with the names that PEFT gives taken off again."""
    found = results(lambda x: output(model, x), model, x)
    return {name.replace("base_model.model.", "").replace(".base_layer", ""): value for name, value in found.items()}


@MODELS
@TRAINING
def test_a_step(name, training):
    plain, x = build(name), image()
    made = convert_block(plain, name).train(training)
    expected = solve_block(plain, solvers_of(made, name), name).train(training)
    assert_same(step(made, x), step(expected, x), 1e-7)


@MODELS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name, mode):
    plain, x = build(name), image()
    made = convert_block(plain, name)
    plain = solve_block(plain, solvers_of(made, name), name)
    with mode():
        assert_same(output(made, x), output(plain, x))


@MODELS
@TRAINING
def test_lora(name, training):
    """An adapter adds to what the convolution returns: ``result = base(x) + lora(x)``."""
    plain, x = build(name), image()
    made = convert_block(plain, name)
    solvers = solvers_of(made, name)
    ends = [one for one in CASES[name].names if plain.get_submodule(one).groups == 1]
    wrapped = []
    for model in (made, plain):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=ends, init_lora_weights=False, lora_dropout=0.0)
        wrapped.append(peft.get_peft_model(model, config).double().train(training))
    solve_block(plain, solvers, name)
    assert_same(*(step(model, x) for model in wrapped), 1e-7)


@RESNETS
@pytest.mark.parametrize("part", ["convolution", "norm"])
@pytest.mark.parametrize("position", [0, -1], ids=["first", "last"])
@TRAINING
def test_modules_to_save_at_one_iteration(name, part, position, training):
    """PEFT trains a copy of a module: at one iteration this is the plain model with the same copy, or refused."""
    plain, x = build(name), image()
    made = convert_block(plain, name, iters=1)
    conv, norm = CASES[name].parts[position]
    saved = f"{CASES[name].block}.{conv if part == 'convolution' else norm}"

    def run(model):
        return step(with_copy(model, saved, name).train(training), x)

    assert_same_or_refused(lambda: run(made), run(plain), rtol=1e-7)


@RESNETS
@pytest.mark.parametrize("part", ["convolution", "norm"])
@pytest.mark.parametrize("position", [0, -1], ids=["first", "last"])
def test_modules_to_save_with_a_solver(name, part, position):
    """With more iterations it is the solver of the copy's weights, also after they have been trained, or refused."""
    plain, x = build(name), image()
    made = convert_block(plain, name)
    conv, norm = CASES[name].parts[position]
    saved = f"{CASES[name].block}.{conv if part == 'convolution' else norm}"
    with torch.no_grad():
        plain.get_submodule(saved).weight.mul_(1.3)
    trained = convert_block(plain, name)
    expected = output(solve_block(plain, solvers_of(trained, name), name), x).detach()
    with torch.no_grad():
        assert_same_or_refused(lambda: output(with_copy(made, saved, name).eval(), x), expected)


def with_copy(model, saved, name):
    """Returns the model with a copy of one module that PEFT trains, after a step of that training."""
    torch.manual_seed(0)
    head = "classifier.1" if name == "transformers" else "fc"
    config = peft.LoraConfig(r=2, target_modules=[head], modules_to_save=[saved], lora_dropout=0.0)
    wrapped = peft.get_peft_model(model, config).double()
    with torch.no_grad():
        (copied,) = [value for key, value in wrapped.named_parameters() if "modules_to_save.default.weight" in key]
        copied.mul_(1.3)
    return wrapped


@pytest.mark.parametrize(
    ("name", "iters"),
    [
        ("repvit_m0_9", 3),
        ("mobileone_s0", 3),
        ("mobileone_s0", 1),
        ("fastvit_t8", 3),
        ("repvgg_a0", 3),
        ("repvgg_a0", 1),
    ],
)
def test_reparameterized(name, iters):
    """timm fuses branches into one convolution: the same output as before, or refused, at the latest when it runs."""
    plain = timm.create_model(name, num_classes=5).eval()
    if name == "repvgg_a0":  # closed branches, as it is built
        for norm in (module for module in plain.modules() if isinstance(module, nn.BatchNorm2d)):
            lively(norm)
    x = torch.randn(2, 3, 64, 64)
    # Certificates of all kernels take seconds.
    targets = None if name == "repvit_m0_9" else r"stem\..*|stages\.0\..*"
    made = convert_model(
        copy.deepcopy(plain), "proxgd", iters, pattern="all", targets=targets, blend=0.1, example_inputs=x
    )
    with torch.no_grad():
        expected = made(x)
        lost = (expected - plain(x)).norm() / expected.norm()
        assert iters == 1 or lost > 0.01, "a lost solver would be seen"
        assert_same_or_refused(lambda: reparameterize_model(made)(x), expected, rtol=1e-4)
        # A copy was fused.
        assert_same(made(x), expected, 1e-4)
        assert_same(reparameterize_model(revert_model(made))(x), plain(x), 1e-4)


@TRAINING
@pytest.mark.parametrize("way", ["children", "IntermediateLayerGetter", "forward_features", "forward_intermediates"])
def test_a_backbone_without_its_head(way, training):
    """The stem's chain is in the model itself, whose forward is passed by here."""
    library = torchvision.models if way in ("children", "IntermediateLayerGetter") else timm.models.resnet
    plain, x = library.resnet18().double(), image()
    made = convert_model(copy.deepcopy(plain), "proxgd", ITERS, targets="conv1", pattern="all", example_inputs=x)
    plain.train(training), made.train(training)

    def expected(x):
        y = plain.conv1(x)
        x = torch.relu(solved(made.conv1, plain.conv1, x, plain.bn1(y), diagonal(plain.bn1, y)))
        return plain.layer4(plain.layer3(plain.layer2(plain.layer1(plain.maxpool(x)))))

    run = {
        "children": lambda: nn.Sequential(*list(made.children())[:-2]),
        "IntermediateLayerGetter": lambda: lambda x: IntermediateLayerGetter(made, {"layer4": "out"})(x)["out"],
        "forward_features": lambda: made.forward_features,
        "forward_intermediates": lambda: lambda x: made.forward_intermediates(x)[0],
    }[way]()
    assert_same(results(run, made, x), results(expected, plain, x), 1e-7)
