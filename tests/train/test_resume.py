"""Runs that are killed, damaged, or out of disk, and go on as if nothing had been."""

import json
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch

from solver_plugins.train import CheckpointError, OutputError
from solver_plugins.train.finetune import finetune
from tests.train.runs import everything, run_as, spawning, tiny, weights


def same_end(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    rows = [
        [{**json.loads(line), "seconds": 0} for line in (path / "solver" / "metrics.jsonl").read_text().splitlines()]
        for path in (one, other)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that was never killed, and how long it took."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    start = time.monotonic()
    finetune(everything(folder))
    return folder, time.monotonic() - start


def test_other_examples_are_not_gone_on_with(tmp_path):
    config = tiny(tmp_path / "run")
    finetune(config)
    (tmp_path / "run" / "solver" / "result.json").unlink()
    known = json.loads((tmp_path / "run" / "data.json").read_text())
    assert (known["train"], known["eval"], len(known["classes"])) == (64, 37, 10)
    for change, told in (({"train": 69}, "train 69 there, 64 now"), ({"labels": "other"}, "their labels differ")):
        (tmp_path / "run" / "data.json").write_text(json.dumps({**known, **change}))
        with pytest.raises(OutputError, match=f"{told}.*restore the data, or use --overwrite"):
            finetune(config, resume=True)
    # A run that was killed before it was written, or is older.
    (tmp_path / "run" / "data.json").unlink()
    finetune(config, resume=True)
    assert json.loads((tmp_path / "run" / "data.json").read_text()) == known


def killed_runs(folder, seconds, kills, seed):
    """Kills a run at random moments, every third during a save, and resumes it; returns how many hit it alive."""
    chosen, context, hits = random.Random(seed), spawning(), 0
    for _ in range(5 * kills):
        if hits == kills:
            break
        child = context.Process(target=run_as, args=(0, 1, 0, everything(folder), True))
        child.start()
        if hits % 3 == 0:
            saves = folder / "solver" / "checkpoints"
            while child.is_alive() and not list(saves.glob(".step-*.new")):
                time.sleep(0.0005)
        else:
            child.join(chosen.uniform(0.05, 0.6) * seconds)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            hits += 1
        else:
            # It was done before: that was no kill, and there is nothing left to kill.
            shutil.rmtree(folder)
        child.join()
    finetune(everything(folder), resume=True)
    return hits


def test_killed_and_resumed_is_the_same_run(reference, tmp_path):
    folder, seconds = reference
    assert killed_runs(tmp_path / "run", seconds, 5, 0) == 5
    same_end(folder, tmp_path / "run")


@pytest.mark.slow
def test_killed_twenty_times(reference, tmp_path):
    folder, seconds = reference
    hits = 0
    for number in range(4):
        hits += killed_runs(tmp_path / f"run{number}", seconds, 5, number)
        same_end(folder, tmp_path / f"run{number}")
    assert hits == 20


def stopped_half_way(folder, reference):
    """A run whose last steps are yet to be done, made from the finished one."""
    shutil.copytree(reference, folder)
    shutil.rmtree(folder / "solver" / "model")
    (folder / "solver" / "result.json").unlink()
    return sorted((folder / "solver" / "checkpoints").iterdir())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", flip),
        ("optimizer.bin", lambda path: path.write_bytes(path.read_bytes()[:-7])),
        ("random_states_0.pkl", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.write_text("{")),
    ],
)
def test_damaged_checkpoint_is_passed_over(reference, tmp_path, capsys, name, damage):
    folder, _ = reference
    before, last = stopped_half_way(tmp_path / "run", folder)
    damage(last / name)
    finetune(everything(tmp_path / "run"), resume=True)
    said = capsys.readouterr().out
    assert f"{last.name} is damaged" in said and f"continues from {before.name}" in said
    same_end(folder, tmp_path / "run")


def test_only_damaged_checkpoints(reference, tmp_path):
    for path in stopped_half_way(tmp_path / "run", reference[0]):
        flip(path / "custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"the checksum of custom_checkpoint_0\.pkl differs.*--overwrite"):
        finetune(everything(tmp_path / "run"), resume=True)


class Harmful:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_checkpoint_that_would_run_code(reference, tmp_path):
    import hashlib

    marker = tmp_path / "ran"
    for path in stopped_half_way(tmp_path / "run", reference[0]):
        file = path / "custom_checkpoint_0.pkl"
        torch.save({"progress": Harmful(marker)}, file)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][file.name] = {
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not load as data alone"):
        finetune(everything(tmp_path / "run"), resume=True)
    assert not marker.exists()


def run_with_little_disk(config, most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        finetune(config, resume=True)
    except CheckpointError as error:
        assert "is kept" in str(error) and "--resume" in str(error)
        os._exit(7)


def test_full_disk_keeps_the_checkpoint_before(reference, tmp_path):
    folder, _ = reference
    before, last = stopped_half_way(tmp_path / "run", folder)
    flip(last / "model.safetensors")
    largest = max(path.stat().st_size for path in before.iterdir())
    child = spawning().Process(target=run_with_little_disk, args=(everything(tmp_path / "run"), largest // 2))
    child.start()
    child.join()
    assert child.exitcode == 7
    assert before.is_dir() and not list(before.parent.glob(".step-*"))
    finetune(everything(tmp_path / "run"), resume=True)
    same_end(folder, tmp_path / "run")


def test_resume_of_a_finished_run_trains_nothing(tmp_path):
    first = finetune(tiny(tmp_path / "run"))
    written = (tmp_path / "run" / "solver" / "model" / "model.safetensors").stat().st_mtime_ns
    assert finetune(tiny(tmp_path / "run"), resume=True) == first
    assert (tmp_path / "run" / "solver" / "model" / "model.safetensors").stat().st_mtime_ns == written
