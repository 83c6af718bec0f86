"""Several processes give what one gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator

from solver_plugins.studies import read_study_config, run_study
from solver_plugins.studies.processes import Team
from solver_plugins.train import LaunchError
from tests.train.runs import spawning

ROOT = Path(__file__).parents[2]
CHANGES = ["descent.iterations=30", "seeds=[0,1]"]


def run_as(rank: int, port: int, output: Path, changes: list[str]) -> None:
    """Runs one of two processes, as a launcher starts it."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    from solver_plugins.errors import SolverPluginsError

    torch.set_num_threads(1)
    try:
        run_study("dropblock-fig1", read_study_config("dropblock-fig1", "smoke", changes), output)
    except SolverPluginsError as error:
        (output.parent / f"error{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        sys.exit(2)


def in_two_processes(output: Path, changes: list[str]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [spawning().Process(target=run_as, args=(rank, port, output, changes)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(240)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    return codes


def measured(output: Path) -> dict:
    found = json.loads((output / "metrics.json").read_text())
    # When, where and how fast is another matter.
    found.pop("made")
    return found


def test_two_processes_give_the_result_of_one(tmp_path, monkeypatch):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_study("dropblock-fig1", read_study_config("dropblock-fig1", "smoke", CHANGES), tmp_path / "one")
    finally:
        torch.set_num_threads(threads)
    assert in_two_processes(tmp_path / "two", CHANGES) == [0, 0]
    assert measured(tmp_path / "two") == measured(tmp_path / "one")
    # No cell was measured twice, none is claimed any more.
    assert sorted(path.name for path in (tmp_path / "two" / "cells").iterdir()) == sorted(
        path.name for path in (tmp_path / "one" / "cells").iterdir()
    )
    # Both are told of a folder that is another run's, and it stays as it was.
    before = measured(tmp_path / "two")
    assert in_two_processes(tmp_path / "two", [*CHANGES, "thetas=[0.6]"]) == [2, 2]
    assert (tmp_path / "error0.txt").read_text().startswith("OutputError: The run in ")
    assert (
        (tmp_path / "error1.txt").read_text().startswith("OtherProcessError: Another process has stopped: OutputError")
    )
    assert measured(tmp_path / "two") == before


def test_processes_that_do_not_find_each_other(environment):
    """WORLD_SIZE alone, from an environment that is none of a launcher."""
    environment["WORLD_SIZE"] = "2"
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with pytest.raises(LaunchError, match="2 processes were started"):
        Team()
    # Nothing of it is left for those who come next, but for what Accelerate writes into the environment.
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    assert Accelerator(cpu=True).num_processes == 1


def test_errors_of_the_first_process_are_raised():
    def fail() -> None:
        raise ZeroDivisionError

    with Team() as team:
        assert team.count == 1 and team.index == 0
        with pytest.raises(ZeroDivisionError):
            team.first(fail)
        team.agree(None)


@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    done = subprocess.run(
        [
            Path(sys.executable).with_name("accelerate"), "launch", "--config_file",
            ROOT / "configs" / "accelerate" / "two_cpu_processes.yaml", "-m", "solver_plugins.cli", "study", "run",
            "dropblock-fig1", *CHANGES, "--scale", "smoke", "--output", tmp_path / "two",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    run_study("dropblock-fig1", read_study_config("dropblock-fig1", "smoke", CHANGES), tmp_path / "one", scale="smoke")
    one, two = measured(tmp_path / "one"), measured(tmp_path / "two")
    assert [cell["gap"] for cell in two["cells"]] == pytest.approx([cell["gap"] for cell in one["cells"]], rel=1e-6)
