"""Every study at its smallest scale: it runs, and says what it has to say."""

import json
import math

import pytest

from solver_plugins.studies import STUDIES, read_study_config, run_study


@pytest.mark.parametrize("name", STUDIES.names())
def test_smoke(tmp_path, name):
    outcome = run_study(name, read_study_config(name, "smoke"), tmp_path, scale="smoke")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["summary"] and metrics["scale"] == "smoke"
    assert all(math.isfinite(value) for value in metrics["summary"].values() if isinstance(value, float))
    for table in outcome.tables:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
        assert table.markdown() in (tmp_path / "table.md").read_text()
