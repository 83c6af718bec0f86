"""A conversion written down, read again, and done to another copy of the plain model."""

import copy

import pytest
import torch
from torch import nn

from solver_plugins import apply_conversion, conversion_of, convert_model, load, save
from solver_plugins.errors import OptionError, SolverPluginsError
from solver_plugins.prox import Monotone, declare_activation
from solver_plugins.surgery import Conversion, ConversionError
from tests.surgery.small import Model
from tests.surgery.test_convert import MODELS, convert, make


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name):
    """Plain weights and a JSON text give the converted model again, without a look at its forward pass."""
    build, x = MODELS[name]
    torch.manual_seed(0)
    plain = build().eval()
    converted = convert_model(copy.deepcopy(plain), "fista", iters=3, pattern="all", example_inputs=x, lam=0.01)
    text = conversion_of(converted).to_json()
    again = build().eval()
    again.load_state_dict(converted.state_dict())
    apply_conversion(again, Conversion.from_json(text))
    assert torch.equal(again(x), converted(x))
    assert conversion_of(again).to_json() == text


def test_whole_numbers_stay_whole():
    """The axis of a softmax is no float, also after JSON."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=-1)).eval()
    x = torch.rand(2, 4)
    again = copy.deepcopy(model)
    convert_model(model, "proxgd", iters=3, pattern="all", example_inputs=x)
    apply_conversion(again, Conversion.from_json(conversion_of(model).to_json()))
    assert torch.equal(again(x), model(x))


def test_rates_dropouts_and_parameters():
    model = convert(make(act=nn.LeakyReLU), "proxsg", iters=4, decay=0.8)
    conversion = conversion_of(model)
    assert [(block.layer, block.settings["p"], block.settings["decay"]) for block in conversion.blocks] == [
        ("fc1", 0.5, 0.8),
        ("fc2", 0.2, 0.8),
    ]
    assert conversion.passed_over == ("drop1", "drop2")
    assert conversion.blocks[0].parameters == {"negative_slope": 0.01}


def test_bad_input():
    conversion = conversion_of(convert(make(), "proxgd", pattern="all"))
    with pytest.raises(ConversionError, match="has no act2, bn1, bn2, conv1, conv2"):
        apply_conversion(nn.Sequential(nn.Linear(2, 2)), conversion)
    with pytest.raises(ConversionError, match="converted already"):
        apply_conversion(convert(make(), "proxgd"), conversion)
    with pytest.raises(ConversionError, match="without a solver"):
        conversion_of(make())
    with pytest.raises(OptionError, match="format"):
        Conversion.from_json(conversion.to_json().replace('"format": 2', '"format": 3'))
    broken = make()
    classes = [type(module) for module in broken.modules()]
    with torch.no_grad():
        broken.fc2.weight.fill_(torch.inf)
    with pytest.raises(SolverPluginsError, match="finite"):
        apply_conversion(broken, conversion)
    assert [type(module) for module in broken.modules()] == classes


class Algebraic(nn.Module):
    """An activation of the user's."""

    def forward(self, v):
        return v / (1 + v * v).sqrt()


def test_a_function_of_the_users_has_no_name():
    declare_activation(Algebraic, Monotone(Algebraic()))
    model = convert(make(act=Algebraic), "proxgd")
    with pytest.raises(ConversionError, match="cannot be written down"):
        conversion_of(model)


CLIPS = {
    "clamp": (lambda z: z.clamp(min=0), "relu"),
    "clamp_min": (lambda z: z.clamp_min(0), "relu"),
    "clip": (lambda z: torch.clip(z, min=0), "relu"),
    "threshold": (lambda z: nn.functional.threshold(z, 0, 0), "relu"),
    "hardtanh": (lambda z: nn.functional.hardtanh(z, 0, float("inf")), "relu"),
    "other_clamp": (lambda z: z.clamp(min=-0.5), "hardtanh"),
    "clamp_max": (lambda z: z.clamp_max(0.5), "hardtanh"),
    "other_threshold": (lambda z: nn.functional.threshold(z, 0.25, 0.25), "hardtanh"),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_without_a_bound_is_written_down(name, tmp_path):
    activation, prior = CLIPS[name]

    def build():
        return Model(lambda self, x: self.fc2(activation(self.fc1(x))), fc1=nn.Linear(6, 5), fc2=nn.Linear(5, 2)).eval()

    x = torch.randn(4, 6)
    model = convert_model(build(), "proxgd", iters=3, example_inputs=x)
    written = conversion_of(model)
    assert [block.prior for block in written.blocks] == [prior]
    again = build()
    again.load_state_dict(model.state_dict())
    apply_conversion(again, Conversion.from_json(written.to_json()))
    assert torch.equal(again(x), model(x)) and again.fc1.prior == model.fc1.prior
    save(model, tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved", model=build())(x), model(x))
