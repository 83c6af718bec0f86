"""Random networks and random ways through them: a converted one computes what its data flow says, or refuses."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from solver_plugins.errors import SolverPluginsError
from solver_plugins.surgery import ConversionError
from tests.blocks.drawn import Drawn, Reference, plans, programs, segments
from tests.blocks.linked import assert_helpful, assert_same, converted, patterns, results

MODES = ("train", "eval", "train without gradients", "inference", "frozen")


@st.composite
def cases(draw, wild=True, checkpointing=True):
    """Draws a network, the program that is recorded, and what is run afterwards: programs, segments and modes."""
    plan = draw(plans())
    recorded = draw(programs(plan, draw(st.integers(0, 3)) == 0))
    runs = []
    for _ in range(2):
        program = draw(programs(plan, wild)) if wild and draw(st.integers(0, 3)) else recorded
        segment = draw(segments(program)) if checkpointing and draw(st.booleans()) else None
        runs.append((program, segment, draw(st.sampled_from(MODES[:2] if segment else MODES))))
    return plan, recorded, runs


def step(run, module, x, mode):
    """Returns what one pass gives in a mode: the output and, where there are any, gradients and statistics."""
    if mode in ("train", "eval"):
        return results(run, module, x)
    if mode == "frozen":
        module.requires_grad_(False)
        try:
            return results(run, module, x)
        finally:
            module.requires_grad_(True)
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        return {"output": run(x.clone()).clone()}


def check(case):
    """Compares every run of a case with the reference; yields what it met."""
    plan, recorded, runs = case
    plain = Drawn(plan, recorded)
    x = torch.randn((4, 3, 4, 4) if plan.conv else (5, 4), dtype=torch.float64)
    found = patterns(plain, x)
    try:
        made = converted(plain, x)
    except ConversionError:
        reject()  # nothing to convert
    yield from found.values()
    reference = Reference(plain, made, found, recorded)
    # The recorded way comes last, too: whatever was refused has left nothing behind.
    for program, segment, mode in (*runs, (recorded, None, "train")):
        plain.load_state_dict(made.state_dict())
        plain.train("train" in mode), made.train("train" in mode)
        made.program, made.segment = program, segment
        yield compare(reference, x, mode)


def compare(reference, x, mode):
    """Asserts that a pass gives the reference's numbers or, where that may be, a named error; says which."""
    segment = reference.made.segment
    # The converted network comes first: the reference reads the constants of this very pass.
    try:
        found, error = step(reference.made, reference.made, x, mode), None
    except SolverPluginsError as caught:
        found, error = {}, caught
    expected = step(reference.run, reference.plain, x, mode)
    if error is not None:
        assert reference.refusable or reference.refused, f"refused: {error}"
        assert_helpful(str(error), segment is not None)
        return "refused"
    assert not reference.refused, "expected a named error: two solvers wait for one activation of their sum"
    # A norm that is recomputed updates its statistics twice.
    names = [name for name in expected if segment is None or "running" not in name]
    assert_same({name: found[name] for name in names}, {name: expected[name] for name in names})
    return "refusable" if reference.refusable else "right"


FAMILIES = {
    "the recorded way": cases(wild=False, checkpointing=False),
    "the recorded way, partly recomputed": cases(wild=False),
    "another way": cases(checkpointing=False),
    "another way, partly recomputed": cases(),
}
LINKED = {"linear-norm-act", "linear-skip-act", "linear-norm-skip-act"}


def checked(family, examples):
    """Checks some cases of a family and returns how often each pattern and each outcome was met."""
    met = Counter()

    @settings(max_examples=examples, suppress_health_check=[*HealthCheck], report_multiple_bugs=False)
    @given(FAMILIES[family])
    def run(case):
        met.update(check(case))

    run()
    return met


@pytest.mark.parametrize("family", FAMILIES)
def test_some(family):
    met = checked(family, 60)
    assert met.keys() >= LINKED and met["right"] > 80, "what is drawn says too little"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_thousands(family):
    checked(family, 2000)
