"""Cells, folders and settings, on a study of no time."""

import json
import textwrap

import pytest
import yaml

from solver_plugins.errors import DuplicateNameError, OptionError, RegistrationError, UnknownNameError
from solver_plugins.registry import Registry
from solver_plugins.studies import (
    SCALES,
    STUDIES,
    Cell,
    CellError,
    Results,
    Study,
    list_studies,
    read_study_config,
    run_study,
)
from solver_plugins.studies.runner import RunFolder
from solver_plugins.studies.study import Measured, _check_study
from solver_plugins.train import OutputError
from tests.studies.toy import Toy, ToyConfig, write_settings


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(STUDIES, "_entries", dict(STUDIES._entries))
    monkeypatch.setattr(Toy, "settings", write_settings(tmp_path))
    monkeypatch.setattr(Toy, "ran", [])
    STUDIES.register("toy", Toy, tags=Toy.tags)


def config(**changes):
    return ToyConfig.parse({"rates": [1.0, 2.0], **changes})


def test_a_run_leaves_metrics_table_and_figure(tmp_path):
    outcome = run_study("toy", config(), tmp_path / "run", scale="smoke")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "cells", "figure.png", "metrics.json", "study.yaml", "table.md"
    ]  # fmt: skip
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics == outcome.metrics
    assert [cell["arm"] for cell in metrics["cells"]] == ["plain", "other arm"] * 2
    # Arms share their random numbers, settings too; curves stay with the cells.
    assert metrics["cells"][2]["drawn"] == 2 * metrics["cells"][0]["drawn"] == 2 * metrics["cells"][1]["drawn"]
    assert "curves" not in metrics["cells"][0]
    table = (tmp_path / "run" / "table.md").read_text()
    assert "| cell | a\\|b |" in table and "plain_rate=1_seed=0" in table and "![toy](figure.png)" in table
    assert (tmp_path / "run" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 4


def test_the_settings_speak_for_themselves(tmp_path):
    """What nobody but their author knows: which images were seen when the settings were chosen."""
    run_study("toy", config(note="Chosen on other images."), tmp_path / "run")
    assert "\nOf the settings: Chosen on other images.\n" in (tmp_path / "run" / "table.md").read_text()
    run_study("toy", config(), tmp_path / "other")
    assert "Of the settings" not in (tmp_path / "other" / "table.md").read_text()


def test_a_note_tells_of_changes():
    written = read_study_config("opteq-alpha", "short").note
    assert "looked at in both runs" in written
    changed = read_study_config("opteq-alpha", "short", ["seeds=[5]", "tol=0.1"]).note
    assert changed == f"{written} Changed for this run: seeds=[5], tol=0.1."
    assert read_study_config("opteq-alpha", "short", ["seeds=[5]", "note=mine"]).note == "mine"
    assert read_study_config("opteq-alpha", "smoke", ["seeds=[5]"]).note == ""


def test_global_randomness_is_left_alone(tmp_path):
    import torch

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    run_study("toy", config(), tmp_path / "run")
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    whole = run_study("toy", config(), tmp_path / "whole").metrics
    Toy.ran.clear()
    real = Toy.run

    def killed(self, cell, context):
        if len(Toy.ran) == 2:
            raise KeyboardInterrupt
        return real(self, cell, context)

    monkeypatch.setattr(Toy, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run_study("toy", config(), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()
    monkeypatch.setattr(Toy, "run", real)
    again = run_study("toy", config(), tmp_path / "run").metrics
    # Each of the four cells ran once, and the result is that of a run that was never killed.
    assert len(Toy.ran) == len(set(Toy.ran)) == 4
    assert again["cells"] == whole["cells"] and again["summary"] == whole["summary"]
    run_study("toy", config(), tmp_path / "run")
    assert len(Toy.ran) == 4


def test_another_config_is_refused_and_changes_nothing(tmp_path):
    run_study("toy", config(), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match=r"other options \(rates was \[1.0, 2.0\] and is now \[1.0\]\)"):
        run_study("toy", config(rates=[1.0]), tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    run_study("toy", config(rates=[1.0]), tmp_path / "run", overwrite=True)
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 2


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"holds thesis.tex, which is not a run of a study"):
            run_study("toy", config(), tmp_path / "run", overwrite=overwrite)
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(OutputError, match="is a file"):
        run_study("toy", config(), tmp_path / "run" / "thesis.tex")
    with pytest.raises(OutputError, match=r"thesis.tex/x' \(Not a directory\): choose another with --output"):
        run_study("toy", config(), tmp_path / "run" / "thesis.tex" / "x")
    run_study("toy", config(), tmp_path / "toy")
    identity = yaml.safe_load((tmp_path / "toy" / "study.yaml").read_text())
    (tmp_path / "toy" / "study.yaml").write_text(yaml.safe_dump({**identity, "study": "other"}))
    with pytest.raises(OutputError, match="a run of the study 'other'"):
        run_study("toy", config(), tmp_path / "toy")
    (tmp_path / "toy" / "study.yaml").write_text("[")
    with pytest.raises(OutputError, match="Cannot read"):
        run_study("toy", config(), tmp_path / "toy")


def test_a_failing_cell_keeps_the_others(tmp_path):
    with pytest.raises(InterruptedError):
        run_study("toy", config(fail_at="plain_rate=2_seed=0"), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "cells").glob("*.json")) == [
        "other-arm_rate=1_seed=0.json", "plain_rate=1_seed=0.json"
    ]  # fmt: skip


def test_results_that_are_no_json_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "run", lambda self, cell, context: {"drawn": float("nan")})
    with pytest.raises(CellError, match="plain_rate=1_seed=0 cannot be written as JSON"):
        run_study("toy", config(), tmp_path / "run")
    assert not list((tmp_path / "run" / "cells").glob("*.json"))


def test_a_damaged_result_is_named(tmp_path):
    run_study("toy", config(), tmp_path / "run")
    (tmp_path / "run" / "cells" / "plain_rate=1_seed=0.json").write_text("{")
    with pytest.raises(CellError, match="Delete it and run the study again"):
        run_study("toy", config(), tmp_path / "run")


def test_claims_are_exclusive_and_end_with_a_stop(tmp_path):
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    folder.open("toy", "own", config(), False)
    cells = [Cell("a", 0), Cell("b", 0), Cell("c", 0)]
    assert folder.claim(cells[0]) and not other.claim(cells[0]) and other.claim(cells[1])
    folder.save(Measured(cells[0], {"x": 1}, 0.5, 0.5))
    assert other.is_done(cells[0]) and other.load(cells[0]).values == {"x": 1}
    folder.stop()
    assert not other.claim(cells[2])
    # The next run takes what was begun and not done.
    other.open("toy", "own", config(), False)
    assert not other.claim(cells[0]) and other.claim(cells[1]) and other.claim(cells[2])


def test_results_are_picked_by_arm_seed_and_setting():
    results = Results(Measured(Cell(arm, seed, (("rate", 1.0),)), {"x": seed}, 0, 0) for arm in "ab" for seed in (0, 1))
    assert results.of(arm="a").each("x") == [0, 1]
    assert results.of(arm="b", seed=1, rate=1.0).each("x") == [1]
    assert not results.of(rate=2.0) and not results.of(unknown=1)


def test_cells_of_a_grid():
    cells = Cell.grid(rate=[1.0, 2.0], seed=[0], kind=["x"], arm=["a", "b"])
    assert [cell.name for cell in cells] == [
        f"{arm}_rate={rate}_kind=x_seed=0" for rate in (1, 2) for arm in "ab"
    ]  # fmt: skip
    assert cells[0] == Cell("a", 0, (("rate", 1.0), ("kind", "x")))


def test_scales_and_changes():
    assert read_study_config("toy", "smoke").seeds == [0]
    assert read_study_config("toy", "paper").seeds == [0, 1, 2]
    assert read_study_config("toy", "short", ["seeds=[5]", "value=1e-3"]).options() == {
        "seeds": [5], "note": "", "rates": [1.0, 2.0], "fail_at": None, "value": 1e-3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scale", "changes", "error", "message"),
    [
        ("toi", "smoke", [], UnknownNameError, "Did you mean 'toy'"),
        ("toy", "shrt", [], OptionError, "Did you mean 'short'"),
        ("toy", "smoke", ["rate=1"], OptionError, "Did you mean 'rates'"),
        ("toy", "smoke", ["rates"], OptionError, "key=value"),
        ("toy", "smoke", ["seeds=[]"], OptionError, "seeds"),
        ("toy", "smoke", ["seeds=[1,1]"], OptionError, "seeds that differ"),
        ("toy", "smoke", ["seeds=[-1]"], OptionError, "not negative"),
        ("toy", "smoke", ["value=one"], OptionError, "'value': expected a"),
    ],
)
def test_mistakes_are_named(name, scale, changes, error, message):
    with pytest.raises(error, match=message):
        read_study_config(name, scale, changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [("scales: {smoke: {}}", "smoke, short, paper"), ("[", "not valid YAML"), ("7", "smoke, short, paper"),
     ("scales: {smoke: {}, short: 1, paper: {}}", "options in every part"),
     ("extra: 1\nscales: {smoke: {}, short: {}, paper: {}}", "nothing else")],
)  # fmt: skip
def test_settings_of_another_form_are_refused(tmp_path, monkeypatch, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    monkeypatch.setattr(Toy, "settings", tmp_path / "bad.yaml")
    with pytest.raises(OptionError, match=message):
        read_study_config("toy", "smoke")
    monkeypatch.setattr(Toy, "settings", tmp_path / "none.yaml")
    with pytest.raises(OptionError, match="Cannot read"):
        read_study_config("toy", "smoke")
    monkeypatch.setattr(Toy, "settings", None)
    with pytest.raises(OptionError, match=r"Expected toy\.yaml in"):
        read_study_config("toy", "smoke")


def test_equal_cells_are_refused(tmp_path):
    with pytest.raises(OptionError, match="other-arm_rate=1_seed=0 twice"):
        run_study("toy", config(rates=[1.0, 1.0]), tmp_path / "run")
    with pytest.raises(OptionError, match="nothing to measure"):
        run_study("toy", config(rates=[]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_registration():
    class Unfinished(Study):
        name = "unfinished"

    assert "toy" in list_studies("quick")
    with pytest.raises(RegistrationError, match="derived from"):
        STUDIES.register("number", 3)
    with pytest.raises(RegistrationError, match="has no 'Config'"):
        STUDIES.register("unfinished", Unfinished)
    with pytest.raises(RegistrationError, match="registered under its own name"):
        STUDIES.register("tea", Toy)
    with pytest.raises(DuplicateNameError, match="study 'toy' is registered already"):
        STUDIES.register("toy", type("Toy", (Toy,), {}))


def test_studies_of_other_distributions(tmp_path, monkeypatch):
    """An entry point of an installed distribution, as importlib.metadata finds it."""
    (tmp_path / "their_study.py").write_text(
        textwrap.dedent(
            """
            from pathlib import Path

            from tests.studies.toy import Toy

            class Theirs(Toy):
                '''From elsewhere.'''

                name = "theirs"
                settings = Path(__file__).with_name("toy.yaml")
            """
        )
    )
    info = tmp_path / "their_study-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-study\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[solver_plugins.studies]\ntheirs = their_study:Theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found: Registry = Registry("study", entry_point_group="solver_plugins.studies", check=_check_study)
    assert found.info("theirs").description == "From elsewhere."
    STUDIES.register("theirs", found.get("theirs"))
    run_study("theirs", read_study_config("theirs", "short"), tmp_path / "run")
    assert len(list((tmp_path / "run" / "cells").iterdir())) == 8


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", sorted(set(STUDIES.names()) - {"toy"}))
def test_every_study_has_settings_for_every_scale(name, scale):
    study = STUDIES.get(name)(read_study_config(name, scale))
    names = [cell.name for cell in study.cells()]
    assert names and len(set(names)) == len(names)
    assert study.reference and STUDIES.info(name).description


class Staged(Toy):
    """Draws numbers, then takes the largest."""

    name = "staged"

    def stages(self):
        return [self.cells(), [Cell("largest", seed) for seed in self.config.seeds]]

    def run(self, cell, context):
        if cell.arm != "largest":
            assert not context.earlier
            (context.folder / f"{cell.name}.txt").write_text("kept")
            return super().run(cell, context)
        type(self).ran.append(cell.name)
        assert len(context.earlier) == len(self.cells())
        assert all((context.folder / f"{one.name}.txt").is_file() for one in self.cells())
        return {"drawn": max(context.earlier.of(seed=cell.seed).each("drawn"))}


def test_a_stage_knows_the_ones_before_it(tmp_path):
    STUDIES.register("staged", Staged, tags=())
    with pytest.raises(InterruptedError):
        run_study("staged", config(fail_at="plain_rate=2_seed=0"), tmp_path / "failed")
    # Nothing of a later stage is measured while an earlier one is not done.
    assert "largest_seed=0" not in Staged.ran
    first = run_study("staged", config(), tmp_path / "run").metrics["cells"]
    assert first[-1]["drawn"] == max(cell["drawn"] for cell in first[:-1])
    (tmp_path / "run" / "cells" / "largest_seed=0.json").unlink()
    Staged.ran.clear()
    assert run_study("staged", config(), tmp_path / "run").metrics["cells"] == first
    assert Staged.ran == ["largest_seed=0"]
