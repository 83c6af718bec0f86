"""The command on a layer small enough for a test; times are measured, and never asserted."""

import json

import pytest
import torch
from torch.nn import functional

from solver_plugins.blocks import SolverBlock
from solver_plugins.operators import image_of
from tests.benchmarks import measure
from tests.benchmarks.measure import Case
from tests.benchmarks.solver_blocks import main

SMALL = Case("12 → 8", 12, 8, 16)
SMALL_CONV = Case("conv 3 → 4", 3, 4, 2, kernel=3, size=6)


def run(capsys, *args):
    """Runs the command and returns exit code, standard output and standard error."""
    code = 0
    try:
        main(args)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def small(monkeypatch):
    for name in ("CASES", "SWEEP"):
        monkeypatch.setattr(measure, name, (SMALL,))
    monkeypatch.setattr(measure, "CONVOLUTIONS", (SMALL_CONV,))


def test_tables_numbers_and_figure(capsys, tmp_path, small):
    threads = torch.get_num_threads()
    suites = [part for name in ("linear", "conv", "sampled", "evaluation") for part in ("--suite", name)]
    files = ["--output", str(tmp_path / "bench.json"), "--figure", str(tmp_path / "bench.png")]
    code, out, err = run(capsys, *suites, "--iters", "3", "--repeats", "1", "--threads", "1", *files)
    assert code == 0, err
    assert torch.get_num_threads() == threads
    data = json.loads((tmp_path / "bench.json").read_text())
    found = {name: {row["variant"] for row in rows} for name, rows in data["suites"].items()}
    assert found["linear"] == {"plain", "loop", "two_step", "auto", "low memory", "implicit", "gram", "fista"}
    assert "gram" not in found["conv"] and "shared, columns" in found["sampled"]
    assert found["evaluation"] == {"plain", "loop", "cached gram"}
    assert all(row["forward"] > 0 for rows in data["suites"].values() for row in rows)
    assert (tmp_path / "bench.png").stat().st_size > 1000
    assert "| 12 → 8, 16 | 3 | auto |" in out


def test_some_variants(capsys, tmp_path, small):
    file = tmp_path / "bench.json"
    options = ["--iters", "3", "--repeats", "1", "--threads", "1", "--variant", "auto", "--output", str(file)]
    assert run(capsys, "--suite", "linear", *options)[0] == 0
    assert [row["variant"] for row in json.loads(file.read_text())["suites"]["linear"]] == ["plain", "loop", "auto"]
    code, _, err = run(capsys, "--suite", "sampled", *options)
    assert code == 2 and "masked" in err and "found auto" in err


def test_what_cannot_be_measured(capsys, small):
    assert run(capsys, "--suite", "liner")[0] == 2
    code, _, err = run(capsys, "--suite", "linear", "--filter", "nothing")
    assert code == 2 and "nothing" in err
    assert run(capsys, "--figure", "bench.gif")[0] == 2


@pytest.mark.parametrize("case", [SMALL, SMALL_CONV], ids=lambda case: case.title)
def test_the_loop_computes_what_the_block_computes(case):
    torch.manual_seed(0)
    layer, u = case.layer(), case.input()
    block = SolverBlock.from_layer(layer, torch.nn.ReLU(), "proxgd", 4).eval()
    with torch.no_grad():
        block.L.fill_(measure.constant_of(layer) - measure.LAM)
        block.certify_in_evaluation = False
        block.image.copy_(image_of(block._kernel()))
        expected = functional.relu(measure.naive_loop(layer, u.shape, 4)(u))
        torch.testing.assert_close(functional.relu(block(u)), expected, rtol=1e-4, atol=1e-5)


def test_counted_multiply_adds():
    """One plain product each for output, input and weight; by hand for 12 -> 8 with a Gram matrix."""
    plain, step = 16 * 12 * 8, 16 * 8 * 8
    assert SMALL.counted(3) == pytest.approx((3 * plain + 3 * 2 * step + 2 * 8 * 8 * 12) / (3 * plain))
    assert SMALL_CONV.counted(3) == pytest.approx(5)
