"""LoRA on a converted model."""

import copy

import peft
import pytest
import torch
from torch import nn

from solver_plugins import conversion_of, convert_model, save
from solver_plugins.blocks import SolverBlock
from solver_plugins.errors import SolverPluginsError
from solver_plugins.integrations import SavingError
from solver_plugins.surgery import ConversionError
from tests.integrations.cases import hugging_face_inputs, hugging_face_model, timm_input, timm_model
from tests.tolerances import tolerance

# PEFT 0.21 asks transformers by a name that transformers 5.23 has given up.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CASES = {
    "bert": ["query", "dense", "classifier"],
    "vit": ["q_proj", "fc1", "classifier"],
    "test_vit": ["qkv", "attn.proj", "fc1"],
}
"""Model -> the linear layers that get adapters."""

CONVOLUTIONS = {
    "vit": ["projection"],
    "resnet": ["convolution"],
    "test_resnet": ["layer1.0.conv1", "layer1.0.conv2", "fc"],
}


def build(name):
    model = timm_model(name, drop_path_rate=0.0) if name == "test_vit" else None
    model = model or (timm_model(name) if name.startswith("test_") else hugging_face_model(name))
    inputs = {"x": timm_input(model)} if name.startswith("test_") else hugging_face_inputs(name)
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def output(model, inputs):
    found = model(**inputs)
    return found if isinstance(found, torch.Tensor) else found[0]


def with_lora(model, targets, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.0, **options)
    return peft.get_peft_model(model, config).double()


def close(one, other):
    torch.testing.assert_close(one, other, **tolerance(torch.float64)._asdict())


@pytest.mark.parametrize("name", CASES)
def test_linear_layers(name, tmp_path):
    check(name, CASES[name], tmp_path)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, tmp_path):
    check(name, CONVOLUTIONS[name], tmp_path)


def check(name, targets, folder):
    """LoRA at one iteration is LoRA on the plain model: outputs, gradients, training, merging, adapters on the disk."""
    base, inputs = build(name)
    solved = convert_model(copy.deepcopy(base), "proxgd", iters=1, pattern="all", example_inputs=inputs)
    text = conversion_of(solved).to_json()
    plain, solved = with_lora(base, targets), with_lora(solved, targets)
    blocks = [m.base_layer for m in solved.modules() if hasattr(m, "base_layer")]
    assert any(isinstance(block, SolverBlock) for block in blocks)
    for model in (plain, solved):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.outputs, model.grads = [], []
        for _ in range(3):
            result = output(model, inputs)
            optimizer.zero_grad()
            result.square().mean().backward()
            model.outputs.append(result.detach())
            model.grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
            optimizer.step()
        model.eval()
    close(solved.outputs, plain.outputs)
    close(solved.grads, plain.grads)
    trained = output(plain, inputs)
    close(output(solved, inputs), trained)

    solved.save_pretrained(folder / "adapter")
    fresh = convert_model(build(name)[0], "proxgd", iters=1, pattern="all", example_inputs=inputs)
    fresh.load_state_dict(_base_weights(solved))
    again = peft.PeftModel.from_pretrained(fresh, folder / "adapter").double().eval()
    close(output(again, inputs), trained)

    with pytest.raises(SavingError, match="PEFT adapters"):
        save(solved, folder / "saved")
    merged = solved.merge_and_unload()
    close(output(merged, inputs), trained)
    close(output(plain.merge_and_unload(), inputs), trained)
    assert conversion_of(merged).to_json() == text


def _base_weights(model):
    """The weights of the model inside, under its own names."""
    return {
        name.replace(".base_layer", ""): value
        for name, value in model.get_base_model().state_dict().items()
        if "lora_" not in name
    }


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_an_adapter_is_not_merged_into_a_solver(merge):
    """Merging moves it inside of the solver, which gives other outputs than adding to its result."""
    base, inputs = build("bert")
    model = with_lora(convert_model(base, "fista", iters=3, pattern="all"), ["dense"]).eval()
    before = output(model, inputs)
    with pytest.raises(ConversionError, match=r"dense'.*merge_model\(model\) first"):
        getattr(model, merge)()
    close(output(model, inputs), before)
    assert isinstance(next(one for one in model.modules() if hasattr(one, "base_layer")).base_layer, SolverBlock)
    unloaded = model.unload()
    assert any(isinstance(module, SolverBlock) for module in unloaded.modules())


ADAPTERS = {
    "LoHa": peft.LoHaConfig,
    "LoKr": peft.LoKrConfig,
    "AdaLora": lambda **options: peft.AdaLoraConfig(total_step=10, **options),
    "IA3": lambda **options: peft.IA3Config(feedforward_modules=[], **options),
    "Vera": peft.VeraConfig,
    "OFT": lambda **options: peft.OFTConfig(r=2, oft_block_size=0, **options),
    "HRA": peft.HRAConfig,
    "Shira": lambda **options: peft.ShiraConfig(r=2, **options),
    "BOFT": lambda **options: peft.BOFTConfig(boft_block_size=2, **options),
}
READS_THE_WEIGHT = {"HRA", "Shira"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("adapter", "compiled"), [*((name, False) for name in ADAPTERS), ("HRA", True), ("IA3", True)])
def test_other_adapters(adapter, compiled):
    """At one iteration as on the plain layer. With more, those that never call their layer are refused."""
    torch.compiler.reset()
    base, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double(), torch.randn(3, 6).double()
    found = []
    for iters in (0, 1, 3):
        made = copy.deepcopy(base)
        if iters:
            made = convert_model(made, "proxgd", iters, targets=["0"], example_inputs=x)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(made, ADAPTERS[adapter](target_modules=["0"])).double().eval()
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        run = torch.compile(adapted, backend="eager") if compiled else adapted
        if iters == 3 and adapter in READS_THE_WEIGHT:
            for model in (run, copy.deepcopy(adapted)):
                with pytest.raises(SolverPluginsError, match=r"in the place of the converted layer '0'.*exclude="):
                    model(x)
            made = adapted.unload()
            found.append(made(x))
            assert compiled or not made[0]._forward_hooks
        else:
            found.append(run(x))
            close(copy.deepcopy(adapted)(x), found[-1])
    close(found[0], found[1])
    assert (found[2] - found[1]).abs().max() > 0.01, "the solver runs"
