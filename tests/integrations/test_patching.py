"""Insert-only patches: on a script of our own, and on the real ones where they are at hand."""

import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from solver_plugins.integrations.patching import (
    PatchError,
    apply_patch,
    list_patches,
    patch_folder,
    read_patch,
    revert_patch,
)

SCRIPT = b"""import sys

def main():
    print("train", len(sys.argv))
main()"""
"""A script without a line end at its end."""
PATCHED = b"""import sys
import os

def main():
    # solver_plugins
    print(os.sep == "/")
    print("train", len(sys.argv))
main()"""
DIFF = """@@ -1,1 +1,2 @@
 import sys
+import os
@@ -3,2 +4,4 @@
 def main():
+    # solver_plugins
+    print(os.sep == "/")
     print("train", len(sys.argv))
"""


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def write_patch(folder, name="made", diff=DIFF, target="train.py", **header):
    fields = {"Package": "made", "Target": target, "Tested": f"1.1 {sha256(SCRIPT)}", **header}
    lines = [f"{key}: {value}" for key, value in fields.items() if value is not None]
    place = folder / f"{name}.patch"
    place.write_text("About it.\n\n" + "\n".join(lines) + f"\n\n--- a/{target}\n+++ b/{target}\n" + diff)
    return place


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "patches"
    made.mkdir()
    write_patch(made)
    return made


@pytest.fixture
def script(tmp_path):
    place = tmp_path / "train.py"
    place.write_bytes(SCRIPT)
    place.chmod(0o750)
    return place


def test_apply_and_revert(folder, script):
    assert apply_patch(script, folder).version == "1.1"
    assert script.read_bytes() == PATCHED
    assert revert_patch(script, folder).patch.name == "made"
    assert script.read_bytes() == SCRIPT
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert sorted(path.name for path in script.parent.iterdir()) == ["patches", "train.py"]


@pytest.mark.parametrize("change", [
    lambda text: b"#!/usr/bin/python\n\n" + text,
    lambda text: text + b"\n\ndef other():\n    print()\n",
    lambda text: text.replace(b"\n", b"\r\n"),
    lambda text: text.replace(b"def main", b"class Other:\n    pass\n\ndef main"),
])  # fmt: skip
def test_another_version_is_patched_where_the_context_is(folder, script, change):
    script.write_bytes(change(SCRIPT))
    assert apply_patch(script, folder).version is None
    assert script.read_bytes() == change(PATCHED)
    revert_patch(script, folder)
    assert script.read_bytes() == change(SCRIPT)


def test_a_renamed_script_is_recognised(folder, script):
    other = script.rename(script.with_name("mine.py"))
    assert apply_patch(other, folder).patch.name == "made"
    assert other.read_bytes() == PATCHED


def test_a_link_stays_one(folder, script, tmp_path):
    link = tmp_path / "linked.py"
    link.symlink_to(script)
    apply_patch(link, folder)
    assert link.is_symlink() and script.read_bytes() == PATCHED


@pytest.mark.parametrize(("content", "name", "message"), [
    (PATCHED, "train.py", "is patched already, with 'made'"),
    (PATCHED + b"\n", "train.py", "is patched already, with 'made'"),
    (PATCHED.replace(b"os.sep", b"os.name"), "train.py", "holds a part of the patch 'made', and was changed since"),
    (SCRIPT.replace(b"import sys", b"import  sys"), "train.py", "after the line 'import sys' is not there"),
    (SCRIPT + b"\nimport sys\n", "train.py", "after the line 'import sys' is there 2 times.*solver-plugins run"),
    (SCRIPT.replace(b"main()", b"main("), "train.py", "before the line .* is not there"),
    (SCRIPT + b"\nif", "train.py", "does not compile as it is"),
    (b"print()", "other.py", "No patch fits 'other.py'.*train.py of made"),
])  # fmt: skip
def test_apply_refuses(folder, tmp_path, content, name, message):
    place = tmp_path / name
    place.write_bytes(content)
    with pytest.raises(PatchError, match=message):
        apply_patch(place, folder)
    assert place.read_bytes() == content


@pytest.mark.parametrize(("content", "message"), [
    (SCRIPT, "is not patched: it holds none of made"),
    (PATCHED.replace(b"os.sep", b"os.name"), "holds 1 of the 2 insertions of 'made'"),
    (PATCHED + b"\nimport sys\nimport os\n", "holds 2 of the 2 insertions|Undo your changes"),
])  # fmt: skip
def test_revert_refuses(folder, script, content, message):
    script.write_bytes(content)
    with pytest.raises(PatchError, match=message):
        revert_patch(script, folder)
    assert script.read_bytes() == content


def test_files_that_cannot_be_read(folder, tmp_path):
    with pytest.raises(PatchError, match="No such file"):
        apply_patch(tmp_path / "nowhere.py", folder)
    with pytest.raises(PatchError, match="Is a directory"):
        revert_patch(tmp_path, folder)


def test_a_full_disk_leaves_the_file(folder, script, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PatchError, match=r"No space left on device\. It is as it was"):
        apply_patch(script, folder)
    assert script.read_bytes() == SCRIPT
    assert sorted(path.name for path in script.parent.iterdir()) == ["patches", "train.py"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"diff": "@@ -1,1 +1,1 @@\n-import sys\n+import os\n"}, "a patch only inserts"),
    ({"diff": "@@ -1,1 +1,3 @@\n import sys\n+import os\n"}, "a patch only inserts"),
    ({"diff": "@@ -1,2 +1,2 @@\n import sys\n+import os\n"}, "a patch only inserts"),
    ({"diff": "@@ -1,0 +2,1 @@\n+import os\n"}, "no line of context|a patch only inserts"),
    ({"diff": "import os\n"}, "found 'import os'"),
    ({"diff": ""}, "inserts nothing"),
    ({"Target": None}, "lacks Target"),
    ({"Tested": "1.0 12"}, "64 hexadecimal digits for Tested; found '1.0 12'"),
])  # fmt: skip
def test_damaged_patches(tmp_path, changes, message):
    with pytest.raises(PatchError, match=message):
        read_patch(write_patch(tmp_path, **changes))


def test_a_patch_whose_result_does_not_compile(folder, script):
    write_patch(folder, diff=DIFF.replace("+    # solver", "+  # solver").replace("+    print", "+  print"))
    with pytest.raises(PatchError, match="does not compile with the patch 'made'"):
        apply_patch(script, folder)
    assert script.read_bytes() == SCRIPT


def test_our_patches(tmp_path):
    """Each one says what it is in its name, and applies to a script that has no more than the lines it knows."""
    patches = list_patches()
    assert {patch.package for patch in patches} == {"timm", "transformers"}
    for patch in patches:
        assert patch.name == f"{patch.package}-{Path(patch.target).stem}"
        text = b"\n".join(line for hunk in patch.hunks for line in hunk.lines)
        # The option, the conversion and the refresh.
        assert b"solver_config" in text and b"convert_from_file(model" in text
        assert (b"refresh_steps(model)" if patch.package == "timm" else b"SolverCallback().add_to(trainer)") in text
    readme = (patch_folder() / "README.md").read_text()
    assert all(f"| `{patch.name}.patch` |" in readme and f"| {patch.count} lines |" in readme for patch in patches)


def upstream(patch, tmp_path):
    """Returns a copy of the script that a patch is for, or skips."""
    root = os.environ.get("SOLVER_PLUGINS_UPSTREAM")
    if not root:
        pytest.skip("SOLVER_PLUGINS_UPSTREAM names no folder with the training scripts of timm and transformers")
    name = Path(patch.target).name
    for found in Path(root).rglob(name):
        return Path(shutil.copy(found, tmp_path / name))
    pytest.skip(f"no {name} in SOLVER_PLUGINS_UPSTREAM")


@pytest.mark.parametrize("patch", list_patches(), ids=lambda patch: patch.name)
def test_real_scripts(patch, tmp_path):
    script = upstream(patch, tmp_path)
    before = script.read_bytes()
    assert apply_patch(script).patch == patch
    compile(script.read_bytes(), str(script), "exec")
    # Nothing but insertions: what is left without the new lines is the script, in order.
    assert len(script.read_bytes().splitlines()) == len(before.splitlines()) + patch.count
    revert_patch(script)
    assert script.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("patch", [p for p in list_patches() if p.package == "timm"], ids=lambda patch: patch.name)
def test_timm_trains(patch, tmp_path):
    """Two epochs with a solver give other weights than without it, under the same names; a third one resumes."""
    import torch

    script = upstream(patch, tmp_path)
    apply_patch(script)
    images(tmp_path / "images", "validation")
    (tmp_path / "solver.yaml").write_text("solver: proxsg\niters: 3\npattern: strict\n")
    common = [
        "--data-dir=images", "--model=solver_lenet", "--drop=0.5", "--num-classes=2", "--epochs=2", "--batch-size=4",
        "--workers=0", "--no-prefetcher", "--device=cpu", "--lr=0.01", "--output=out", "--input-size", "3", "32", "32",
    ]  # fmt: skip
    with_solver = ["--solver-config", "solver.yaml"]
    run(script, *common, *with_solver, "--experiment", "whole")
    run(script, *common, "--experiment", "plain")
    whole, plain = (
        torch.load(tmp_path / "out" / name / "last.pth.tar", weights_only=False)["state_dict"]
        for name in ("whole", "plain")
    )
    assert whole.keys() == plain.keys()
    assert not torch.equal(whole["fc1.weight"], plain["fc1.weight"])
    resumed = run(
        script, *common, *with_solver, "--resume=out/whole/last.pth.tar", "--epochs=3", "--experiment=resumed"
    )
    assert "(epoch 1)" in resumed.stderr and "Train: 2" in resumed.stderr and "Train: 1 " not in resumed.stderr
    failed = run(script, *common, "--solver-config", "nowhere.yaml", check=False)
    assert failed.returncode and "Cannot read 'nowhere.yaml'" in failed.stderr
    failed = run(script, *common, *with_solver, "--torchscript", check=False)
    assert failed.returncode == 2 and "does not go with --split-bn or --torchscript" in failed.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("evaluate") is None, reason="the script needs the package evaluate")
@pytest.mark.parametrize(
    "patch", [p for p in list_patches() if p.package == "transformers"], ids=lambda patch: patch.name
)
def test_transformers_trains(patch, tmp_path):
    import transformers

    from solver_plugins import conversion_of, load

    script = upstream(patch, tmp_path)
    apply_patch(script)
    images(tmp_path / "images", "validation")
    (tmp_path / "solver.yaml").write_text("solver: proxgd\niters: 3\n")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        hidden_act="relu",
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    run(
        script, "--model_name_or_path=vit", "--train_dir=images/train", "--validation_dir=images/validation",
        "--do_train", "--cache_dir=cache", "--output_dir=out", "--num_train_epochs=2", "--use_cpu",
        "--per_device_train_batch_size=4", "--report_to=none", "--save_strategy=epoch",
        "--remove_unused_columns=False", "--solver-config=solver.yaml",
    )  # fmt: skip
    assert conversion_of(load(tmp_path / "out")).blocks
    assert (tmp_path / "out" / "checkpoint-2" / "solver_steps.safetensors").is_file()


def images(root, other):
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(0)
    for split in ("train", other):
        for label in ("a", "b"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=numpy.uint8)).save(folder / f"{number}.png")


def run(script, *arguments, check=True):
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=script.parent, env=environment, capture_output=True, text=True
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done
