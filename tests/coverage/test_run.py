"""The command: what it writes, that it continues where it stopped, and what it does about workers that die."""

import json
from typing import Any

import pytest

from tests.coverage import newcomer, run, table
from tests.coverage.__main__ import main
from tests.coverage.result import CHECKS, Row
from tests.coverage.run import Limits, Task

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


def test_page_by_task():
    rows = [
        Row("transformers", "a", "x", passed=list(CHECKS), blocks={"linear": 2}, walk_seconds=0.1, generates="yes"),
        Row("transformers", "b", "x", foreign="ImportError: no natten", missing="built"),
        Row("transformers", "c", "x", foreign="ValueError: no bbox", missing="fed"),
        Row("transformers", "d", "x", failures={"worker": "took more than 9 seconds"}, generates="KeyError: a | b"),
    ]
    text = table.page([row.to_dict() | {"tasks": ["causal lm"]} for row in rows], {}, "today")
    assert "Of the 3 classes whose packages are installed, 1 ran (33.3%)." in " ".join(text.split())
    lines = text.splitlines()
    assert "| d | KeyError: a \\| b |" in lines
    why = "1 needs a package that is not installed, 1 no inputs, 1 too slow or large for this run"
    assert f"| causal lm | 4 | 2 | 1 | 1 | 1 | 1/1 | 1/1 | {why} |" in lines


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


def test_a_worker_that_dies_is_a_failure_and_the_run_goes_on(tmp_path, monkeypatch):
    """The first worker is killed from outside, as a machine out of memory does; the second task gets another one."""
    start, started = run._Worker._start, []

    def fragile(worker):
        start(worker)
        started.append(worker.process)
        if len(started) == 1:
            worker.process.kill()

    monkeypatch.setattr(run._Worker, "_start", fragile)
    path = tmp_path / "rows.jsonl"
    run.run([Task("timm", name, "x") for name in ("test_vit", "test_nfnet")], path, 1)
    rows = {name: row for (_, name), row in run.done(path).items()}
    assert len(started) == 2 and "exit code -9: killed" in rows["test_vit"]["failures"]["worker"]
    assert rows["test_nfnet"]["failures"] == {} and set(rows["test_nfnet"]["passed"]) == set(CHECKS)


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


def test_the_call_of_a_newcomer(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    options = ["--filter", "test_resnet", "--output", str(path)]
    assert newcomer.main(options) == 0 and newcomer.main(options) == 0
    assert len(path.read_text().splitlines()) == 1, "it continues where it stopped"
    line = "| resnet | test_resnet | `fc`: 0.5, the head | `fc`: 0.5, `drop_rate` |"
    assert line in capsys.readouterr().out.splitlines()
    (row,) = newcomer.done(path)
    assert row["made"]["warning"] and not row["dropping"]["warning"]
    run.append(path, row | {"dropping": {"error": "ValueError: no | head"}})
    assert newcomer.main(options) == 1
    text = capsys.readouterr().out
    assert "Of 2 calls 1 converted." in text and "| **ValueError: no \\| head** |" in text
    page = table.page([ROW], {"timm": "1.0"}, "today", newcomer.section(newcomer.done(path)))
    assert page.index("## Totals") < page.index("## The first call") < page.index("## timm by family")
