"""Hand-written backward passes and fast paths against the plain loop, in float64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck

from solver_plugins import SolverConv2d, SolverLinear
from solver_plugins.blocks import solve_layer
from solver_plugins.operators import Geometry
from solver_plugins.solve.paths import images_kept, regroups
from tests.solve.test_unrolled import OPERATORS

F64 = torch.float64
PRIORS = {
    "identity": nn.Identity(), "relu": nn.ReLU(), "relu6": nn.ReLU6(), "hardtanh": nn.Hardtanh(-0.3, 0.4),
    "leaky": nn.LeakyReLU(0.2), "tanh": nn.Tanh(), "softplus": nn.Softplus(), "softshrink": nn.Softshrink(0.1),
    "elu": nn.ELU(0.5), "softmax": nn.Softmax(-1),
}  # fmt: skip


def tensors(operator, scale=1.0):
    _, kernel_shape, input_shape = OPERATORS[operator]
    generator = torch.Generator().manual_seed(0)
    shapes = (input_shape, kernel_shape, kernel_shape[:1])
    return [scale * torch.randn(shape, dtype=F64, generator=generator) for shape in shapes]


def value_and_gradients(path, geometry, given, seed=7, **options):
    leaves = [None if one is None else one.clone().requires_grad_() for one in given]
    u, kernel, bias, *rest = leaves
    named = dict(zip(("diagonal", "skip"), rest, strict=False))
    out = solve_layer(
        u, kernel, bias, geometry, path=path, generator=torch.Generator().manual_seed(seed), **named, **options
    )  # fmt: skip
    weights = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    there = [one for one in leaves if one is not None]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), there, materialize_grads=True)]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", ["full", "low"])
@pytest.mark.parametrize("path", ["two_step", "gram"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("solver", ["proxgd", "fista"])
def test_every_operator(solver, operator, path, memory):
    geometry, given = OPERATORS[operator][0], tensors(operator)
    options = {"activation": "relu", "solver": solver, "iters": 6, "lam": 0.1}
    assert_same(
        value_and_gradients(path, geometry, given, memory=memory, **options),
        value_and_gradients("loop", geometry, given, **options),
    )


@pytest.mark.parametrize("prior", ["relu", "tanh"])
@pytest.mark.parametrize("solver", ["proxgd", "fista"])
@pytest.mark.parametrize(("inputs", "outputs", "batch", "kernel"), [(6, 5, 40, ()), (6, 30, 2, ()), (4, 3, 2, (3,))])
def test_images_that_are_not_kept(inputs, outputs, batch, kernel, solver, prior):
    """By the summed outer products, and computed again; of a convolution always so."""
    size, geometry = (5,) * len(kernel), Geometry.for_conv(kernel, padding=1) if kernel else Geometry()
    kept, again = images_kept(14, (batch, inputs, *size), (batch, outputs, *size)), 13
    assert kept < again and regroups((again - kept) * batch, inputs, outputs) == (batch == 40 or bool(kernel))
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, inputs, *size), (outputs, inputs, *kernel), (outputs,)
    given = [torch.randn(shape, dtype=F64, generator=generator) for shape in shapes]
    options = {"activation": PRIORS[prior], "solver": solver, "iters": 14, "lam": 0.1}
    assert_same(
        value_and_gradients("two_step", geometry, given, memory="auto", **options),
        value_and_gradients("loop", geometry, given, **options),
    )


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("solver", ["proxgd", "fista"])
def test_every_prior(solver, prior, formulation):
    if (prior, formulation) == ("softmax", "paper"):
        pytest.skip("softmax is known at the unit step only")
    options = {"activation": PRIORS[prior], "solver": solver, "iters": 5, "formulation": formulation}
    for path in ("two_step", "gram"):
        for output in ("argument", "value"):
            assert_same(
                value_and_gradients(path, Geometry(), tensors("tokens"), output=output, **options),
                value_and_gradients("loop", Geometry(), tensors("tokens"), output=output, **options),
            )


@pytest.mark.parametrize("memory", ["full", "low"])
@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_with_samples(operator, per_sample, memory):
    geometry, given = OPERATORS[operator][0], tensors(operator)
    options = {"activation": "relu", "solver": "proxsg", "iters": 5, "lam": 0.1, "p": 0.4, "per_sample": per_sample}
    expected = value_and_gradients("loop", geometry, given, **options)
    for path in ("masked",) if per_sample else ("masked", "columns"):
        assert_same(value_and_gradients(path, geometry, given, memory=memory, **options), expected)


@pytest.mark.parametrize("formulation", ["normalized", "paper"])
@pytest.mark.parametrize("step", ["constant", "exp", "bottou", "expected_smoothness"])
@pytest.mark.parametrize("prior", ["identity", "relu", "leaky", "tanh", "softshrink"])
def test_samples_with_every_step(prior, step, formulation):
    options = {"activation": PRIORS[prior], "solver": "proxsg", "iters": 4, "formulation": formulation, "step": step}
    for path, per_sample in (("masked", True), ("masked", False), ("columns", False)):
        assert_same(
            value_and_gradients(path, Geometry(), tensors("tokens"), per_sample=per_sample, **options),
            value_and_gradients("loop", Geometry(), tensors("tokens"), per_sample=per_sample, **options),
        )


@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
def test_diagonal_and_skip(solver):
    given = [*tensors("conv2d"), torch.rand(3, dtype=F64) + 0.5, torch.randn(1, 3, 3, 4, dtype=F64)]
    options = {"activation": "relu", "solver": solver, "iters": 4, "lipschitz": 20.0}
    path = "masked" if solver == "proxsg" else "two_step"
    geometry = OPERATORS["conv2d"][0]
    assert_same(
        value_and_gradients(path, geometry, given, **options), value_and_gradients("loop", geometry, given, **options)
    )
    given = [*tensors("linear"), torch.rand(4, dtype=F64) + 0.5, torch.randn(2, 4, dtype=F64)]
    path = "masked" if solver == "proxsg" else "gram"
    assert_same(
        value_and_gradients(path, Geometry(), given, **options),
        value_and_gradients("loop", Geometry(), given, **options),
    )


@pytest.mark.parametrize("activation", ["identity", "relu", "tanh"])
@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
@pytest.mark.parametrize("iters", [1, 4])
def test_blended_with_the_first_iterate(solver, activation, iters):
    """``v_1`` has gradients of its own, and is not mistaken for an iterate that is kept."""
    torch.manual_seed(0)
    for make, u in (
        (lambda **options: SolverLinear(6, 4, dtype=F64, **options), torch.randn(3, 6, dtype=F64)),
        (lambda **options: SolverConv2d(3, 2, 3, dtype=F64, **options), torch.randn(2, 3, 5, 5, dtype=F64)),
    ):
        found = []
        for path in ("loop", "auto"):
            torch.manual_seed(1)
            block = make(activation=activation, solver=solver, iters=iters, path=path)
            block.set_blend(0.4)
            x = u.clone().requires_grad_()
            out = block(x)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, block.weight, block.bias])])
        assert_same(*found)


@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
def test_an_activation_may_overwrite_the_output(solver):
    block = SolverLinear(6, 4, activation="relu", solver=solver, iters=4)
    for shape in ((3, 6), (3, 2, 6)):
        out = nn.functional.relu_(block(torch.randn(shape)))
        out.sum().backward()
        assert torch.isfinite(block.weight.grad).all()


@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
def test_frozen_parts_get_no_gradient(solver):
    given = tensors("linear")
    options = {"activation": "relu", "solver": solver, "iters": 4, "lipschitz": 20.0}
    expected = value_and_gradients("loop", Geometry(), given, **options)[1:]
    for live in range(3):
        leaves = [one.clone().requires_grad_(place == live) for place, one in enumerate(given)]
        generator = torch.Generator().manual_seed(7)
        out = solve_layer(*leaves, Geometry(), generator=generator, **options)
        weights = torch.randn(out.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
        assert_same(torch.autograd.grad((out * weights).sum(), leaves[live]), expected[live : live + 1])


@pytest.mark.parametrize("path", ["two_step", "gram"])
@pytest.mark.parametrize("solver", ["proxgd", "fista"])
def test_second_derivatives_are_those_of_the_iterations(solver, path):
    function = partial(second, solver=solver, path=path)
    assert gradgradcheck(function, [one.requires_grad_() for one in tensors("linear")])


@pytest.mark.parametrize("path", ["masked", "columns"])
def test_second_derivatives_of_a_sampled_solve(path):
    function = partial(second, solver="proxsg", path=path, per_sample=False)
    assert gradgradcheck(function, [one.requires_grad_() for one in tensors("linear")])


def second(u, kernel, bias, **options):
    return solve_layer(
        u, kernel, bias, Geometry(), activation="tanh", iters=3, lipschitz=20.0,
        generator=torch.Generator().manual_seed(7), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("solver", "path"), [("proxgd", "gram"), ("fista", "two_step"), ("proxsg", "masked")])
def test_large_batches_and_batched_gradients(solver, path):
    """More rows than are put together into one product; and several gradients in one pass, which vmap makes."""
    u, kernel = torch.randn(200, 5, dtype=F64), torch.randn(4, 5, dtype=F64)
    given = [u, kernel, torch.randn(4, dtype=F64)]
    options = {"activation": "relu", "solver": solver, "iters": 4, "lipschitz": 20.0}
    expected = value_and_gradients("loop", Geometry(), given, **options)
    assert_same(value_and_gradients(path, Geometry(), given, **options), expected)
    weights = torch.randn(2, 200, 4, dtype=F64)
    for rows in (200, 3):
        leaves = [u[:rows].clone().requires_grad_(), kernel.clone().requires_grad_()]
        generator = torch.Generator().manual_seed(7)
        out = solve_layer(*leaves, None, Geometry(), path=path, generator=generator, **options)
        batched = torch.autograd.grad(out, leaves, weights[:, :rows], is_grads_batched=True, retain_graph=True)
        for place in range(2):
            each = torch.autograd.grad(out, leaves, weights[place, :rows], retain_graph=True)
            assert_same([one[place] for one in batched], each)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize("solver", ["proxgd", "fista"])
def test_transforms(solver):
    """vmap, grad and jvp of ``torch.func``, forward mode and batched gradients."""
    u, kernel, bias = tensors("linear")
    options = {"activation": "tanh", "solver": solver, "iters": 4, "lipschitz": 20.0}

    def solved(one, path="auto"):
        return solve_layer(one, kernel, bias, Geometry(), path=path, **options)

    plain = solved(u, "loop")
    torch.testing.assert_close(torch.func.vmap(solved)(u), plain, rtol=1e-10, atol=1e-10)
    jacobian = torch.autograd.functional.jacobian(lambda one: solved(one, "loop"), u)
    for found in (
        torch.func.jacrev(solved)(u),
        torch.func.jacfwd(solved)(u),
        torch.autograd.functional.jacobian(solved, u, vectorize=True),
    ):
        torch.testing.assert_close(found, jacobian, rtol=1e-10, atol=1e-10)
    with torch.autograd.forward_ad.dual_level():
        out = solved(torch.autograd.forward_ad.make_dual(u, torch.ones_like(u)))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, jacobian.sum((-2, -1)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
def test_recorded_gradients_of_a_block_whose_input_depends_on_its_weight(solver):
    """First derivatives, too: what reaches the weight through the input is counted once."""
    torch.manual_seed(0)
    u, layer = torch.randn(30, 5, dtype=F64), nn.Linear(5, 5, dtype=F64)
    found = []
    for path in ("loop", "masked") if solver == "proxsg" else ("loop", "two_step", "gram"):
        torch.manual_seed(1)
        block = SolverLinear.from_linear(layer, "relu", solver=solver, iters=4, path=path)
        loss = block(torch.relu(block(u))).square().sum()
        (grad,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        found.append([grad.detach(), *torch.autograd.grad(grad.square().sum(), [layer.weight, layer.bias])])
    for one in found[1:]:
        assert_same(one, found[0])


def saved_bytes(**options):
    """Bytes that one training forward keeps beyond its inputs."""
    u, weight = torch.randn(64, 40, requires_grad=True), torch.randn(30, 40, requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        solve_layer(u, weight, None, Geometry(), activation="relu", lipschitz=100.0, **options)
    own = {one.untyped_storage()._cdata for one in (u, weight)}
    return sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)


@pytest.mark.parametrize("solver", ["proxgd", "fista"])
def test_memory(solver):
    """At most 1.1 iterates each for a Gram matrix; as much for two iterations as for thirty where memory is low."""
    one, matrix = 64 * 30 * 4, 30 * 30 * 4
    for path in ("gram", "two_step"):
        # One momentum for each sample is a thirtieth of an iterate here.
        momenta = 30 * 64 * 4 if solver == "fista" else 0
        assert saved_bytes(solver=solver, iters=30, path=path) <= 1.1 * 30 * one + momenta
    assert saved_bytes(solver=solver, iters=30, path="two_step", memory="full") > 2 * 30 * one
    low = {saved_bytes(solver=solver, iters=iters, memory="low") for iters in (3, 30)}
    assert len(low) == 1 and low.pop() <= 1.1 * one + matrix


@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
def test_autocast_gradients_are_near_those_in_full_precision(solver):
    torch.manual_seed(0)
    block, u = SolverLinear(40, 24, activation="relu", solver=solver, iters=5, lam=1.0), torch.randn(64, 40)
    for path in ("two_step", "gram") if solver != "proxsg" else ("masked",):
        solver_made = type(block.solver).from_options(**{**block.solver.config.options(), "path": path})
        block.solver = solver_made
        grads = []
        for lowered in (False, True):
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
                loss = block(u).float().square().mean()
            grads.append(torch.autograd.grad(loss, block.weight)[0])
        assert grads[1].dtype == torch.float32
        assert (grads[1] - grads[0]).norm() < 0.03 * grads[0].norm()


@pytest.mark.parametrize("solver", ["proxgd", "fista", "proxsg"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_an_activation_may_overwrite_what_a_block_returns(solver, kind):
    options = {"activation": "relu", "solver": solver, "iters": 3, "dtype": torch.float64}
    layer = SolverLinear(6, 4, **options) if kind == "linear" else SolverConv2d(2, 4, 3, padding=1, **options)
    x = torch.randn(3, 6, dtype=torch.float64) if kind == "linear" else torch.randn(3, 2, 5, 5, dtype=torch.float64)
    found = []
    layer(x)  # The first forward in training moves the step size.
    for inplace in (False, True):
        x = x.detach().requires_grad_()
        layer.zero_grad()
        torch.manual_seed(0)
        nn.functional.relu(layer(x), inplace=inplace).square().sum().backward()
        found.append((x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("memory", ["full", "low"])
def test_samples_of_a_convolution_without_a_bias_or_a_regulariser(memory):
    """Nothing is added to an iterate there, which must not be overwritten for that."""
    geometry, given = OPERATORS["conv2d"][0], tensors("conv2d")[:2]
    options = {"activation": nn.ReLU6(), "solver": "proxsg", "iters": 4, "lam": 0.0, "lipschitz": 9.0, "memory": memory}
    assert_same(
        value_and_gradients("masked", geometry, [*given, None], **options),
        value_and_gradients("loop", geometry, [*given, None], **{**options, "memory": "full"}),
    )
