"""``convert_model(model, solver="proxsg", iters=10)`` works on every backbone; here on a sample of both libraries."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from solver_plugins import convert_model, revert_model
from solver_plugins.blocks import SolverBlock, blocks_of
from solver_plugins.integrations.architectures import LeNet
from tests.coverage import transformers_models
from tests.coverage.sample import CI
from tests.surgery.literal import literal_call, outputs_of
from tests.surgery.models import MODELS
from tests.surgery.small import Model

OWN_RATES = {"ghostnet_050": 0.2, "legacy_seresnet18": 0.2, "repghostnet_050": 0.2, "rexnet_100": 0.2}
"""Models with a live dropout as timm makes them."""
NO_DROPOUT = ("shvit_s1",)
"""Models that have no dropout whatever ``drop_rate`` is."""
KINDS = dict(transformers_models.names())


@pytest.mark.parametrize("name", CI["timm"])
def test_sample_of_timm(name: str) -> None:
    plain = literal_call(timm.create_model(name, num_classes=10))
    assert set(plain.rates.values()) == {OWN_RATES.get(name, 0.5)} and (plain.source == "head") != (name in OWN_RATES)
    live = literal_call(timm.create_model(name, num_classes=10, drop_rate=0.3))
    ignored = name in NO_DROPOUT
    assert set(live.rates.values()) == {0.5 if ignored else 0.3} and (live.source == "head") == ignored


@pytest.mark.parametrize("name", CI["transformers"])
def test_sample_of_transformers(name: str) -> None:
    assert literal_call(transformers_models.build(name, KINDS[name])).rates


class Shared(nn.Module):
    """One dropout for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc1, self.act, self.fc2 = nn.Dropout(0.4), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(self.drop(x)))))


def functional() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.fc1(nn.functional.dropout(x, m.rate, m.training)))
        return m.fc2(nn.functional.dropout(x, m.rate, m.training))

    made = Model(forward, fc1=nn.Linear(12, 9), fc2=nn.Linear(9, 3))
    made.rate = 0.3
    return made


ROWS = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
IDS = {"input_ids": torch.arange(2, 18).repeat(2, 1)}
TEN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "module": (lambda: LeNet(drop_rate=0.5), IMAGES[..., :32, :32]),
    "module, timm": (lambda: timm.create_model("test_efficientnet", drop_rate=0.2, num_classes=5), IMAGES),
    "shared": (Shared, ROWS),
    "shared, transformers": (MODELS["roberta"], IDS),
    "functional, two calls": (functional, ROWS),
    "functional, timm": (lambda: timm.create_model("test_resnet", drop_rate=0.4, num_classes=5), IMAGES),
    "functional, mobilenet": (lambda: timm.create_model("mobilenetv3_small_050", drop_rate=0.4, num_classes=5), IMAGES),
    "functional, transformers": (lambda: MODELS["bart"](activation_dropout=0.2, eos_token_id=17, pad_token_id=1), IDS),
    "none": (lambda: timm.create_model("test_resnet", num_classes=5), IMAGES),
    "none, transformers": (MODELS["gpt2"], IDS),
}


class Drops(TorchFunctionMode):
    """Keeps what live dropouts return, modules and functions alike."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.dropout:
            p, training = [*args[1:], *[kwargs[key] for key in ("p", "training") if key in kwargs]][:2]
            if p > 0 and training:
                self.results.append(result)
        return result


def still(model: nn.Module) -> nn.Module:
    """Norms keep their statistics, so that two passes can be compared."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    return model


@pytest.mark.filterwarnings("ignore::solver_plugins.surgery.DefaultsWarning")
@pytest.mark.parametrize("name", TEN)
def test_every_drop_happens_once(name: str) -> None:
    """Counted: a block's output depends on tau features of each sample, none of which something else has dropped."""
    build, inputs = TEN[name]
    torch.manual_seed(0)
    plain = still(build())
    example = {} if not isinstance(inputs, Tensor) or inputs.dim() > 2 else {"example_inputs": inputs}
    model = convert_model(copy.deepcopy(plain), solver="proxsg", iters=1, **example)
    counted: list[str] = []

    def count(block: SolverBlock, args: Any, output: Tensor) -> None:
        (u,) = args
        assert not any(u.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in drops.results)
        (grad,) = torch.autograd.grad(output, u, torch.randn_like(output), retain_graph=True)
        assert ((grad != 0).sum(-1) == block.solver.tau(u.shape[-1])).all()
        counted.append(type(block).__name__)

    hooks = [block.register_forward_hook(count) for block in blocks_of(model).values()]
    with Drops() as drops:
        outputs_of(model, inputs.clone().requires_grad_() if isinstance(inputs, Tensor) else inputs, True)
    assert len(counted) == len(hooks)
    for hook in hooks:
        hook.remove()
    # In evaluation nothing is sampled; one iteration is then the plain layer.
    for _ in range(2):
        torch.testing.assert_close(outputs_of(model, inputs, False), outputs_of(plain, inputs, False))
    revert_model(model)
    for training in (True, False):
        assert torch.equal(outputs_of(model, inputs, training), outputs_of(plain, inputs, training))
