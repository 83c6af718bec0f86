"""Gates: closed they are the plain network to the bit; they train, and every way back keeps or drops them as said."""

import copy

import pytest
import torch

from solver_plugins import conversion_of, gates_of, merge_model, param_groups, revert_model
from solver_plugins.blocks import blocks_of
from solver_plugins.errors import SolverPluginsWarning
from solver_plugins.surgery import Conversion, apply_conversion
from tests.promises import cases
from tests.promises.cases import DETERMINISTIC, MODELS, SMALL, build, rows, run, twins
from tests.promises.small import still
from tests.promises.test_4_way_back import anatomy

CONSTANT = {"proxsg": {"step": "constant"}}
CLOSED = rows((model, solver) for model in MODELS for solver in cases.SOLVERS if solver == "proxgd" or model in SMALL)


def gated(model, solver="proxgd", kind="channel", dtype=torch.float32, **options):
    return cases.converted(model, solver, dtype, gate=kind, **CONSTANT.get(solver, {}), **options)


def open_gates(made, value=0.4):
    with torch.no_grad():
        for gate in gates_of(made).values():
            gate.copy_(torch.linspace(0, value, len(gate)))
    return made


@pytest.mark.parametrize(("model", "solver"), CLOSED)
def test_a_closed_gate_is_the_plain_network_bit_for_bit(model, solver):
    """Sampling solvers in evaluation: their masks have exact counts, and are not those of ``nn.Dropout``."""
    kind = "scalar" if solver in ("rcd", "anderson") else "channel"
    plain, made = build(model), gated(model, solver, kind)
    assert gates_of(made).keys() == {f"{name}.solver_gate" for name in blocks_of(made)}
    for training in (True, False) if solver in DETERMINISTIC else (False,):
        outputs = []
        for one in (made, plain):
            torch.manual_seed(3)
            outputs.append(run(one.train(training), model))
        assert torch.equal(*outputs), (training, (outputs[0] - outputs[1]).abs().max())


@pytest.mark.parametrize(("model", "solver", "kind"), [
    ("residual", "proxgd", "channel"), ("functional", "proxsg", "scalar"), ("hf_roberta", "fista", "channel"),
])  # fmt: skip
def test_training_the_gates_alone_lowers_the_loss(model, solver, kind):
    made = still(gated(model, solver, kind, iters=4)).train()
    gates = gates_of(made)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in gates)
    optimizer = torch.optim.Adam(param_groups(made, 1e-3, gate_rate=10))
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(gates)]
    weights = copy.deepcopy({k: v for k, v in made.state_dict().items() if k not in gates})
    losses = []
    for _ in range(12):
        torch.manual_seed(0)
        logits = run(made, model)
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(4) % logits.shape[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert all(bool(((gate >= 0) & (gate <= 1)).all()) for gate in gates.values())
    assert min(losses[-3:]) < losses[0] and any(bool((gate > 0).any()) for gate in gates.values())
    state = made.state_dict()
    kept = [name for name in weights if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(state[name], weights[name]) for name in kept)


@pytest.mark.parametrize("kind", ["channel", "scalar"])
def test_kept_and_dropped_as_said(kind):
    made = open_gates(gated("residual", kind=kind)).eval()
    expected, state = run(made, "residual").detach(), made.state_dict()
    plain = build("residual").eval()
    assert state.keys() - plain.state_dict().keys() == gates_of(made).keys()
    # A checkpoint has them; the weights of the plain model do not, and leave them alone.
    again = gated("residual", kind=kind)
    again.load_state_dict(plain.state_dict())
    assert all(not bool(gate.any()) for gate in gates_of(again).values())
    again.load_state_dict(state)
    assert torch.equal(run(again.eval(), "residual"), expected)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(run(again, "residual"), expected)
    replayed = apply_conversion(build("residual"), Conversion.from_json(conversion_of(made).to_json())).eval()
    assert conversion_of(replayed) == conversion_of(made) and gates_of(replayed).keys() == gates_of(made).keys()
    assert torch.equal(run(replayed, "residual"), expected)
    reverted = revert_model(made)
    assert anatomy(reverted) == anatomy(plain) and reverted.state_dict().keys() == plain.state_dict().keys()


def test_a_trained_gate_merges_where_its_block_is_affine():
    made = open_gates(gated("hf_bert", dtype=torch.float64, iters=4)).eval()
    expected = run(made, "hf_bert", torch.float64).detach()
    merge_model(made, strict=False)
    left = blocks_of(made)
    found = run(made, "hf_bert", torch.float64).detach()
    assert (found - expected).norm() < 1e-12 * expected.norm()
    assert gates_of(made).keys() == {f"{name}.solver_gate" for name in left} and len(left) == 1
    closed = gated("residual").eval()
    expected = run(closed, "residual")
    merge_model(closed)
    assert torch.equal(run(closed, "residual"), expected) and anatomy(closed) == anatomy(build("residual").eval())


def test_a_trained_gate_that_is_dropped_is_told():
    made = gated("residual").train()
    optimizer = torch.optim.SGD(made.parameters(), 0.05)
    run(made, "residual").square().mean().backward()
    optimizer.step()
    open_gates(made)
    with pytest.warns(SolverPluginsWarning, match="differ from those of the trained one"):
        revert_model(made)


def test_both_kinds_differ_once_they_are_open():
    plain, _ = twins("residual", "proxgd")
    outputs = [run(open_gates(gated("residual", kind=kind)).eval(), "residual") for kind in ("channel", "scalar")]
    assert not torch.equal(outputs[0], run(plain.eval(), "residual"))
