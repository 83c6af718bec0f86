"""Promise 7: what cannot be converted gets a named error that says what to do, and is as it was."""

import accelerate
import pytest
import torch
from torch import nn

from solver_plugins import convert_model
from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import ConversionError, RecordError, TargetError
from tests.promises.cases import MODELS, build, run
from tests.promises.small import ResidualNet
from tests.promises.test_4_way_back import anatomy

X = MODELS["residual"].inputs(torch.float32)


def refused(made, kind, match, **options):
    """Asserts that a conversion is refused with this error, and that nothing of the model has changed."""
    before, state = anatomy(made), {name: value.clone() for name, value in made.state_dict().items()}
    with pytest.raises(kind, match=match) as caught:
        convert_model(made, options.pop("solver", "proxgd"), **{"example_inputs": X, **options})
    assert isinstance(caught.value, SolverPluginsError)
    assert anatomy(made) == before
    after = made.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(after[name], state[name]) for name in state)


def test_wrapped_models():
    """Promise 7: DataParallel, and a compiled model. (DDP and FSDP2: with two processes.)"""
    refused(nn.DataParallel(ResidualNet()), ConversionError, r"model\.module")
    refused(torch.compile(ResidualNet()), ConversionError, "_orig_mod")


def test_models_with_hooks_of_accelerate():
    """Promise 7: an instance's forward would hide the solver; the error says how to remove it."""
    made = ResidualNet()
    accelerate.hooks.add_hook_to_module(made.fc1, accelerate.hooks.ModelHook())
    refused(made, ConversionError, "remove_hook_from_module")
    accelerate.hooks.remove_hook_from_module(made, recurse=True)
    convert_model(made, "proxgd", example_inputs=X)


def test_a_part_of_the_model_is_wrapped():
    """Promise 7: a compiled or parallel part hides what is inside of it just as well."""
    made = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(6, 5), nn.ReLU())), nn.Linear(5, 4), nn.ReLU())
    refused(made, ConversionError, "compile", example_inputs=torch.randn(2, 6))


def test_a_model_compiled_in_place():
    """Promise 7: ``model.compile()`` keeps the class and hides the forward."""
    made = ResidualNet()
    made.compile()
    refused(made, ConversionError, "compile")


@pytest.mark.parametrize("name", ["residual", "timm_vgg", "hf_roberta"])
def test_targets(name):
    """Promise 7: a regular expression that meets a Dropout, unknown names, expressions that are none."""
    example = MODELS[name].inputs(torch.float32)
    dropout = next(key for key, module in build(name).named_modules() if isinstance(module, nn.Dropout))
    refused(build(name), TargetError, "Dropout", targets=dropout.replace(".", r"\."), example_inputs=example)
    refused(build(name), TargetError, "no_such_layer", targets=["no_such_layer"], example_inputs=example)
    refused(build(name), TargetError, "regular expression", targets="fc(", example_inputs=example)
    refused(build(name), TargetError, "not empty", targets=[], example_inputs=example)


def test_nothing_to_convert():
    """Promise 7: no convertible block, with the reason for each layer."""
    lone = nn.Sequential(nn.Linear(4, 4))
    refused(lone, ConversionError, "0: ", pattern="linear-act", example_inputs=torch.randn(2, 4))
    refused(nn.Sequential(nn.ReLU()), ConversionError, "No layer", example_inputs=torch.randn(2, 4))


class TwoInputs(ResidualNet):
    """Nobody can guess what this takes."""

    def forward(self, image, *, scale):
        return super().forward(image * scale["by"])


def test_inputs_that_nobody_can_make():
    """Promise 7: the error asks for example inputs; wrong ones are told apart from missing ones."""
    refused(TwoInputs(), RecordError, "example_inputs", example_inputs=None)
    refused(TwoInputs(), RecordError, "forward pass of TwoInputs failed", example_inputs=X)
    made = convert_model(TwoInputs(), "proxgd", example_inputs={"image": X[0], "scale": {"by": 2.0}})
    assert torch.isfinite(made(X[0], scale={"by": 1.0})).all()


def test_a_refused_model_still_computes_the_same():
    """Promise 7: after an error the model is as it was, random state included."""
    made = build("residual").eval()
    expected, state = run(made, "residual"), torch.get_rng_state()
    refused(made, TargetError, "fc9", targets=["fc9"])
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(run(made, "residual"), expected)
