"""Several processes give what one gives."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from solver_plugins.train import CheckpointError
from solver_plugins.train.run import finetune
from tests.train.runs import VIT, everything, run_as, spawning, tiny, weights

ROOT = Path(__file__).parents[2]
DOUBLE = {"spec": "timm/test_vit", "args": VIT, "dtype": "float64"}


def in_two_processes(config, resume=False):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [spawning().Process(target=run_as, args=(rank, 2, port, config, resume)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert codes == [0, 0]


def test_two_processes_train_as_one(tmp_path):
    """Both arms, plain and proxgd; 37 examples to evaluate on are shared out unevenly."""
    one = finetune(tiny(tmp_path / "one", model=DOUBLE, baseline=True))
    in_two_processes(tiny(tmp_path / "two", model=DOUBLE, baseline=True))
    for arm in ("solver", "baseline"):
        alone, shared = weights(tmp_path / "one", arm), weights(tmp_path / "two", arm)
        assert all(value.dtype == torch.float64 for value in alone.values())
        assert max(float((alone[name] - shared[name]).abs().max()) for name in alone) < 1e-10
    assert f'"accuracy": {one["solver"]["accuracy"]}' in (tmp_path / "two" / "results.json").read_text()


def test_sampling_solvers_repeat_in_two_processes(tmp_path):
    for name in ("first", "second"):
        in_two_processes(everything(tmp_path / name))
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Continued from the checkpoint before the last one, where each process has its own random numbers.
    solver = tmp_path / "second" / "solver"
    shutil.rmtree(max((solver / "checkpoints").iterdir()))
    shutil.rmtree(solver / "model")
    (solver / "result.json").unlink()
    in_two_processes(everything(tmp_path / "second"), resume=True)
    assert all(torch.equal(first[name], value) for name, value in weights(tmp_path / "second").items())
    with pytest.raises(CheckpointError, match="written by 2 processes, and there are 1 now"):
        (solver / "result.json").unlink()
        finetune(everything(tmp_path / "second"), resume=True)
    finetune(everything(tmp_path / "alone"))
    # Each process draws its own masks, so that two are not one.
    assert not all(torch.equal(first[name], value) for name, value in weights(tmp_path / "alone").items())


@pytest.mark.slow
@pytest.mark.parametrize("config", ["one_process", "two_cpu_processes"])
def test_accelerate_launch(tmp_path, config):
    (tmp_path / "run.yaml").write_text(tiny(tmp_path / "run", model=DOUBLE).to_yaml())
    done = subprocess.run(
        [
            Path(sys.executable).with_name("accelerate"), "launch", "--config_file",
            ROOT / "configs" / "accelerate" / f"{config}.yaml", "-m", "solver_plugins.cli", "finetune",
            tmp_path / "run.yaml",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    finetune(tiny(tmp_path / "here", model=DOUBLE))
    here, launched = weights(tmp_path / "here"), weights(tmp_path / "run")
    assert max(float((here[name] - launched[name]).abs().max()) for name in here) < 1e-10
