"""A gate as a Parameter: kept in [0, 1], in its own group, refused where it means nothing, in every copy of a model."""

import copy
import pickle

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from solver_plugins import calibrate, convert_model, gates_of, param_groups, set_blend, set_iters, solver_report
from solver_plugins.blocks import blocks_of, separate_gates
from solver_plugins.blocks.gate import _Projected
from solver_plugins.errors import OptionError, UnsupportedLayerError
from solver_plugins.solve import Scale
from solver_plugins.surgery import ConversionError

X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))


def net(act=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), act(), nn.Linear(8, 5), nn.Softplus(), nn.Linear(5, 3))


def gated(kind="channel", solver="proxgd", iters=4, act=nn.ReLU, **options):
    return convert_model(net(act), solver, iters, pattern="all", gate=kind, example_inputs=X, **options)


def test_its_value_is_projected_with_a_gradient_that_passes_inwards():
    gate = torch.tensor([-0.1, -0.1, 0.0, 0.0, 0.5, 1.0, 1.0, 1.2, 1.2], dtype=torch.float64, requires_grad=True)
    above = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    value = _Projected.apply(gate)
    assert value.tolist() == [0, 0, 0, 0, 0.5, 1, 1, 1, 1]
    (found,) = torch.autograd.grad(value, gate, above)
    # Neither at zero nor at one: gradients of several processes are added up before the step is projected.
    assert found.tolist() == [-1, 0, 1, -1, 1, 1, -1, 1, 0]
    inside = torch.rand(5, dtype=torch.float64).mul(0.8).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(_Projected.apply, inside) and torch.autograd.gradgradcheck(_Projected.apply, inside)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_any_optimizer_keeps_it_within_its_bounds(optimizer):
    """In a plain loop, and in that of a copy: nothing has to be called."""
    model = gated("channel")
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gates = gates_of(made)
        stepper, largest = optimizer(made.parameters(), lr=3.0), 0.0
        for sign in (-1, 1, 1, -1, -1):
            for gate in gates.values():
                gate.grad = sign * torch.ones_like(gate)
            stepper.step()
            values = torch.cat([gate.detach() for gate in gates.values()])
            assert bool(((values >= 0) & (values <= 1)).all())
            largest = max(largest, values.max().item())
        assert largest == 1


def test_other_steps_are_projected_when_the_model_is_evaluated_or_loaded():
    model = gated()
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.fill_(-3.0)
    assert torch.equal(model.train()(X), net()(X))
    model.eval()
    assert all(not bool(gate.any()) for gate in gates_of(model).values())
    model.load_state_dict({name: torch.full_like(value, 7) for name, value in model.state_dict().items()})
    assert all(bool((gate == 1).all()) for gate in gates_of(model).values())


def test_an_average_of_the_weights_has_the_average_of_the_gates():
    model = gated()
    average = ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.fill_(0.8)
    average.update(model)
    assert all(torch.allclose(gate, torch.full_like(gate, 0.4)) for gate in gates_of(average.module).values())


@pytest.mark.parametrize("kind", ["channel", "scalar"])
def test_compiled_it_trains_in_one_graph(kind):
    model = gated(kind)
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.fill_(0.3)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for made, run in ((model, model), (other, compiled)):
        run(X).square().mean().backward()
        made.found = [gate.grad.clone() for gate in gates_of(made).values()]
    torch.testing.assert_close(model.found, other.found)
    torch.testing.assert_close(compiled(X), model(X))


def test_groups_of_their_own():
    model = gated()
    gates = list(gates_of(model).values())
    groups = param_groups(model, 1e-3, 0.1, gate_rate=5)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups] == [
        (3, 1e-3, 0.1), (3, 1e-3, 0.0), (3, 5e-3, 0.0),
    ]  # fmt: skip
    assert all(a is b for a, b in zip(groups[2]["params"], gates, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    separate_gates(model, optimizer, 5)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (6, 1e-3, 0.1), (3, 5e-3, 0.0),
    ]  # fmt: skip
    plain = torch.optim.SGD(net().parameters(), lr=1.0)
    separate_gates(net(), plain, 5)
    assert len(plain.param_groups) == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"formulation": "paper"}, "with formulation='paper' one iteration is not the plain layer"),
    ({"iters": 1}, "one iteration is the plain layer, whatever the gate"),
    ({"gradient": "implicit"}, "use gate='scalar' or gradient='unrolled'"),
    ({"solver": "proxsg", "p": 0.5}, r"^2: .* step='exp' takes smaller steps.*use step='constant'"),
    ({"act": lambda: nn.Softmax(-1)}, r"^0: .*'softmax' couples the channels; use gate='scalar'"),
])  # fmt: skip
def test_refused_where_it_would_mean_nothing(options, message):
    with pytest.raises(OptionError, match=message):
        gated(**options)
    with pytest.raises(OptionError, match="option 'gate': expected 'scalar' or 'channel'"):
        gated("layer")


def test_decaying_steps_are_fine_where_the_prox_does_not_depend_on_the_step():
    model = convert_model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), "proxsg", 4, p=0.5, pattern="all",
                          gate="channel", example_inputs=X)  # fmt: skip
    assert len(gates_of(model)) == 2
    with pytest.raises(OptionError, match="one iteration is the plain layer"):
        set_iters(model, 1)
    set_iters(model, 3)


def test_with_calibration_and_a_blend():
    model = gated(blend=0.5).eval()
    calibrate(model, [X], progress=False)
    # Closed gates leave nothing to calibrate.
    for block in blocks_of(model).values():
        torch.testing.assert_close(block.channel_gain, torch.ones_like(block.channel_gain))
        torch.testing.assert_close(block.channel_shift, torch.zeros_like(block.channel_shift), atol=1e-6, rtol=0)
    with torch.no_grad():
        for gate in gates_of(model).values():
            gate.fill_(1.0)
    set_blend(model, 1.0)
    for block in blocks_of(model).values():
        block.set_scale(None)
    expected = convert_model(net(), "proxgd", 4, pattern="all", example_inputs=X).eval()
    torch.testing.assert_close(model(X), expected(X))
    assert [block.gate for block in solver_report(model, X).blocks] == [1.0, 1.0, 1.0]


def test_the_name_is_the_blocks():
    layer = net()
    layer[0].solver_gate = nn.Parameter(torch.zeros(1))
    with pytest.raises((ConversionError, UnsupportedLayerError), match="solver_gate"):
        convert_model(layer, "proxgd", 4, targets=["0"], example_inputs=X)
    assert Scale().gate is None
