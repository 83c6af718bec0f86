"""Programs: onnxruntime and torch.export run what was written, at a batch size that the export did not see."""

import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from solver_plugins import attach_opteq_head, convert_model, export_model, gates_of, inspect_model, merge_model, save
from solver_plugins.cli import main
from solver_plugins.errors import UnsupportedLayerError
from solver_plugins.integrations import SavingError
from solver_plugins.integrations.architectures import OptEqNet
from solver_plugins.integrations.export import ExportError
from solver_plugins.surgery import ConversionError
from tests.integrations.cases import hugging_face_inputs, hugging_face_model, timm_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def lenet(**more):
    return timm.create_model("solver_lenet", channels=(2, 4), features=(12, 8), **more)


def images(size):
    return lambda batch: {"x": torch.randn(batch, 3, size, size)}


# What is converted, what it reads, and what is asked of the conversion.
SMALL = {
    "lenet": (lenet, images(32), {"targets": ["conv2", "fc1", "fc"], "pattern": "all"}),
    "vit": (lambda: timm_model("test_vit"), images(64), {"targets": r"blocks\.0\.mlp.*|head", "pattern": "all"}),
    "resnet": (
        lambda: timm_model("test_resnet", in_chans=3),
        images(160),
        {"targets": r"layer1\.0\..*|fc", "pattern": "all"},
    ),
    "bert": (lambda: hugging_face_model("bert"), lambda n: hugging_face_inputs("bert", n), {"pattern": "all"}),
    "opteq": (
        lambda: attach_opteq_head(lenet(), hidden=8, iters=6, gradient="unrolled"),
        images(32),
        {"targets": ["fc1"]},
    ),
}
LARGE = {
    "resnet18": (lambda: timm.create_model("resnet18", num_classes=10), images(224), {"pattern": "all"}),
    "vit_tiny": (
        lambda: timm.create_model("vit_tiny_patch16_224", num_classes=10),
        images(224),
        {"targets": r"blocks\.(0|5|11)\.mlp\..*|head", "pattern": "all"},
    ),
}
SOLVERS = {"proxgd": {}, "fista": {}, "proxsg": {"p": 0.5}, "anderson": {}, "ms2gd": {"p": 0.5},
           "proxgd, gates": {"gate": "channel"}, "proxsg, one gate": {"p": 0.5, "gate": "scalar"}}  # fmt: skip


def made(case, solver, **more):
    build, inputs, options = {**SMALL, **LARGE}[case]
    torch.manual_seed(0)
    model = build()
    # The pattern "all" is for sampling solvers, too, once they have a rate.
    model = convert_model(model, solver.partition(",")[0], iters=3, **{**options, **SOLVERS[solver], **more}).eval()
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.uniform_(0.2, 0.8)
    return model, inputs


def check_onnx(case, solver, path, **more):
    model, inputs = made(case, solver, **more)
    written = export_model(model, path)
    assert len(written.differences) == 2 and max(written.differences.values()) <= 1e-4
    # Not by our own check alone: another batch size, other numbers.
    session = onnxruntime.InferenceSession(path)
    given = {} if case == "bert" else {"x": inputs(5)["x"]}
    if case == "bert":
        given = {**inputs(5), "attention_mask": torch.ones(5, 16, dtype=torch.long)}
        given["input_ids"] = torch.randint(3, 60, (5, 16))
    found = session.run(None, {one.name: given[one.name].numpy() for one in session.get_inputs()})[0]
    with torch.no_grad():
        expected = model(**given)
    expected = expected if isinstance(expected, torch.Tensor) else expected.logits
    assert np.abs(found - expected.numpy()).max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("case", "solver"), [("lenet", "fista"), ("lenet", "proxgd, gates")])
def test_onnx(case, solver, tmp_path):
    check_onnx(case, solver, tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", [*SMALL, *LARGE])
def test_onnx_of_every_solver(case, solver, tmp_path):
    check_onnx(case, solver, tmp_path / "model.onnx")


@pytest.mark.parametrize(("solver", "more"), [("proxgd", {"gradient": "implicit"}), ("anderson", {})])
def test_a_program_of_torch_export_takes_every_batch(solver, more, tmp_path):
    model, inputs = made("lenet", solver, **more)
    written = export_model(model, tmp_path / "model.pt2", "pt2")
    program = torch.export.load(written.path)
    assert all(limits.upper > 2**31 for limits in program.range_constraints.values())
    # Above the sizes at which training changes its ways.
    for batch in (1, 2, 7, 300):
        x = inputs(batch)["x"]
        with torch.no_grad():
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_torch_export_without_our_help_has_no_path_guards():
    model, _ = made("lenet", "proxgd")
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (torch.randn(4, 3, 32, 32),), dynamic_shapes=(batch,))
    assert not any("linalg_vector_norm" in str(node.target) for node in program.graph.nodes)  # no tracking of steps
    x = torch.randn(500, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_plain_network(tmp_path):
    model = convert_model(timm_model("test_vit").train(), "proxgd", iters=3, targets=r"blocks\.0\.mlp.*", pattern="all")
    written = export_model(model, tmp_path / "plain", "plain")
    assert model.training and written.blocks == 0 and max(written.differences.values()) < 1e-5
    again = timm.create_model(f"local-dir:{tmp_path / 'plain'}", pretrained=True).eval()
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    model, _ = made("lenet", "proxgd")
    with pytest.raises(ConversionError, match=r"fc1: its activation is part of the solver"):
        export_model(model, tmp_path / "other", "plain")
    for model, name in ((attach_opteq_head(lenet(), hidden=8), "fc"), (OptEqNet(state=4, hidden=(4,)), "equilibrium")):
        with pytest.raises(ExportError, match=f"'{name}' is an equilibrium"):
            export_model(model, tmp_path / "other", "plain", example_inputs=torch.randn(2, 3, 32, 32))
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_exported(tmp_path):
    place = tmp_path / "model.onnx"
    model, _ = made("lenet", "proxsg", eval_mode="stochastic")
    with pytest.raises(ExportError, match=r"draw nothing in evaluation; .* do"):
        export_model(model, place)
    model, _ = made("lenet", "proxgd")
    with pytest.raises(ExportError, match="Did you mean 'onnx'"):
        export_model(model, place, "onxx")
    with pytest.raises(ExportError, match=r"export model\._orig_mod"):
        export_model(torch.compile(model), place)
    with pytest.raises(ExportError, match="two samples or more; found 1"):
        export_model(model, place, example_inputs=torch.randn(1, 3, 32, 32))

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match=r"torch.export cannot export this Branching"):
        export_model(Branching(), place, example_inputs=torch.randn(2, 3))

    class OfTwo(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1)

    with pytest.raises(ExportError, match=r"dynamic_batch=False"):
        export_model(OfTwo(), place, example_inputs=torch.randn(2, 3))
    assert not list(tmp_path.iterdir())
    place.write_text("")
    with pytest.raises(SavingError, match="exists; pass overwrite=True"):
        export_model(model, place)


def test_a_program_that_differs_is_not_written(tmp_path, monkeypatch):
    model, _ = made("lenet", "proxgd")
    monkeypatch.setattr("solver_plugins.integrations.export.TOLERANCE", -1.0)
    with pytest.raises(ExportError, match=r"does not compute what the model does: with a batch of 2"):
        export_model(model, tmp_path / "model.pt2", "pt2")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(made("lenet", "proxgd")[0], "saved", model_args={"channels": (2, 4), "features": (12, 8)})
    with pytest.raises(SystemExit) as ended:
        main(["export", "saved", "--to", "pt2"])
    assert ended.value.code == 0
    assert "saved.pt2: pt2, " in (shown := capsys.readouterr().out) and "at batch size 3" in shown


def test_the_program_needs_nothing_of_ours(tmp_path):
    model, inputs = made("lenet", "proxgd")
    export_model(model, tmp_path / "model.pt2", "pt2")
    x = inputs(3)["x"]
    with torch.no_grad():
        torch.save((x, model(x)), tmp_path / "pair.pt")
    code = """
import sys, torch
sys.modules["solver_plugins"] = None
x, y = torch.load("pair.pt")
torch.testing.assert_close(torch.export.load("model.pt2").module()(x), y, rtol=1e-4, atol=1e-5)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.ao.quantization")
def test_tools_that_would_miss_the_solver():
    model = convert_model(
        nn.Sequential(nn.Linear(8, 6), nn.ReLU()), "proxgd", iters=3, example_inputs=torch.randn(2, 8)
    )
    model.eval()
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for trace in (
            lambda: torch.jit.trace(model, x),
            lambda: torch.jit.trace(lambda x: model(x), x),
            lambda: torch.jit.script(model),
            lambda: torch.fx.symbolic_trace(model),
            lambda: torch.onnx.export(model, (x,), "never.onnx", dynamo=False),
        ):
            with pytest.raises(UnsupportedLayerError, match=r"use torch.export.export\(model"):
                trace()
        with pytest.raises(UnsupportedLayerError, match=r"swaps layers by their class"):
            torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        # As torchao.quantization.quantize_ does.
        with pytest.raises(UnsupportedLayerError, match=r"a quantized weight \(Int8Tensor of torchao\) does not offer"):
            model[0].weight = Int8Tensor(model[0].weight.detach())
    # Looking at a module is no tracing.
    assert all(getattr(model[0], name, None) is not model for name in dir(model[0]))


class Int8Tensor(nn.Parameter):
    """Stands for torchao's."""

    __module__ = "torchao.quantization"


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:torch.quantize_per_tensor")
def test_merged_layers_are_quantized_and_quantized_ones_are_left():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)).eval()

    x = torch.randn(4, 16)
    merged = merge_model(convert_model(build(), "proxgd", 4, pattern="all", example_inputs=x))
    expected = merged(x)
    small = torch.ao.quantization.quantize_dynamic(merged, {nn.Linear}, dtype=torch.qint8)
    assert type(small[0]) is torch.ao.nn.quantized.dynamic.Linear
    assert (small(x) - expected).abs().max() < 0.1 * expected.abs().max()
    merged[0].weight = Int8Tensor(merged[0].weight.detach())
    report = inspect_model(merged, "proxgd", 4, pattern="all", example_inputs=x)
    assert [row.name for row in report.converted] == ["2"]
    assert "its weight is quantized (Int8Tensor of torchao)" in next(r.reason for r in report.rows if r.name == "0")
