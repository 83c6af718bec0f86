"""Functional dropouts: whose rate is taken over, whose is not, and that it is given back."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import dropout

from solver_plugins import apply_conversion, conversion_of, convert_model, inspect_model, load, revert_model, save
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import Conversion, ConversionError, TargetError, example_inputs_for
from tests.surgery.models import bart
from tests.surgery.small import Model

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def network(forward: Callable[[Any, Tensor], Tensor], **numbers: Any) -> nn.Module:
    made = Model(forward, fc1=nn.Linear(6, 6), norm=nn.LayerNorm(6), fc2=nn.Linear(6, 3), inner=nn.Identity())
    for name, value in numbers.items():
        setattr(made, name, value)
    return made


def rejected(model: nn.Module) -> str:
    report = inspect_model(model, "proxsg", 2, example_inputs=X, lipschitz=False)
    assert not report.converted
    return next(row.reason for row in report.rows if row.name == "fc2")


def one(m: Any, x: Tensor) -> Tensor:
    return m.fc2(dropout(m.norm(m.fc1(x)), m.rate, m.training))


def test_timm_s_drop_rate(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", drop_rate=0.4, num_classes=5)
    model.layer4[0].drop_rate = 0.4  # a number of the same size that nothing reads
    convert_model(model, "proxsg", 2)
    assert model.drop_rate == 0 and model.layer4[0].drop_rate == 0.4
    del model.layer4[0].drop_rate
    assert {name: block.solver.config.p for name, block in blocks_of(model).items()} == {"fc": 0.4}
    assert conversion_of(model).rates == {"drop_rate": 0.4}
    save(model, tmp_path / "saved", model_args={"drop_rate": 0.4})
    again = load(tmp_path / "saved")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again):
        assert other.drop_rate == 0 and conversion_of(other) == conversion_of(model)
        assert revert_model(other).drop_rate == 0.4
    plain = timm.create_model("test_resnet", num_classes=5)
    apply_conversion(plain, Conversion.from_json(conversion_of(model).to_json()))
    assert plain.drop_rate == 0 and conversion_of(plain) == conversion_of(model)


def test_activation_dropout_of_bart_and_its_config(tmp_path: Path) -> None:
    model = bart(activation_dropout=0.2)
    before = copy.deepcopy(model.config.to_dict())
    convert_model(model, "proxsg", 2)
    names = {f"model.{part}.layers.0.activation_dropout" for part in ("encoder", "decoder")}
    assert conversion_of(model).rates == dict.fromkeys(names, 0.2)
    assert model.config.activation_dropout == 0.2
    model.save_pretrained(tmp_path)
    again = transformers.BartForSequenceClassification.from_pretrained(tmp_path)
    assert conversion_of(again).rates == conversion_of(model).rates and again.config.activation_dropout == 0.2
    for other in (model, again):
        revert_model(other)
        assert {other.get_submodule(name.rpartition(".")[0]).activation_dropout for name in names} == {0.2}
    written = {"architectures", "dtype"}  # by save_pretrained
    assert {key: one for key, one in model.config.to_dict().items() if before[key] != one}.keys() <= written


SIZES = {"d_model": 16, "vocab_size": 64, **{f"{part}_{size}": number for part in ("encoder", "decoder")
         for size, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}}  # fmt: skip
RATED = {"activation_dropout": 0.2, "dropout": 0.1}


@pytest.mark.parametrize(("kind", "options", "parts"), [
    ("WhisperForConditionalGeneration", {"max_source_positions": 8}, ("model.encoder", "model.decoder")),
    ("WhisperForAudioClassification", {"max_source_positions": 8}, ("encoder",)),
    ("PegasusForConditionalGeneration", {}, ("model.encoder", "model.decoder")),
])  # fmt: skip
def test_activation_dropout_of_whisper_and_pegasus(kind: str, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    made = getattr(transformers, kind)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = made(made.config_class(**SIZES, **RATED, **ids, **options))
    plain = copy.deepcopy(model).train()
    convert_model(model, "proxsg", 10)
    assert conversion_of(model).rates == {f"{part}.layers.0.activation_dropout": 0.2 for part in parts}
    found = {name: block.solver.config.p for name, block in blocks_of(model).items()}
    assert found == {f"{part}.layers.0.fc2": 0.2 for part in parts}
    revert_model(model)
    outputs = []
    for one in (model.train(), plain):
        torch.manual_seed(0)
        given = example_inputs_for(one).kwargs
        outputs.append(one(**{**given, "use_cache": False} if "Audio" not in kind else given)[0])
    assert torch.equal(*outputs)


def test_a_rate_that_steers_two_layers_is_taken_over_with_both() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.relu(m.fc1(dropout(x, m.rate, m.training)))
        return m.fc2(dropout(x, p=m.rate, training=m.training))

    model = network(forward, rate=0.25)
    convert_model(model, "proxsg", 2, example_inputs=X)
    assert set(blocks_of(model)) == {"fc1", "fc2"} and model.rate == 0
    revert_model(model)
    assert model.rate == 0.25
    with pytest.raises(TargetError, match="'rate' also steers the dropout of a layer that is not converted"):
        convert_model(model, "proxsg", 2, targets=["fc2"], example_inputs=X)
    assert model.rate == 0.25


def test_coordinates_take_the_dropout_behind_a_layer() -> None:
    model = network(lambda m, x: m.fc2(torch.relu(dropout(m.fc1(x), m.rate, m.training))), rate=0.5)
    convert_model(model, "rcd", 2, example_inputs=X)
    assert set(blocks_of(model)) == {"fc1"} and model.rate == 0


def another(m: Any, x: Tensor) -> Tensor:
    return m.fc2(dropout(m.norm(dropout(m.fc1(x), m.rate, m.training)), m.rate, m.training))


def computed(m: Any, x: Tensor) -> Tensor:
    return m.fc2(dropout(m.norm(dropout(m.fc1(x), m.rate / 2, m.training)), m.rate, m.training))


def gated(m: Any, x: Tensor) -> Tensor:
    x = m.norm(m.fc1(x))
    return m.fc2(dropout(torch.tanh(x) if m.rate > 0 else x, m.rate, m.training))


def scaled(m: Any, x: Tensor) -> Tensor:
    return m.fc2(dropout(m.norm(m.fc1(x)) * (1 - m.rate), m.rate, m.training))


def attended(m: Any, x: Tensor) -> Tensor:
    heads = m.fc1(x)[:, None]
    p = m.rate if m.training else 0.0
    x = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)[:, 0]
    return m.fc2(dropout(m.norm(x), m.rate, m.training))


def either(m: Any, x: Tensor) -> Tensor:
    """At ``rate`` zero it drops as before, at the other one."""
    return m.fc2(dropout(m.norm(m.fc1(x)), max(m.rate, m.other), m.training))


def in_evaluation(m: Any, x: Tensor) -> Tensor:
    x = m.norm(m.fc1(x))
    return m.fc2(dropout(x, m.rate, True) if m.training else x * (1 - m.rate))


def always(m: Any, x: Tensor) -> Tensor:
    return m.fc2(dropout(m.norm(m.fc1(x)), m.rate))


def by_a_module(m: Any, x: Tensor) -> Tensor:
    return m.fc2(dropout(m.norm(m.drop(m.fc1(x))), m.drop.p, m.training))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (another, "'rate' also steers another dropout"),
        (computed, "'rate' also steers something else"),
        (gated, "'rate' also steers something else"),
        (scaled, "'rate' also steers something else"),
        (attended, "'rate' also steers something else"),
        (either, "'rate' also steers something else"),
        (in_evaluation, "'rate' also steers something else"),
        (always, "'rate' also steers something else"),
        (by_a_module, "its rate is not an attribute of a module"),
        (lambda m, x: m.fc2(dropout(m.norm(m.fc1(x)), 0.3, m.training)), "its rate is not an attribute of a module"),
        (lambda m, x: m.fc2(dropout(m.norm(m.fc1(x)), m.config["rate"])), "its rate is not an attribute of a module"),
    ],
)
def test_what_is_not_sure_is_not_taken_over(forward: Any, reason: str) -> None:
    """Neither the layer nor the rate is touched, and the message says what to do."""
    model = network(forward, rate=0.3, other=0.3, drop=nn.Dropout(0.3), config={"rate": 0.3})
    text = rejected(model)
    assert reason in text and "(drop_rate=0) and give it with p=" in text
    with pytest.raises(ConversionError, match="cannot be taken in its place: the dropout before it is a function"):
        convert_model(model, "proxsg", 2, example_inputs=X)
    assert model.rate == 0.3 and not blocks_of(model)


def test_looking_leaves_the_model_and_random_numbers_alone() -> None:
    model = network(one, rate=0.3)
    state = torch.get_rng_state()
    report = inspect_model(model, "proxsg", 2, example_inputs=X)
    assert model.rate == 0.3 and torch.equal(state, torch.get_rng_state())
    assert report.converted[0].p == 0.3 and "takes the rate of 'rate' over" in report.converted[0].reason


def test_a_rate_that_somebody_has_set_since_is_kept() -> None:
    """And features are not dropped twice: training says what to do, evaluation goes on."""
    model = convert_model(network(one, rate=0.3), "proxsg", 2, example_inputs=X)
    plain = model.eval()(X)
    model.rate = 0.1
    assert torch.equal(model(X), plain)
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(SolverPluginsError, match=r"'rate' was set to 0\.1 .* would be dropped twice\. Set it to 0"):
            made.train()(X)
    assert revert_model(model).rate == 0.1
