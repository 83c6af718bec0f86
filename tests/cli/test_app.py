"""The command itself: help, versions, and how mistakes are told."""

import json
from pathlib import Path

import pytest
import torch

from solver_plugins import __version__
from solver_plugins.cli import app, main


def run(capsys, *args):
    """Runs the command and returns exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as stopped:
        main(list(args))
    out, err = capsys.readouterr()
    return stopped.value.code or 0, out, err


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name, text in app.COMMANDS.items():
        assert name in out and text.split()[0] in out


@pytest.mark.parametrize("name", sorted(app.COMMANDS))
def test_every_command_has_help_of_its_own(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and "Usage: solver-plugins" in out and name in out


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and __version__ in out


def test_env_names_versions_and_devices_and_no_places(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0 and str(Path.home()) not in out and str(Path(torch.__file__).parent) not in out
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("CUDA"))
    assert lines["solver-plugins"] == __version__ and lines["torch"] == torch.__version__
    assert "cpu with" in lines["devices"] and lines["peft"] != "not installed"
    code, out, _ = run(capsys, "env", "--json")
    assert code == 0 and json.loads(out)["timm"] == lines["timm"]


def test_unknown_command_names_the_nearest(capsys):
    code, _, err = run(capsys, "inspekt")
    assert code == 2 and "Did you mean 'inspect'" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [(("inspect",), "Missing argument"), (("inspect", "timm/vgg16", "--iters", "x"), "--iters"),
     (("inspect", "timm/vgg16", "--nonsense"), "--nonsense")],
)  # fmt: skip
def test_wrong_usage_of_a_subcommand(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2 and message in err and not out


def test_mistakes_of_the_user_are_one_message(capsys):
    code, out, err = run(capsys, "inspect", "timm/vgg16", "--solver", "fsta")
    assert code == 2 and not out
    assert "Did you mean 'fista'" in err and "Traceback" not in err


def test_defects_keep_their_traceback(monkeypatch):
    def broken(*args, **keywords):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("solver_plugins.cli.inspect.load_model", broken)
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "timm/vgg16"])


def test_errors_break_at_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def said() -> str:
        with pytest.raises(SystemExit):
            main(["study", "run", "nope"])
        return capsys.readouterr().err

    whole = said()
    assert max(map(len, whole.splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    broken = said()
    assert max(map(len, broken.splitlines())) <= 80 and broken.split() == whole.split()
