"""The documentation's examples run, and do what it says."""

import re
from pathlib import Path

import torch

from solver_plugins.equilibrium import FEATURE_REGULARIZERS


def test_the_examples_of_the_documentation_run(capsys):
    torch.manual_seed(0)
    text = (Path(__file__).parents[2] / "docs" / "opteq.md").read_text()
    names: dict = {}
    try:
        for number, example in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            exec(compile(example, f"docs/opteq.md, example {number}", "exec"), names)
    finally:
        FEATURE_REGULARIZERS._entries.pop("near", None)
    assert names["logits"].shape == (8, 10)
    assert names["found"].value.shape == (4, 16, 24, 24) and names["found"].residual.max() <= 1e-4
    assert names["head"].get_classifier().equilibrium.regularizer.at == 0.5
    assert "tensor" in capsys.readouterr().out
