"""Several processes give what one gives."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from solver_plugins.errors import SolverPluginsError
from solver_plugins.studies import read_study_config, run_study
from solver_plugins.studies.team import Team
from solver_plugins.train import LaunchError
from tests.train.runs import spawning

ROOT = Path(__file__).parents[2]
CHANGES = ["descent.iterations=30", "seeds=[0,1]"]


def run_as(rank: int, ports: list[int], output: Path, changes: list[str], names: list[str]) -> None:
    """Runs one of two processes, as a launcher starts it; the studies one after the other, each in its folder."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        for port, name in zip(ports, names, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            run_study(name, read_study_config(name, "smoke", changes), output / name)
    except SolverPluginsError as error:
        (output / f"error{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        sys.exit(2)


def in_two_processes(output: Path, changes: list[str], names: Sequence[str] = ("dropblock-fig1",)) -> list[int]:
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in names]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in free]
    children = [
        spawning().Process(target=run_as, args=(rank, ports, output, changes, list(names))) for rank in range(2)
    ]
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
    timed = [found["summary"], *found["cells"]]
    for values in timed:
        for key in [key for key in values if key.endswith(("_seconds", "times_plain"))]:
            del values[key]
    return found


def in_one_process(output: Path, changes: list[str], names: Sequence[str] = ("dropblock-fig1",)) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            run_study(name, read_study_config(name, "smoke", changes), output / name)
    finally:
        torch.set_num_threads(threads)


def test_two_processes_give_the_result_of_one(tmp_path):
    in_one_process(tmp_path / "one", CHANGES)
    assert in_two_processes(tmp_path / "two", CHANGES) == [0, 0]
    one, two = (tmp_path / count / "dropblock-fig1" for count in ("one", "two"))
    assert measured(two) == measured(one)
    # No cell was measured twice, none is claimed any more.
    assert sorted(path.name for path in (two / "cells").iterdir()) == sorted(
        path.name for path in (one / "cells").iterdir()
    )
    # Both are told of a folder that is another run's, and it stays as it was.
    before = measured(two)
    assert in_two_processes(tmp_path / "two", [*CHANGES, "thetas=[0.6]"]) == [2, 2]
    first, second = ((tmp_path / "two" / f"error{rank}.txt").read_text() for rank in range(2))
    assert first.startswith("OutputError: The run in ")
    assert second.startswith("OtherProcessError: Another process has stopped: OutputError")
    assert measured(two) == before


def test_networks_of_two_processes_are_those_of_one(tmp_path):
    """Where weights, order of images and masks are random; a backbone is trained by every process that needs it."""
    names = ("opteq-head", "dropblock-regularizer")
    in_one_process(tmp_path / "one", [], names)
    assert in_two_processes(tmp_path / "two", [], names) == [0, 0]
    for name in names:
        found = measured(tmp_path / "two" / name)
        assert found == measured(tmp_path / "one" / name) and len(found["cells"]) == 3
        assert all(cell["accuracy"] is not None for cell in found["cells"])


def test_cells_of_two_processes_do_not_talk(tmp_path):
    """Calibration broadcasts and ProxProp adds up where there is a process group; a cell must find none."""
    names = ("deeplayers-pretrained", "proxprop-convergence")
    in_one_process(tmp_path / "one", [], names)
    assert in_two_processes(tmp_path / "two", [], names) == [0, 0]
    for name in names:
        assert measured(tmp_path / "two" / name) == measured(tmp_path / "one" / name)


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
@pytest.mark.parametrize("name", ["dropblock-fig1", "dropblock-regularizer", "opteq-head"])
def test_accelerate_launch(tmp_path, name):
    """The command with two processes, from the configuration that is shipped: the numbers of one process, exactly."""
    changes = CHANGES if name == "dropblock-fig1" else []
    done = subprocess.run(
        [
            Path(sys.executable).with_name("accelerate"), "launch", "--config_file",
            ROOT / "configs" / "accelerate" / "two_cpu_processes.yaml", "-m", "solver_plugins.cli", "study", "run",
            name, *changes, "--scale", "smoke", "--output", tmp_path / "two",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1
    in_one_process(tmp_path, changes, [name])
    one, two = measured(tmp_path / name), measured(tmp_path / "two")
    # In the folder of this run alone: what the scale is called.
    one.pop("scale"), two.pop("scale")
    assert two == one and len(two["cells"]) > 1
