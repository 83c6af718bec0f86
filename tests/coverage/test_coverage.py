"""The fixed sample of models, every check; and that each check can fail."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlavaConfig, RTDetrConfig

from solver_plugins import SolverLinear
from solver_plugins.blocks import SolverBlock, block
from solver_plugins.operators import ConvMap
from solver_plugins.solve import products
from solver_plugins.surgery import Inputs
from solver_plugins.surgery import apply as applying
from tests.coverage import checks, merging, passes, run, same, small, table, transformers_models, weights
from tests.coverage.reference import jvp, solve
from tests.coverage.result import CHECKS, Case, NotBuiltError, Row
from tests.coverage.run import Limits, Task, run_task
from tests.coverage.sample import CI, HEADS, tasks
from tests.coverage.steps import rough_steps

SAMPLE = tasks(["timm", "transformers"], "ci")


@pytest.mark.parametrize("task", SAMPLE, ids=[task.name for task in SAMPLE])
def test_sample(task):
    row = run_task(task)
    assert row.foreign is None
    assert row.failures == {}
    assert row.blocks
    assert set(row.passed) == set(CHECKS)


MERGED = ("test_vit", "test_convnext", "mixer_s32_224", "GPT2ForSequenceClassification")


@pytest.mark.filterwarnings("ignore")
def test_affine_blocks_merge_and_load_where_the_package_is_not_installed(tmp_path):
    """All others by ``python -m tests.coverage.merging --all``."""
    for task in SAMPLE:
        if task.name in MERGED:
            one = merging.merged(task)
            assert 0 < one.merged <= one.blocks
            merging.write(one, tmp_path / task.name)
    assert merging.loaded(sorted(tmp_path.iterdir())).keys() == set(MERGED)


def test_the_sample_is_as_large_as_promised():
    assert len({task.family for task in SAMPLE if task.library == "timm"}) == len(CI["timm"]) == 40
    assert len(CI["transformers"]) == 25 and len(HEADS) == 23
    assert {task.name for task in SAMPLE if task.library == "transformers"} == {*CI["transformers"], *HEADS}


class Residual(nn.Module):
    """A block for each kind of outlet: the layer, its norm, and the activation behind a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.act2 = nn.LeakyReLU(0.1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)) + x)
        return torch.tanh(self.fc(x.mean((2, 3))))


def check_residual() -> Row:
    inputs = Inputs((torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),))
    case = Case("timm", "residual", "none", Residual, inputs, given=True)
    return checks.check(lambda: case, "timm", "residual", "none")


def test_a_sound_model_passes():
    row = check_residual()
    assert row.failures == {} and set(row.passed) == set(CHECKS)
    assert row.blocks == {"linear-norm-act": 1, "linear-norm-skip-act": 1, "linear-act": 1}
    assert max(row.errors.values()) < 1e-6


def scaled(function: Any, factor: float = 1.001) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


def test_a_wrong_adjoint_is_found(monkeypatch):
    monkeypatch.setattr(ConvMap, "adjoint", scaled(ConvMap.adjoint))
    assert set(check_residual().failures) == {"reference"}
    monkeypatch.undo()
    # Of a matrix A, A A^T is made at once.
    monkeypatch.setattr(products, "symmetric_product", scaled(products.symmetric_product))
    assert set(check_residual().failures) == {"reference"}


def test_a_wrong_diagonal_is_found(monkeypatch):
    plain = block.diagonal_of
    # The same factor on all rows would change nothing: L has it, too.
    monkeypatch.setattr(block, "diagonal_of", lambda *args: plain(*args) * torch.linspace(0.99, 1.0, 8))
    assert set(check_residual().failures) == {"reference"}


def test_a_block_that_is_not_its_layer_is_found(monkeypatch):
    monkeypatch.setattr(SolverLinear, "forward", scaled(SolverLinear.forward))
    assert {"eval", "train", "reference"} <= set(check_residual().failures)


def test_a_wrong_gradient_is_found(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.001 * grad

    plain = SolverLinear.forward

    def forward(self, input):
        # What stands behind a skip would find a tensor that its layer did not compute.
        output = plain(self, input)
        return Wrong.apply(output) if self.link is None else output

    monkeypatch.setattr(SolverLinear, "forward", forward)
    assert set(check_residual().failures) == {"gradients"}


def test_statistics_that_are_taken_twice_are_found(monkeypatch):
    plain = SolverBlock.solve_behind

    def twice(self, handed, argument):
        if handed.norm is not None and handed.norm.training:
            nn.BatchNorm2d.forward(handed.norm, handed.normed)
        return plain(self, handed, argument)

    monkeypatch.setattr(SolverBlock, "solve_behind", twice)
    assert set(check_residual().failures) == {"statistics"}


def test_what_is_left_behind_is_found(monkeypatch):
    plain = applying.restore

    def forgetful(model):
        found = plain(model)
        model.fc.trace = 1
        return found

    monkeypatch.setattr(applying, "restore", forgetful)
    assert set(check_residual().failures) == {"reverted"}


def test_gradients_that_are_not_finite_are_found(monkeypatch):
    plain = SolverLinear.forward

    def forward(self, input):
        output = plain(self, input)
        if self.solver.config.iters > 1 and self.training:
            output.register_hook(lambda grad: grad * float("nan"))
        return output

    monkeypatch.setattr(SolverLinear, "forward", forward)
    assert set(check_residual().failures) == {"backward"}


def test_a_model_that_does_not_run_is_not_ours():
    class Broken(Residual):
        def forward(self, x):
            raise ZeroDivisionError("by itself")

    case = Case("timm", "broken", "none", Broken, Inputs((torch.zeros(2, 3, 6, 6),)))
    row = checks.check(lambda: case, "timm", "broken", "none")
    assert row.foreign is not None and "ZeroDivisionError: by itself" in row.foreign
    assert not row.failures and not row.passed


JVP = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch, where it first makes a jvp


@JVP
def test_reference_is_the_iteration_of_a_matrix():
    torch.manual_seed(0)
    layer = nn.Linear(5, 4).double()
    u, lam, smoothness = torch.randn(3, 5).double(), 0.01, torch.tensor(7.0).double()
    a = layer.weight.detach()
    c = u @ a.T + layer.bias.detach()
    x1 = c.clamp_min(0)
    x2 = (x1 - (x1 @ a @ a.T + lam * x1) / smoothness + c).clamp_min(0)
    v3 = x2 - (x2 @ a @ a.T + lam * x2) / smoothness + c
    with torch.no_grad():
        found = solve(c, u, layer, torch.relu_, smoothness, lam, 3)
    torch.testing.assert_close(found, v3)


class Reversible(torch.autograd.Function):
    """A function whose forward pass calls a layer, as Reformer's reversible layers do."""

    @staticmethod
    def forward(ctx, layer, u, tangent):
        return jvp(layer, u, tangent)


@JVP
def test_reference_within_a_function_of_autograd():
    layer, tangent = nn.Linear(3, 3, bias=False), torch.arange(6.0).reshape(2, 3)
    found = Reversible.apply(layer, torch.ones(2, 3), tangent)
    torch.testing.assert_close(found, tangent @ layer.weight.detach().T)


class Routed(nn.Module):
    """An expert that no token is sent to."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.two(x[:0])])


def test_a_layer_that_nothing_is_sent_to_passes():
    case = Case("timm", "routed", "none", Routed, Inputs((torch.eye(4),)), given=True)
    row = checks.check(lambda: case, "timm", "routed", "none")
    assert row.failures == {} and sum(row.blocks.values()) == 2


def test_weights_let_every_layer_matter():
    with weights.undrawn_weights():
        model = Residual()
    nn.init.zeros_(model.bn2.weight)
    weights.fill_weights(model)
    assert all(parameter.abs().amax() > 0.05 for parameter in model.parameters())
    again = Residual()
    weights.fill_weights(again)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_gradients_are_judged_on_a_sensible_scale():
    tiny = passes.Gradients(errors={"a.bias": 1e-8, "a.weight": 0.0}, sizes={"a.bias": 1e-8, "a.weight": 1.0})
    assert tiny.worst() == ("a.bias", pytest.approx(1e-6))
    assert passes.Gradients(errors={"a": float("nan")}, sizes={"a": 1.0}).worst()[0] == "a"
    assert passes.apart([torch.ones(2)], [torch.tensor([1.0, float("nan")])]) == float("inf")


def test_estimates_end_with_their_context():
    layer = nn.Linear(6, 5)
    with rough_steps():
        block = SolverLinear.from_linear(layer, nn.ReLU(), solver="proxgd", iters=2)
        estimate = float(block.L)
    block.eval()
    exact = torch.linalg.matrix_norm(layer.weight.detach(), 2).square()
    assert float(block.L) >= float(exact) and float(block.L) != estimate
    torch.testing.assert_close(block.L, exact, rtol=0.1, atol=0.0)


def test_configs_of_transformers_are_small():
    names = dict(transformers_models.names())
    assert len(names) > 1500
    config = transformers_models.case("LlamaForSequenceClassification", "llama").model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_labels) == (32, 2, 3)


def test_configs_that_do_not_fit_together_are_repaired():
    """Two sizes that the rules make small must stay in proportion; a setting without a default must be given."""

    def works(config):
        if config.num_attention_heads != config.num_key_value_heads:
            raise ValueError("as many keys as queries")
        if config.head_dim * config.num_attention_heads > config.vocab_size:
            raise ValueError("the vocabulary must be larger than the heads")
        return config

    found = small.Small(LlamaConfig(vocab_size=151936, head_dim=128)).first(works)
    assert (found.num_key_value_heads, found.num_hidden_layers, found.vocab_size) == (4, 2, 128)
    with pytest.raises(ImportError):  # No size helps, and only the first is tried.
        tried = []
        small.Small(LlamaConfig()).first(lambda config: tried.append(config) or importlib.import_module("natten"))
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_size", 768, 32), ("num_hidden_layers", 12, 2), ("num_attention_heads", 12, 4), ("patch_size", 4, 4),
        ("depths", [2, 2, 6, 2], [1, 1, 1, 1]), ("hidden_sizes", (96, 192, 384), [16, 32, 64]), ("kernel_size", 31, 31),
        ("vocab_size", 50257, 128), ("is_decoder", True, True), ("layer_norm_eps", 1e-5, 1e-5), ("num_channels", 3, 3),
    ],
)  # fmt: skip
def test_small_values(name, value, expected):
    assert small.small_value(name, value) == expected


def test_a_backbone_keeps_what_the_config_around_it_chooses():
    made = small.Small(RTDetrConfig(), {"rt_detr": {"backbone_config.depths": [1]}, "rt_detr_resnet": {"depths": [2]}})
    assert made.values["backbone_config.out_features"] == ["stage2", "stage3", "stage4"]
    assert made.values["backbone_config.depths"] == [1]


def test_a_config_that_refuses_its_sizes_is_not_built(monkeypatch):
    monkeypatch.setitem(transformers_models.OVERRIDES, "granitemoehybrid", {"mamba_n_heads": 3})
    with pytest.raises(NotBuiltError, match="mamba"):
        transformers_models.case("GraniteMoeHybridModel", "granitemoehybrid")


def test_equal_tokens_stay_equal_in_a_small_vocabulary():
    made = small.Small(LlavaConfig(image_token_index=32000, text_config=LlamaConfig(bos_token_id=32000)))
    assert made.values["image_token_index"] == made.values["text_config.bos_token_id"] < 128


class Small(nn.Module):
    """A network with what can differ between two: an option, a function and what it holds, a buffer, sharing."""

    def __init__(self, eps: float = 1e-5, slope: float = 0.1, shift: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.act = lambda x: nn.functional.leaky_relu(x, slope)
        self.register_buffer("shift", torch.full((3,), shift))
        self.one = nn.Linear(3, 3)
        self.two = self.one if tied else nn.Linear(3, 3)


def test_a_network_is_told_from_others():
    inputs = Inputs((torch.randn(2, 3),))
    plain = same.network_id(Small(), inputs)
    assert plain is not None and plain == same.network_id(Small(), inputs)
    others = [Small(eps=1e-6), Small(slope=0.2), Small(shift=1.0), Small(tied=True), Small().half(), Small().eval()]
    others[-1].one.weight.requires_grad_(False)
    ids = [same.network_id(other, inputs) for other in others]
    ids.append(same.network_id(Small(), Inputs((torch.randn(4, 3),))))
    assert len({plain, *ids}) == len(ids) + 1 and None not in ids
    strange = Small()
    strange.eps = iter(())
    assert same.network_id(strange, inputs) is None


class Here:
    """A worker in this process."""

    def check(self, task: Task, limits: Limits, known: dict[str, str]) -> dict[str, Any]:
        return run_task(task, known).to_dict()

    def stop(self) -> None:
        pass


def test_the_same_network_is_checked_once(tmp_path, monkeypatch):
    """Two names of timm for one network, once both take small images."""
    monkeypatch.setattr(run, "_Worker", Here)
    names = ["vit_tiny_patch16_224", "vit_tiny_patch16_384"]
    run.run([Task("timm", name, "vision_transformer") for name in names], tmp_path / "rows.jsonl", 1)
    one, other = run.done(tmp_path / "rows.jsonl").values()
    assert one["same_as"] is None and other["same_as"] == names[0]
    assert one["network"] == other["network"] and not one["failures"] and not other["failures"]
    assert other["passed"] == one["passed"] and set(one["passed"]) == set(CHECKS) and other["walk_seconds"] > 0
    assert names[1] in table.page([one, other], {}, "today").split("## The same network as another model")[1]
