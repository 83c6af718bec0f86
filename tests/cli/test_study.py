"""``solver-plugins study``: listing, running, and one message with exit code 2 for every mistake."""

import json

import pytest

from solver_plugins.studies import list_studies
from tests.cli.test_app import run


def test_list_names_every_study(capsys):
    code, out, _ = run(capsys, "study", "list")
    assert code == 0 and all(name in out for name in list_studies()) and "Fig. 1 of" in out
    code, out, _ = run(capsys, "study", "list", "dropblock", "--json")
    assert code == 0 and "dropblock-fig1" in [row["name"] for row in json.loads(out)]


def test_list_without_a_match(capsys):
    code, out, err = run(capsys, "study", "list", "dropblok")
    assert code == 2 and not out and "No study matches 'dropblok'" in err and "Did you mean 'dropblock'" in err
    assert all(name in err for name in list_studies())
    code, out, _ = run(capsys, "study", "list", "dropblok", "--json")
    assert code == 0 and json.loads(out) == []


def test_help_names_the_default_folder(capsys):
    code, out, _ = run(capsys, "study", "run", "--help")
    assert code == 0 and "runs/studies/NAME-SCALE" in out


def test_output_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "afile").touch()
    output = str(tmp_path / "afile" / "x")
    code, out, err = run(capsys, "study", "run", "dropblock-fig1", "--scale", "smoke", "--output", output)
    assert code == 2 and not out and output in err and "choose another with --output" in err


def test_run_prints_the_table(capsys, tmp_path):
    arguments = ("study", "run", "dropblock-fig1", "descent.iterations=20", "--scale", "smoke", "--output")
    code, out, err = run(capsys, *arguments, str(tmp_path / "run"))
    assert code == 0 and "Traceback" not in err
    assert "| theta, training |" in out and "Report:" in out
    assert "descent.iterations=20 --scale smoke`" in (tmp_path / "run" / "table.md").read_text()
    again = run(capsys, *arguments, str(tmp_path / "run"))
    assert again[0] == 0 and again[1] == out


def test_dry_run_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "study", "run", "dropblock-fig1", "--scale", "paper", "--dry-run")
    assert code == 0 and "iterations: 100000" in out and "6 cells:\n  sampled_theta=0.5_seed=0\n" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dropblok-fig1",), "Did you mean 'dropblock-fig1'"),
        (("dropblock-fig1", "--scale", "tiny"), "smoke"),
        (("dropblock-fig1", "theta=0.5"), "Did you mean 'thetas'"),
        (("dropblock-fig1", "thetas"), "key=value"),
        (("dropblock-fig1", "block_size=3", "--scale", "smoke"), "The nearest that divide it"),
    ],
)
def test_mistakes_are_one_message(capsys, tmp_path, arguments, message):
    code, out, err = run(capsys, "study", "run", *arguments, "--output", str(tmp_path / "run"))
    assert code == 2 and not out
    assert err.startswith("Error: ") and message in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_output_of_another_config(capsys, tmp_path):
    arguments = ("study", "run", "dropblock-fig1", "--scale", "smoke", "--output", str(tmp_path / "run"))
    assert run(capsys, *arguments, "descent.iterations=3")[0] == 0
    code, out, err = run(capsys, *arguments, "descent.iterations=4")
    assert code == 2 and not out and "descent was" in err and "--overwrite" in err
    assert run(capsys, *arguments, "descent.iterations=4", "--overwrite")[0] == 0
