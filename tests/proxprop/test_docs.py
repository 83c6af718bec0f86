"""The documentation's example runs, and does what it says."""

import re
from pathlib import Path


def test_the_example_of_the_documentation_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "proxprop.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/proxprop.md", "exec"), {})
    loss, report = capsys.readouterr().out.splitlines()
    assert float(loss) < 0.5
    assert report.startswith("StepReport(space='features', rows=256, columns=65, iterations=3, ")
