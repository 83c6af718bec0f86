"""Real models of timm and transformers in a plain loop."""

import copy

import pytest
import timm
import torch
from torch import nn

from solver_plugins import ProxProp, convert_model
from solver_plugins.errors import SolverPluginsError
from tests.surgery.models import bert, gpt2, vit


def images(name):
    return timm.create_model(name, num_classes=3), {"x": torch.randn(4, 3, 64, 64)}


def texts(model):
    return model, {"input_ids": torch.randint(0, 64, (4, 12)), "labels": torch.tensor([0, 1, 2, 0])}


CASES = {
    "resnet18": lambda: images("resnet18"),
    "timm vit": lambda: (
        timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64, depth=2),
        {"x": torch.randn(4, 3, 64, 64)},
    ),
    "mobilenet": lambda: images("mobilenetv3_small_050"),
    "bert": lambda: texts(bert()),
    "gpt2": lambda: texts(gpt2()),
    "vit": lambda: (vit(), {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 0])}),
}


@pytest.mark.parametrize("mode", ["exact", "cg3"])
@pytest.mark.parametrize("name", CASES)
def test_a_few_steps_descend(name, mode):
    model, inputs = CASES[name]()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    prox = ProxProp(model, mode, gram="mean").attach(optimizer)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(**inputs)
        labels = torch.tensor([0, 1, 2, 0])
        loss = output.loss if hasattr(output, "loss") else torch.nn.functional.cross_entropy(output, labels)
        loss.backward()
        plain = {name: layer_gradient(model, name) for name in prox.layers}
        optimizer.step()
        losses.append(loss.item())
        for name in prox.last_step:
            direction = layer_gradient(model, name)
            # Residual branches that start closed have no gradient in the first step.
            if plain[name].any():
                assert float(direction @ plain[name]) > 0 and not torch.equal(direction, plain[name])
    skipped = set(prox.layers) - set(prox.last_step)
    assert len(skipped) == 1 and skipped.pop().split(".")[0] in {"score", "classifier", "fc", "head"}
    assert losses[-1] < losses[0]


def layer_gradient(model, name):
    parameters = model.get_submodule(name).parameters()
    return torch.cat([parameter.grad.reshape(-1) for parameter in parameters])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_features_are_left_alone_or_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 0), nn.ReLU(), nn.Linear(0, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    with pytest.raises(SolverPluginsError, match="nothing to solve"):
        convert_model(copy.deepcopy(model), solver="proxgd", targets=["0"], example_inputs=x)
    with pytest.raises(SolverPluginsError, match="nothing to solve"):
        ProxProp(model, targets=["2"])
    converted = convert_model(
        copy.deepcopy(model), solver="proxgd", iters=1, targets=["4"], pattern="linear", example_inputs=x
    )
    torch.testing.assert_close(converted(x), model(x))
    prox = ProxProp(model, "cg3")
    assert prox.layers == ["4", "5"] and "nothing to solve" in prox.skipped["0"]
    model(x).sum().backward()
    prox.precondition()
