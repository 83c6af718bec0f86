"""Merged models: plain layers that compute what the solver blocks computed in evaluation."""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from solver_plugins import (
    SolverLinear,
    apply_conversion,
    calibrate,
    conversion_of,
    convert_model,
    merge_model,
    revert_model,
    set_blend,
    set_eval_mode,
    set_iters,
)
from solver_plugins.blocks import PassThrough, blocks_of
from solver_plugins.blocks.shell import Shell
from solver_plugins.errors import OptionError, SolverPluginsWarning
from solver_plugins.surgery import Conversion, ConversionError, ConversionSpec, plan_conversion
from tests.integrations.test_peft import build, output, with_lora
from tests.promises import cases
from tests.promises.test_4_way_back import anatomy

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest change of the outputs, relative to their norm."""


class Norms(nn.Module):
    """Convolutions whose windows do not overlap, before norms and activations that are not proximal maps."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm1 = nn.Conv2d(3, 8, 4, stride=4, bias=False), nn.BatchNorm2d(8)
        self.point, self.norm2 = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.depth = nn.Conv2d(6, 6, 2, stride=3, dilation=2, groups=3)
        self.head = nn.Linear(6, 5)

    act = staticmethod(nn.functional.silu)

    def forward(self, x):
        x = self.act(self.norm1(self.patches(x)))
        x = self.act(self.norm2(self.point(x)))
        return self.head(nn.functional.gelu(self.depth(x)).mean((2, 3)))


class Folded(Norms):
    """The same with an activation that is one, so that its norms are folded in."""

    act = staticmethod(torch.relu)


def change(one, other):
    return ((one - other).norm() / other.norm()).item()


def norms(dtype):
    torch.manual_seed(0)
    model = Norms().to(dtype)
    with torch.no_grad():
        for norm in (model.norm1, model.norm2):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
            norm.bias.normal_()
            norm.weight.uniform_(-1, 1)
            norm.weight[1] = 0
    return model, torch.randn(4, 3, 40, 40, dtype=dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("solver", "options"), [
    ("proxgd", {}), ("proxgd", {"formulation": "paper"}), ("fista", {}), ("fista", {"iters": 9, "restart": False}),
    ("proxsg", {"p": 0.5}), ("ms2gd", {"p": 0.5, "inner": 2}), ("rcd", {"p": 0.5}),
    ("proxgd", {"iters": 1}), ("proxgd", {"blend": 0.3}), ("proxgd", {"calibrate": 1}),
])  # fmt: skip
def test_the_same_function_behind_norms_and_without(solver, options, dtype):
    model, x = norms(dtype)
    before, weights = anatomy(model.eval()), copy.deepcopy(model.state_dict())
    spec = ConversionSpec.of(solver, {"iters": 3, "pattern": "all", **options})
    conversion = plan_conversion(Folded().to(dtype), spec, x).conversion
    without = tuple(block.model_copy(update={"prior": "identity", "parameters": {}}) for block in conversion.blocks)
    apply_conversion(model, conversion.model_copy(update={"blocks": without}))
    roles = {name: block.link and block.link.role for name, block in blocks_of(model).items()}
    assert roles == {"patches": "norm", "point": "norm", "depth": None, "head": None}
    if options.get("calibrate"):
        calibrate(model, [x], progress=False)
    parameters = list(model.parameters())
    expected = model(x).detach()
    assert merge_model(model) is model
    assert change(model(x), expected) < CLOSE[dtype]
    assert anatomy(model) == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    # A row that the norm sets to zero keeps its weight.
    assert torch.equal(model.patches.weight[1], weights["patches.weight"][1])
    if options.get("iters") == 1:
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("model", ["hf_gpt2", "hf_bert", "timm_vit", "timm_convnext"])
def test_models_of_the_libraries(model):
    """Every block that is affine; convolutions whose windows overlap, and priors, stay as they are."""
    made = cases.converted(model, "proxgd", torch.float64, iters=4).eval()
    expected, count = cases.run(made, model, torch.float64).detach(), len(blocks_of(made))
    merge_model(made, strict=False)
    left = blocks_of(made)
    assert change(cases.run(made, model, torch.float64), expected) < CLOSE[torch.float64]
    assert len(left) < count
    assert all(block.prior.name != "identity" or block.geometry.dims for block in left.values()), left.keys()
    fresh = dict(cases.build(model).named_modules())
    plain = [name for name, module in made.named_modules() if name not in left and not isinstance(module, Shell)]
    assert all(type(made.get_submodule(name)) is type(fresh[name]) for name in plain) and len(plain) > len(left)


def test_all_fifty_blocks_of_a_vit_load_where_the_package_is_not_installed(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2).eval()
    plain = [type(module) for module in model.modules()]
    convert_model(model, "proxgd", 5, pattern="all")
    x = torch.randn(1, 3, 224, 224)
    expected = model(x).detach()
    merge_model(model)
    assert [type(module) for module in model.modules()] == plain and not blocks_of(model)
    safetensors.torch.save_file({**model.state_dict()}, tmp_path / "model.safetensors")
    torch.save({"x": x, "expected": expected}, tmp_path / "expected.pt")
    torch.save(model, tmp_path / "pickled.pt")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 1e-5


ELSEWHERE = """
import sys
sys.modules["solver_plugins"] = None  # importing it fails
import json
import timm
import torch

kept = torch.load("expected.pt")
options = {"num_classes": 3, "depth": 2, "checkpoint_path": "model.safetensors"}
model = timm.create_model("vit_tiny_patch16_224", **options).eval()
same = torch.load("pickled.pt", weights_only=False)
with torch.no_grad():
    outs = [one(kept["x"]) for one in (model, same)]
print(json.dumps(max(float((out - kept["expected"]).norm() / kept["expected"].norm()) for out in outs)))
"""


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 4, bias=False)
        self.drop, self.drop2 = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        x = self.conv(torch.relu(self.first(self.drop(x))).unsqueeze(-1)).squeeze(-1)
        return self.last(self.drop2(nn.functional.gelu(x)))


def affine(solver="proxgd", iters=4, **options):
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    return convert_model(Affine().eval(), solver, iters, pattern="all", example_inputs=x, **options), x


def test_what_cannot_be_merged_is_listed_with_its_reason():
    model, x = affine()
    before = model(x)
    with pytest.raises(ConversionError, match="Expected blocks that are affine in evaluation; 2 of 3") as caught:
        merge_model(model)
    text = str(caught.value)
    assert "- first: its activation is part of the solver (relu)" in text
    assert "- conv: the windows of its convolution overlap, or are padded" in text
    assert "last:" not in text and "strict=False" in text
    assert torch.equal(model(x), before) and len(blocks_of(model)) == 3
    merge_model(model, strict=False)
    assert blocks_of(model).keys() == {"first", "conv"} and type(model.last) is nn.Linear
    torch.testing.assert_close(model(x), before)
    copy.deepcopy(model)(x)
    # The guard now looks after the two that are left.
    model.last = nn.Linear(8, 2)
    assert model(x).shape == (5, 2)


@pytest.mark.parametrize(("solver", "options", "reason"), [
    ("anderson", {}, "the iterations of anderson depend on the data"),
    ("fista", {}, "fista restarts its momentum where the data asks for it"),
    ("proxsg", {"p": 0.5, "eval_mode": "stochastic"}, "it samples in evaluation, too"),
])  # fmt: skip
def test_solvers_that_are_not_affine(solver, options, reason):
    model, _ = affine(solver, iters=4, **options)
    with pytest.raises(ConversionError, match=f"last: {reason}"):
        merge_model(model)


def test_shifts_skips_ties_and_computed_weights_are_refused():
    model, x = affine(targets=["last"])
    calibrate(model, [x], progress=False)
    with pytest.raises(ConversionError, match="last: it has a shift, and its layer no bias"):
        merge_model(model)
    tied, _ = affine(targets=["last"])
    tied.other = nn.Linear(8, 4)
    tied.other.weight = tied.last.weight
    with pytest.raises(ConversionError, match="last: its weight is tied to another one"):
        merge_model(tied)
    tied = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    tied[2].bias = tied[0].bias
    convert_model(tied, "proxgd", 4, targets=["0"], pattern="all", example_inputs=x)
    with pytest.raises(ConversionError, match="0: its bias is tied to another one"):
        merge_model(tied)
    computed = Affine()
    nn.utils.parametrizations.weight_norm(computed.last)
    convert_model(computed, "proxgd", 4, targets=["last"], pattern="all", example_inputs=x)
    with pytest.raises(ConversionError, match="last: its weight is computed from other tensors"):
        merge_model(computed)
    skips = cases.converted("residual", "proxgd")
    with pytest.raises(ConversionError, match=r"conv2: its activation is part of the solver"):
        merge_model(skips)
    with pytest.raises(ConversionError, match="without a solver block"):
        merge_model(nn.Linear(2, 2))
    with pytest.raises(ConversionError, match=r"merge model\.module, then wrap it again"):
        merge_model(nn.DataParallel(model))


def test_nothing_of_the_solver_blended_in_is_always_mergeable():
    made = cases.converted("residual", "proxgd", blend=0.0).eval()
    plain = cases.build("residual").eval()
    merge_model(made)
    assert anatomy(made) == anatomy(plain)
    assert torch.equal(cases.run(made, "residual"), cases.run(plain, "residual"))


def test_dropouts_that_solvers_replaced_stay_replaced_for_those_that_stay():
    model, _ = affine("proxsg", p=0.5)
    assert isinstance(model.drop, PassThrough)
    merge_model(model, strict=False)
    assert isinstance(model.drop, PassThrough)
    model, x = affine("proxsg", p=0.5, targets=["last"])
    expected = model(x)
    merge_model(model)
    assert type(model.drop2) is nn.Dropout
    torch.testing.assert_close(model(x), expected)


def test_a_block_by_itself():
    layer = nn.Linear(5, 4)
    block = SolverLinear.from_linear(layer, solver="proxgd", iters=3).eval()
    x = torch.randn(3, 5)
    expected = block(x)
    merge_model(block)
    assert type(block) is nn.Linear
    torch.testing.assert_close(block(x), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_under_adapters():
    """PEFT merges an adapter into a plain layer, not into a solver: that would change the outputs."""
    base, inputs = build("bert")
    model = with_lora(convert_model(base, "proxgd", 4, pattern="all"), ["query", "output.dense"]).eval()
    # The pooler has a prior, and no adapter.
    merge_model(model, strict=False)
    expected = output(model, inputs).detach()
    assert not any("query" in name for name in blocks_of(model))
    merged = model.merge_and_unload()
    assert change(output(merged, inputs), expected) < 1e-12
    dora = copy.deepcopy(build("bert")[0])
    dora = with_lora(convert_model(dora, "proxgd", 4, pattern="all"), ["query"], use_dora=True)
    with pytest.raises(ConversionError, match=r"query\.base_layer: it is part of an adapter"):
        merge_model(dora)


def test_a_trained_model_that_is_reverted_says_what_it_loses():
    model, x = affine()
    revert_model(model)  # Nothing was trained.
    for batch, measured in ((None, ""), (x, r"on this batch its outputs change by .* of their norm, the largest one")):
        model, x = affine()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(x).square().mean().backward()
        optimizer.step()
        with pytest.warns(SolverPluginsWarning, match=f"first, conv, last were trained.*{measured}.*merge_model"):
            revert_model(model, batch)
    model, x = affine()
    text = conversion_of(model).to_json()
    with torch.no_grad():
        model.last.weight.add_(0.1)
    for given, count in ((text, 0), (conversion_of(model).to_json(), 1)):
        fresh = Affine()
        fresh.load_state_dict(model.state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            revert_model(apply_conversion(fresh, Conversion.from_json(given)))
        assert len(caught) == count, "a saved model remembers whether it was trained"
    model, x = affine(iters=1)
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    revert_model(model)  # The plain layer is what was trained.


def test_settings_of_a_whole_model():
    model, x = affine("proxsg", p=0.5)
    expected, _ = affine("proxsg", p=0.5, iters=7)
    before = model(x)
    set_iters(model, 7)
    assert torch.equal(model(x), expected(x)) and not torch.equal(model(x), before)
    set_eval_mode(model, "stochastic")
    assert not torch.equal(model(x), model(x))
    set_eval_mode(model, "deterministic")
    assert torch.equal(model(x), expected(x))
    set_blend(model, 0.0)
    set_iters(model, 1)
    assert torch.equal(model(x), Affine.forward(revert_model(model), x))
    model, _ = affine()
    with pytest.raises(OptionError, match="Expected blocks that sample, such as those of proxsg; found proxgd"):
        set_eval_mode(model, "stochastic")
    for iters in (0, 1.5, "3"):
        with pytest.raises(OptionError, match="option 'iters'"):
            set_iters(model, iters)
    with pytest.raises(OptionError, match="option 'eval_mode'"):
        set_eval_mode(affine("proxsg", p=0.5)[0], "random")
    with pytest.raises(OptionError, match="without a solver block"):
        set_iters(nn.Linear(2, 2), 3)
    assert all(block.solver.config.iters == 4 for block in blocks_of(model).values())
