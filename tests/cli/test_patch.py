"""``solver-plugins patch``."""

import json

from solver_plugins.integrations.patching import list_patches
from tests.cli.test_app import run


def test_list(capsys):
    code, out, _ = run(capsys, "patch", "list")
    assert code == 0
    for patch in list_patches():
        assert patch.name in out and patch.label in out and list(patch.tested.values())[-1] in out
    code, out, _ = run(capsys, "patch", "list", "--json")
    assert code == 0 and [row["name"] for row in json.loads(out)] == [patch.name for patch in list_patches()]


def test_refusals(capsys, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("print()\n")
    code, out, err = run(capsys, "patch", "apply", str(file))
    assert code == 2 and not out and "create_optimizer_v2, optimizer_kwargs' is not there" in err
    code, out, err = run(capsys, "patch", "revert", str(file))
    assert code == 2 and not out and "is not patched: it holds none of timm-train" in err
    assert file.read_text() == "print()\n"
    code, out, err = run(capsys, "patch", "apply", str(tmp_path / "nowhere.py"))
    assert code == 2 and "No such file" in err
    code, _, err = run(capsys, "patch", "apply")
    assert code == 2 and "Missing argument" in err
