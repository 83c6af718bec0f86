"""What the recorder sees, and that it leaves nothing behind."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from solver_plugins.surgery import Inputs, RecordError, example_inputs_for, record
from solver_plugins.surgery.record import Record, Ref
from tests.surgery.models import CHECKPOINTING, MODELS
from tests.surgery.small import Model


def names(made: Record) -> list[str]:
    return [call.name for call in made.calls]


def looks_at_data(self: Any, x: Tensor) -> Tensor:
    if x.sum() > 1e9:
        raise AssertionError
    return self.drop(self.norm(self.fc(x))) + torch.rand_like(self.fc(x)) * random.random() * np.random.rand()


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a forward pass could change."""
    return {
        "state": {name: (tensor.clone(), id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()},
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            {name: list(hooks) for name, hooks in vars(module).items() if name.endswith(("hooks", "hooks_with_kwargs"))}
            for module in model.modules()
        ],
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
    }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@pytest.mark.parametrize(
    ("model", "device"),
    [
        (lambda: timm.create_model("test_resnet", drop_rate=0.1), "meta"),
        (lambda: timm.create_model("test_vit", drop_path_rate=0.1), "meta"),
        (MODELS["roberta"], "meta"),
        (MODELS["t5"], "cpu"),
        (lambda: Model(looks_at_data, fc=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), drop=nn.Dropout(0.5)), "cpu"),
        (lambda: Model(looks_at_data, fc=parametrizations.spectral_norm(nn.Linear(4, 3)), norm=nn.BatchNorm1d(3),
                       drop=nn.Dropout(0.5)), "cpu"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_no_trace(model: Any, device: str, training: bool) -> None:
    model = model().train(training)
    next(model.modules()).register_forward_hook(lambda module, args, output: None)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    first = next(iter(model.children()))
    first.training = not training
    inputs = torch.rand(2, 4) if isinstance(model, Model) else None
    before = fingerprint(model)
    made = record(model, inputs)
    assert made.device == device
    assert same(before, fingerprint(model))


def test_calls_hold_the_models_own_modules_and_plain_data() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    made = record(model)
    assert [call.module for call in made.calls] == list(model)
    assert [call.name for call in made.calls] == ["0", "1", "2"]
    assert [value.shape for value in made.values] == [(2, 4), (2, 3), (2, 3), (2, 2)]
    assert made.values[1].producer == 0 and made.values[1].consumers == [1]
    assert made.outputs == (3,) and made.values[0].kind == "input"
    assert made.call_counts == {"": 1, "0": 1, "1": 1, "2": 1}


def test_arguments_are_kept_beside_tensors() -> None:
    model = Model(lambda self, x: functional.hardtanh(self.fc(x), -2.0, max_val=2.0), fc=nn.Linear(4, 3))
    call = record(model, torch.rand(2, 4)).calls[-1]
    assert call.function is functional.hardtanh
    assert call.args == (Ref(1),) and call.inputs[0].position == 0
    assert call.kwargs == {"min_val": -2.0, "max_val": 2.0, "inplace": False}


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.fc(x).relu_() + 1,
        lambda self, x: functional.relu(self.fc(x), inplace=True) + 1,
        lambda self, x: self.act(self.fc(x)) + 1,
    ],
)
def test_an_in_place_activation_makes_a_new_value(forward: Any) -> None:
    made = record(Model(forward, fc=nn.Linear(4, 3), act=nn.ReLU(inplace=True)), torch.rand(2, 4))
    linear, activation, add = made.calls
    assert made.values[linear.outputs[0]].consumers == [activation.index]
    assert add.inputs[0].value == activation.outputs[0] != linear.outputs[0]


def test_a_name_that_was_changed_in_place_is_the_new_value_everywhere() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.fc(x)
        kept = y
        y += x.sum()
        return kept * 2

    made = record(Model(forward, fc=nn.Linear(4, 3)), torch.rand(2, 4))
    assert made.calls[-1].inputs[0].value == made.calls[-2].outputs[0]


def test_a_write_through_a_view_reaches_its_base() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.fc(x)
        y[:, :2].relu_()
        return y * 2

    made = record(Model(forward, fc=nn.Linear(4, 3)), torch.rand(2, 4))
    assert names(made) == ["fc", "__getitem__", "relu_", "written_through_view", "mul"]
    changed = made.calls[3]
    assert {a.value for a in changed.inputs} == {made.calls[0].outputs[0], made.calls[2].outputs[0]}
    assert made.calls[4].inputs[0].value == changed.outputs[0]


def test_identities_leave_no_call() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Identity(), nn.Sequential(), nn.Linear(3, 2))
    made = record(model)
    assert names(made) == ["0", "3"] and made.call_counts["1"] == 1


def test_parameters_read_by_functions() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return functional.linear(x, torch.cat([self.q.weight, self.k.weight]).float())

    made = record(Model(forward, q=nn.Linear(4, 3), k=nn.Linear(4, 3)), torch.rand(2, 4))
    assert made.calls[-1].parameters == ("q.weight", "k.weight")
    assert "q" not in made.call_counts


def test_shared_modules_and_parameters() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    made = record(nn.Sequential(first, second, first))
    assert made.aliases == {"0": ("2",)} and made.shared_parameters == {"0.weight": ("1.weight",)}
    assert made.call_counts["0"] == 2


def scripted(x: Tensor) -> Tensor:
    return torch.relu(x * 2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda self, x: torch.jit.script(scripted)(self.fc(x)), ["fc", "mul", "relu"]),
        (lambda self, x: Doubled.apply(self.fc(x)), ["fc", "mul"]),
        (lambda self, x: checkpoint(self.fc, x, use_reentrant=False), ["fc"]),
        (lambda self, x: checkpoint(self.fc, x, use_reentrant=True), ["fc"]),
        (
            lambda self, x: functional.scaled_dot_product_attention(self.fc(x), x[:, :3], x[:, :3], dropout_p=0.1),
            ["fc", "__getitem__", "__getitem__", "scaled_dot_product_attention"],
        ),
        (lambda self, x: self.attn(x[:, None], x[:, None], x[:, None], need_weights=False)[0], None),
        (lambda self, x: self.lstm(x[:, None])[0], ["__getitem__", "lstm"]),
    ],
)
def test_parts_that_hide_what_they_do(forward: Any, expected: list[str] | None) -> None:
    parts = {"fc": nn.Linear(4, 3), "attn": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(4, 2, bidirectional=True)}
    made = record(Model(forward, **parts), torch.rand(2, 4))
    assert made.device == "meta"
    if expected is None:
        assert "multi_head_attention_forward" in names(made)
    else:
        assert names(made) == expected


def test_a_scripted_module_runs_on_the_models_device() -> None:
    with pytest.warns(FutureWarning, match="jit"):
        part = torch.jit.script(nn.Linear(4, 3))
    made = record(nn.Sequential(part, nn.ReLU()), torch.rand(2, 4))
    assert made.device == "cpu" and names(made)[-1] == "1"


def test_autocast_and_half_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert names(record(model)) == ["0", "1"]


def test_inputs_in_every_form() -> None:
    model = Model(lambda self, x: self.fc(x), fc=nn.Linear(4, 3))
    given = torch.rand(1, 4)
    for inputs in (given, (given,), {"x": given}, Inputs((given,))):
        assert record(model, inputs).values[0].shape == (1, 4)
    with pytest.raises(RecordError, match="tensor, a tuple of positional arguments or a dict"):
        record(model, 3)


def test_an_in_place_model_does_not_change_the_users_inputs() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if bool(x.sum() > 1e9):
            raise AssertionError
        return self.fc(x.mul_(2))

    given = torch.ones(2, 4)
    assert record(Model(forward, fc=nn.Linear(4, 3)), given).device == "cpu"
    assert torch.equal(given, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 3)), (2, 4)),
        (nn.Sequential(nn.Sequential(nn.Conv2d(5, 3, 3)), nn.ReLU()), (2, 5, 32, 32)),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 2)), (2, 1, 28, 28)),
        (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), (2, 16)),
        (timm.create_model("test_vit", img_size=96, in_chans=1), (2, 1, 96, 96)),
        (timm.create_model("test_resnet", in_chans=4), (2, 4, 160, 160)),
    ],
)
def test_example_inputs(made: nn.Module, shape: tuple[int, ...]) -> None:
    assert record(made).values[0].shape == shape
    assert example_inputs_for(made).args[0].shape[1] == shape[1]


def test_bad_models_are_told_what_to_do() -> None:
    with pytest.raises(RecordError, match=r"Cannot tell what Model takes.*pass example_inputs="):
        record(Model(lambda self, x: x, fc=nn.Linear(4, 3)))
    with pytest.raises(RecordError, match=r"forward pass of Sequential failed.*Check that") as caught:
        record(nn.Sequential(nn.Linear(4, 3)), torch.rand(2, 5))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RecordError, match=r"pass model\.module"):
        record(nn.DataParallel(nn.Linear(4, 3)))
    with pytest.raises(RecordError, match=r"'0\.weight' is lazy"):
        record(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(RecordError, match=r"Expected a torch\.nn\.Module"):
        record(3)  # type: ignore[arg-type]


def test_a_model_without_weights_yet() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    assert record(model).device == "meta"


def test_gradient_checkpointing_changes_nothing() -> None:
    vit = timm.create_model("test_vit")
    before = names(record(vit))
    vit.set_grad_checkpointing()
    assert names(record(vit)) == before
    bert = MODELS["bert"]()
    before = names(record(bert))
    getattr(bert, CHECKPOINTING)()
    assert names(record(bert)) == before


def test_a_traced_graph_is_a_model() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    assert names(record(traced, torch.rand(2, 4))) == ["0", "1"]


def test_a_deep_copy_and_its_record_agree() -> None:
    model = timm.create_model("test_resnet")
    assert names(record(copy.deepcopy(model))) == names(record(model))
