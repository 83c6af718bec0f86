"""Private parts of torch: all are looked up when the package is imported, and a torch without one is refused."""

import re
from pathlib import Path

import pytest
import torch

import solver_plugins
from solver_plugins.operators.private import PRIVATE, check_torch

USED = re.compile(r"torch\.(_[A-Za-z]\w*(?:\.\w+)*)|\bfrom torch\.(_\S+) import")
NAMES_ONLY = {"_dynamo", "_dynamo.eval_frame.OptimizedModule"}
"""Looked for among the modules and classes that are there."""
OPTIONAL = {"_C._autograd"}
"""There is another way without it."""


def test_all_of_them_are_listed():
    used = {
        one or other
        for path in Path(solver_plugins.__file__).parent.rglob("*.py")
        for one, other in USED.findall(path.read_text(encoding="utf-8"))
    }
    assert {name for name in used - NAMES_ONLY - OPTIONAL if name not in PRIVATE} == set()


def test_a_torch_without_one_is_refused(monkeypatch):
    check_torch()
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(ImportError, match=r"torch\._C\._current_graph_task_id, which torch \d.*Install a torch"):
        check_torch()
