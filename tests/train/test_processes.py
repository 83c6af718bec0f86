"""Several processes give what one gives."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from solver_plugins.train import CheckpointError
from solver_plugins.train.finetune import finetune
from solver_plugins.train.pickles import check_is_data
from tests.gloo import free_port
from tests.train.runs import VIT, everything, run_as, spawning, tiny, weights

ROOT = Path(__file__).parents[2]
DOUBLE = {"spec": "timm/test_vit", "args": VIT, "dtype": "float64"}
HEAD = {
    "hidden": 8,
    "tol": 1e-13,
    "iters": 200,
    "solver_args": {"implicit_tol": 1e-13, "implicit_iters": 200},
}
"""An equilibrium that is exact up to rounding."""
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
           "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
           "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # fmt: skip
"""What ``accelerate launch`` makes of configs/accelerate/fsdp.yaml."""


def in_two_processes(config, resume=False, environment=None):
    port = free_port()
    children = [
        spawning().Process(target=run_as, args=(rank, 2, port, config, resume, environment)) for rank in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(240)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert codes == [0, 0], codes


def test_two_processes_train_as_one(tmp_path):
    """Both arms, plain and proxgd with all that is added to it; 37 examples are shared out unevenly."""
    more = {"proxprop": {"mode": "cg3"}, "regularizer": {"theta": 0.8, "block_size": 4}, "head": HEAD}
    one = finetune(tiny(tmp_path / "one", model=DOUBLE, baseline=True, **more))
    in_two_processes(tiny(tmp_path / "two", model=DOUBLE, baseline=True, **more))
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
    start_again(solver)
    in_two_processes(everything(tmp_path / "second"), resume=True)
    assert all(torch.equal(first[name], value) for name, value in weights(tmp_path / "second").items())
    with pytest.raises(CheckpointError, match="written by 2 processes, and there are 1 now"):
        (solver / "result.json").unlink()
        finetune(everything(tmp_path / "second"), resume=True)
    finetune(everything(tmp_path / "alone"))
    # Each process draws its own masks, so that two are not one.
    assert not all(torch.equal(first[name], value) for name, value in weights(tmp_path / "alone").items())


def start_again(folder):
    """Takes the last checkpoint and the result from a finished run."""
    shutil.rmtree(max((folder / "checkpoints").iterdir()))
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()


def test_sharded_weights_train_as_one(tmp_path):
    """FSDP2 over gloo: the weights of one process, also when it goes on from a checkpoint."""
    more = {"model": DOUBLE, "checkpoints": {"every": 2}, "proxprop": {"mode": "exact"}}
    finetune(tiny(tmp_path / "one", **more))
    shared = tiny(tmp_path / "two", **more)
    in_two_processes(shared, environment=SHARDED)
    alone = weights(tmp_path / "one")
    for _ in range(2):
        found = weights(tmp_path / "two")
        assert max(float((alone[name] - found[name]).abs().max()) for name in alone) < 1e-10
        start_again(tmp_path / "two" / "solver")
        in_two_processes(shared, resume=True, environment=SHARDED)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_sharded_checkpoints_hold_data_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir has no place in a checkpoint"):
        check_is_data(tmp_path / ".metadata")
    # An option of an optimiser is a pickle inside of a file that is none.
    (tmp_path / "__0_0.distcp").write_bytes(made := pickle.dumps(Harmful(), protocol=2))
    place = _StorageInfo("__0_0.distcp", 0, len(made))
    contents = Metadata({"lr": BytesStorageMetadata()}, storage_data={MetadataIndex("lr"): place})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(contents))
    with pytest.raises(pickle.UnpicklingError):
        check_is_data(tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()


def test_launches_that_cannot_be_sharded(tmp_path):
    for changes, environment in (({"ema": {"decay": 0.9}}, SHARDED), ({}, {**SHARDED, "FSDP_VERSION": "1"})):
        with pytest.raises(AssertionError, match=r"\[2, 2\]"):
            in_two_processes(tiny(tmp_path / "run", **changes), environment=environment)
        assert not (tmp_path / "run").exists()


SMALLER = {"fsdp": ("--num_processes", "2")}
"""Eight GPUs are too many for this test."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("one_process", {}),
        ("two_cpu_processes", {}),
        ("two_cpu_processes", {"head": HEAD, "solver": None}),
        ("fsdp", {}),
    ],
    ids=["one_process", "two_cpu_processes", "two_cpu_processes-head", "fsdp"],
)
def test_accelerate_launch(tmp_path, config, more):
    (tmp_path / "run.yaml").write_text(tiny(tmp_path / "run", model=DOUBLE, **more).to_yaml())
    done = subprocess.run(
        [
            Path(sys.executable).with_name("accelerate"), "launch", "--config_file",
            ROOT / "configs" / "accelerate" / f"{config}.yaml", *SMALLER.get(config, ()),
            "-m", "solver_plugins.cli", "finetune", tmp_path / "run.yaml",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    finetune(tiny(tmp_path / "here", model=DOUBLE, **more))
    here, launched = weights(tmp_path / "here"), weights(tmp_path / "run")
    assert max(float((here[name] - launched[name]).abs().max()) for name in here) < 1e-10
