"""The fixed sample of models, every check; and that each check can fail."""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlavaConfig

from solver_plugins import SolverLinear
from solver_plugins.blocks import SolverBlock, block
from solver_plugins.operators.conv import ConvMap
from solver_plugins.solve import products
from solver_plugins.surgery import Inputs
from solver_plugins.surgery import apply as applying
from tests.coverage import checks, passes, run, same, small, table, transformers_models, weights
from tests.coverage.__main__ import main
from tests.coverage.merging import merged
from tests.coverage.reference import solve
from tests.coverage.result import CHECKS, Case, Row
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


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "mixer_s32_224", "GPT2ForSequenceClassification"])
@pytest.mark.filterwarnings("ignore")
def test_affine_blocks_merge(name):
    """All others by ``python -m tests.coverage.merging --all``."""
    some, count, _ = merged(next(task for task in SAMPLE if task.name == name))
    assert 0 < some <= count


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


ROW = Row("timm", "a", "family", 10, passed=list(CHECKS), blocks={"linear": 2}, walk_seconds=0.1).to_dict()
BAD = Row("timm", "b", "family", failures={"eval": "error 1 | 2"}, passed=["walked"], blocks={"linear": 1}).to_dict()
ALIEN = Row("transformers", "c", "other", foreign="ImportError: no natten").to_dict()
BARE = Row("timm", "d", "bare", passed=["walked"], left={"tied weight": 3}, reduced="7B: depth=2").to_dict()


def test_page():
    text = table.page([ROW, BAD, ALIEN, BARE], {"timm": "1.0"}, "2026-01-01")
    assert "2026-01-01; timm 1.0." in text
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("| **walked**")).endswith("| 3/3 |  | 0/0 |  |")
    assert next(line for line in lines if line.startswith("| **eval**")).endswith("| 1/2 |  | 0/0 |  |")
    assert "| b | eval | error 1 \\| 2 |" in lines
    assert "| c | ImportError: no natten |" in lines
    assert "| d | 3x tied weight |" in lines
    assert "| d | 7B: depth=2 |" in lines


def test_results_are_resumed(tmp_path):
    path = tmp_path / "rows.jsonl"
    some = [Task(*(row[key] for key in ("library", "name", "family"))) for row in (ROW, BAD, ALIEN)]
    assert run.still_to_do(some, path, False) == some
    for row in (ROW, BAD, ALIEN):
        run.append(path, row)
    with path.open("a") as file:
        file.write('{"library": "timm", "na')
    assert run.still_to_do(some, path, False) == []
    assert run.still_to_do(some, path, True) == some[1:]
    run.append(path, ROW | {"name": "b"})
    assert run.still_to_do(some, path, True) == some[2:]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(seconds=0.0), "took more than 0 seconds"), (Limits(memory=1), "GB, above the limit of")],
)
def test_a_worker_that_takes_too_much_is_a_failure(tmp_path, limits, reason):
    path = tmp_path / "rows.jsonl"
    run.run([Task("timm", "test_vit", "vision_transformer")], path, 1, limits)
    (row,) = run.done(path).values()
    assert reason in row["failures"]["worker"]
    assert row["versions"].keys() == {"torch", "timm", "transformers"}


def test_a_worker_that_dies_is_a_failure_and_the_run_goes_on(tmp_path):
    """The first worker is killed from outside, as a machine out of memory does; the second task gets another one."""
    path = tmp_path / "rows.jsonl"
    script = tmp_path / "main.py"
    script.write_text(
        "import pathlib, threading, time, sys\n"
        "from tests.coverage import run\n"
        "start = run._Worker._start\n"
        "def fragile(self):\n"
        "    start(self)\n"
        "    if not done:\n"
        "        done.append(1)\n"
        "        self.process.kill()\n"
        "done = []\n"
        "if __name__ == '__main__':\n"
        "    run._Worker._start = fragile\n"
        "    names = ('test_vit', 'test_nfnet')\n"
        "    run.run([run.Task('timm', name, 'x') for name in names], pathlib.Path(sys.argv[1]), 1)\n"
    )
    subprocess.run([sys.executable, script, path], check=True, capture_output=True, env=_environment())
    rows = {name: row for (_, name), row in run.done(path).items()}
    assert "exit code -9: killed" in rows["test_vit"]["failures"]["worker"]
    assert rows["test_nfnet"]["failures"] == {} and set(rows["test_nfnet"]["passed"]) == set(CHECKS)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path)}


def run_command(*args: Any) -> int:
    try:
        return main([str(arg) for arg in args])
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sample", "small"], "Expected --sample ci; found 'small'."),
        (["--filter", "resnext_of_tomorrow*"], "No model is called like 'resnext_of_tomorrow*'."),
        (["--only-table"], "say where, with --table PATH"),
    ],
)
def test_wrong_input(tmp_path, capsys, args, message):
    assert run_command(*args, "--output", tmp_path / "rows.jsonl") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_command_writes_the_page(tmp_path, capsys):
    path, page = tmp_path / "rows.jsonl", tmp_path / "docs" / "coverage.md"
    row = ROW | {"name": "test_vit", "date": "2026-01-01", "versions": {"timm": "1.0"}}
    path.write_text(json.dumps(row) + "\n")
    options = ["--timm", "--filter", "test_vit", "--output", path, "--table", page]
    assert run_command(*options) == 0
    assert "1 of 1 models are in" in capsys.readouterr().err
    assert "| family | 1 | 0 | 2 | 1/1 | 0.0 |" in page.read_text()
    path.write_text(json.dumps(row | {"failures": {"eval": "error"}}) + "\n")
    assert run_command(*options, "--only-table") == 1
    assert "1 fail: test_vit" in capsys.readouterr().err


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
        ("depths", [2, 2, 6, 2], [1, 1, 1, 1]), ("hidden_sizes", [96, 192, 384], [16, 32, 64]), ("kernel_size", 31, 31),
        ("vocab_size", 50257, 128), ("is_decoder", True, True), ("layer_norm_eps", 1e-5, 1e-5), ("num_channels", 3, 3),
    ],
)  # fmt: skip
def test_small_values(name, value, expected):
    assert small.small_value(name, value) == expected


def test_equal_tokens_stay_equal_in_a_small_vocabulary():
    made = small.Small(LlavaConfig(image_token_index=32000, text_config=LlamaConfig(bos_token_id=32000)))
    assert made.values["image_token_index"] == made.values["text_config.bos_token_id"] < 128


def test_page_by_task():
    rows = [
        Row("transformers", "a", "x", passed=list(CHECKS), blocks={"linear": 2}, walk_seconds=0.1, generates="yes"),
        Row("transformers", "b", "x", foreign="ImportError: no natten", missing="built"),
        Row("transformers", "c", "x", foreign="ValueError: no bbox", missing="fed"),
        Row("transformers", "d", "x", failures={"worker": "took more than 9 seconds"}),
    ]
    lines = table.page([row.to_dict() | {"tasks": ["causal lm"]} for row in rows], {}, "today").splitlines()
    why = "1 needs a package that is not installed, 1 no inputs, 1 too slow or large for this run"
    assert f"| causal lm | 4 | 2 | 1 | 1 | 1 | 1/1 | 1/1 | {why} |" in lines


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


def test_the_same_network_is_checked_once(tmp_path):
    """Two names of timm for one network, once both take small images."""
    names = ["vit_tiny_patch16_224", "vit_tiny_patch16_384"]
    run.run([Task("timm", name, "vision_transformer") for name in names], tmp_path / "rows.jsonl", 1)
    one, other = run.done(tmp_path / "rows.jsonl").values()
    assert one["same_as"] is None and other["same_as"] == names[0]
    assert one["network"] == other["network"] and not one["failures"] and not other["failures"]
    assert other["passed"] == one["passed"] and set(one["passed"]) == set(CHECKS) and other["walk_seconds"] > 0
    assert names[1] in table.page([one, other], {}, "today").split("## The same network as another model")[1]
