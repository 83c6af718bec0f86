"""The cost model: counts by hand, the rule, and what can be forced."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from solver_plugins import solver_linear
from solver_plugins.errors import OptionError
from solver_plugins.operators import Geometry, operator_from_kernel
from solver_plugins.registry import SOLVERS
from solver_plugins.solve.collapse import power_sum
from solver_plugins.solve.paths import (
    SolveSize,
    choose_path,
    gram_from,
    images_kept,
    multiply_adds,
    path_for,
    possible_paths,
    power_products,
    regroups,
    solve_size,
)

SWEEP = list(itertools.product((3, 64, 400, 4096), (2, 120, 512, 3072), (1, 128, 1576), (1, 2, 10, 30)))


@pytest.mark.parametrize(("inputs", "outputs", "batch", "expected"), [
    (400, 120, 256, "gram"), (4096, 512, 128, "gram"), (3072, 768, 1576, "gram"), (512, 512, 128, "gram"),
    (4096, 4096, 128, "two_step"), (768, 3072, 1576, "two_step"), (400, 120, 1, "two_step"),
])  # fmt: skip
def test_known_layers(inputs, outputs, batch, expected):
    assert choose_path(SolveSize(inputs, outputs, batch, 10)) == expected


def test_the_rule_is_the_smaller_count():
    for n1, n2, batch, iterations in SWEEP:
        size = SolveSize(n1, n2, batch, iterations)
        best = choose_path(size)
        assert multiply_adds(best, size) == min(multiply_adds(path, size) for path in possible_paths(size))
        assert (best == "gram") == ((iterations - 1) * batch * (2 * n1 - n2) > n1 * n2)
        least = gram_from(size)
        assert (best == "gram") == (least is not None and batch >= least)


def test_counts_are_those_of_the_code():
    """Forward passes on a counter; the Gram matrix of many rows is counted above what its symmetry saves."""
    for n1, n2, batch, iterations in ((7, 5, 3, 4), (5, 9, 2, 3), (6, 6, 1, 2)):
        u, weight = torch.randn(batch, n1), torch.randn(n2, n1)
        for path in ("two_step", "gram"):
            with FlopCounterMode(display=False) as counter:
                solver_linear(u, weight, activation="relu", solver="proxgd", iters=iterations, path=path, lipschitz=9.0)
            again = multiply_adds(path, SolveSize(n1, n2, batch, iterations))
            assert counter.get_total_flops() == 2 * (batch * n1 * n2 + again)


def test_collapsed_solves_are_counted():
    """The Gram matrix, the weight, and the products of the geometric sum, on the smaller side."""
    for count in range(2, 40):
        with FlopCounterMode(display=False) as counter:
            power_sum(torch.randn(3, 3), count)
        assert counter.get_total_flops() == 2 * 27 * power_products(count)
    for n1, n2, batch, iterations in ((7, 5, 300, 10), (5, 9, 400, 3)):
        u, weight = torch.randn(batch, n1), torch.randn(n2, n1)
        size = SolveSize(n1, n2, batch, iterations, affine=power_products(iterations))
        assert choose_path(size) == "collapsed"
        with FlopCounterMode(display=False) as counter:
            solver_linear(u, weight, solver="proxgd", iters=iterations, lipschitz=9.0)
        assert counter.get_total_flops() == 2 * (batch * n1 * n2 + multiply_adds("collapsed", size))
    # With few rows it does not pay.
    assert choose_path(SolveSize(512, 512, 128, 10, affine=power_products(10))) == "gram"


def test_convolutions_and_samples():
    assert possible_paths(SolveSize(64, 64, 64, 10, is_matrix=False)) == ("two_step",)
    each = SolveSize(400, 120, 256, 10, tau=200)
    assert choose_path(each) == "masked" and gram_from(each) is None
    shared = SolveSize(400, 120, 256, 10, tau=200, shared=True)
    assert choose_path(shared) == "columns"
    # Gathering must pay: not for a handful of samples, nor where nearly all columns are drawn.
    assert choose_path(SolveSize(400, 120, 4, 10, tau=200, shared=True)) == "masked"
    assert choose_path(SolveSize(400, 120, 64, 10, tau=390, shared=True)) == "masked"


def test_what_is_kept_for_a_backward_pass():
    """All of ten iterations; then 1.09 outputs each, unless that is less."""
    for n1, n2 in ((4096, 4096), (768, 3072), (64, 64), (2048, 10)):
        for iterations in range(2, 60):
            kept = images_kept(iterations, (8, n1), (8, n2))
            total = (iterations - 1) * n2 + kept * n1
            budget = max(1.09 * iterations * n2, 10 * (n1 + n2))
            assert kept == iterations - 1 if iterations <= 10 else total <= budget
            assert kept == iterations - 1 or total + n1 > budget
    assert images_kept(30, (128, 4096), (128, 4096)) == 3


def test_regrouping_is_counted():
    for rows, n1, n2 in itertools.product((0, 1, 128, 4000), (3, 400, 4096), (2, 512, 4096)):
        summed, again = rows * n2 * n2 + n2 * n2 * n1, 3 * rows * n1 * n2
        assert regroups(rows, n1, n2) == (summed < again)


def path(solver, shape=(120, 400), batch=256, sampling=None, geometry=None, **options):
    made = SOLVERS.get(solver).from_options(**options)
    size = (batch, shape[1], *(8,) * (len(shape) - 2))
    operator = operator_from_kernel(torch.zeros(shape), geometry or Geometry(), size)
    sampling = made.samples != "nothing" if sampling is None else sampling
    return path_for(made, solve_size(made, operator, batch, sampling=sampling))


def test_solvers_ask_for_what_they_can_use():
    assert path("proxgd") == path("fista") == path("anderson") == "gram"
    assert path("proxgd", iters=1) == path("proxgd", path="two_step") == "two_step"
    assert path("proxgd", path="loop") == "loop" and path("proxgd", batch=1, path="gram") == "gram"
    conv = Geometry.for_conv((3, 3))
    assert path("proxgd", (4, 3, 3, 3), geometry=conv, path="gram") == "two_step"
    assert path("proxsg") == path("proxsg", per_sample=False, path="masked") == "masked"
    assert path("proxsg", per_sample=False) == "columns" and path("proxsg", sampling=False) == "gram"
    # Coordinate descent has full gradients.
    assert path("ms2gd") == "masked" and path("rcd") == "gram" and path("ms2gd", path="loop") == "loop"
    made = SOLVERS.get("proxsg").from_options(sampling="lipschitz")
    operator = operator_from_kernel(torch.zeros(4, 6), Geometry(), (9, 6))
    assert path_for(made, solve_size(made, operator, 9, sampling=True)) == "masked"


@pytest.mark.parametrize(("solver", "options", "match"), [
    ("proxgd", {"path": "columns"}, "gram"),
    ("proxgd", {"memory": "low", "path": "loop"}, "memory"),
    ("proxgd", {"memory": "low", "gradient": "implicit"}, "implicit"),
    ("anderson", {"memory": "low"}, "no backward pass of its own"),
    ("proxsg", {"path": "columns"}, "per_sample=False"),
    ("proxsg", {"memory": "low", "sampling": "gradient"}, "uniform"),
    ("ms2gd", {"path": "masked"}, "'auto' or 'loop'"),
])  # fmt: skip
def test_what_cannot_be(solver, options, match):
    with pytest.raises(OptionError, match=match):
        SOLVERS.get(solver).from_options(**options)
