import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from solver_plugins.errors import OptionError, ShapeError
from solver_plugins.prox import nuclear_norm, prox_nuclear_norm, prox_psd, psd_indicator

SHAPES = [(4, 4), (5, 3), (3, 5), (2, 3, 4), (2, 2, 4, 3)]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_the_nuclear_norm_against_numpy():
    x = random(3, 4, 5)
    np.testing.assert_allclose(nuclear_norm(x).numpy(), [np.linalg.norm(m, "nuc") for m in x.numpy()])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [0.3, 1.5])
def test_nuclear_norm_against_numpy(shape, step):
    a = random(*shape)
    u, s, vh = np.linalg.svd(a.numpy(), full_matrices=False)
    expected = u @ (np.maximum(s - step, 0)[..., None] * vh)
    np.testing.assert_allclose(prox_nuclear_norm(a, step).numpy(), expected, atol=1e-12)


def test_nuclear_norm_minimises():
    """Any move from the prox costs at least its squared length over 2 t (strong convexity)."""
    a, step = random(4, 3), 0.7
    x = prox_nuclear_norm(a, step)

    def objective(y):
        return nuclear_norm(y) + (y - a).square().sum((-2, -1)) / (2 * step)

    for size in (1e-4, 1e-2, 1.0):
        d = size * random(300, 4, 3)
        assert (objective(x + d) >= objective(x) + d.square().sum((-2, -1)) / (2 * step) - 1e-12).all()


@pytest.mark.parametrize("shape", [(4, 4), (1, 3, 3)])
def test_psd_against_numpy(shape):
    a = random(*shape)
    w, q = np.linalg.eigh((a + a.mT).numpy() / 2)
    expected = q @ (np.maximum(w, 0)[..., None] * q.swapaxes(-1, -2))
    np.testing.assert_allclose(prox_psd(a).numpy(), expected, atol=1e-12)


def test_psd_is_the_nearest_one():
    a = random(4, 4)
    x = prox_psd(a)
    assert psd_indicator(x) == 0
    factor = random(500, 4, 4)
    others = torch.cat([factor @ factor.mT, x + 0.01 * factor @ factor.mT])
    assert ((others - a).square().sum((-2, -1)) >= (x - a).square().sum()).all()
    # The obtuse angle that characterises a projection onto a convex set.
    assert (((a - x) * (others - x)).sum((-2, -1)) <= 1e-10).all()


def test_the_psd_indicator():
    batch = torch.stack([torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([[1.0, 0.5], [0.0, 1.0]])])
    assert psd_indicator(batch).tolist() == [0, torch.inf, torch.inf]
    assert psd_indicator(torch.zeros(3, 3)) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_at_distinct_values(shape):
    a = random(*shape).requires_grad_()
    step = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(prox_nuclear_norm, (a, step))
    if shape[-1] == shape[-2]:
        assert gradcheck(prox_psd, (a,))


def test_gradients_at_repeated_and_zero_values():
    """Autograd through the factors gives NaN here; the maps themselves are smooth at these points."""
    q, _ = torch.linalg.qr(random(4, 4))
    r, _ = torch.linalg.qr(random(5, 4))
    for values in ([2.0, 2.0, 0.1, 0.1], [3.0, 3.0, 3.0, 0.0], [2.0, 1.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
        a = (q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ r.mT).requires_grad_()
        assert gradcheck(prox_nuclear_norm, (a, 0.6))
    for values in ([2.0, 2.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0], [-2.0, -2.0, -2.0, 0.5]):
        a = (q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ q.mT).requires_grad_()
        assert gradcheck(prox_psd, (a,))


def test_gradients_are_finite_at_kinks():
    for a in (torch.eye(3), torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 1.0, 0.0]))):
        a = a.clone().requires_grad_()
        (prox_nuclear_norm(a, 1.0).sum() + prox_psd(a).sum()).backward()
        assert a.grad.isfinite().all()


def test_second_derivatives_are_refused():
    a = random(3, 3).requires_grad_()
    for prox in (prox_psd, prox_nuclear_norm):
        (gradient,) = torch.autograd.grad(prox(a).square().sum(), a, create_graph=True)
        # The second term ties a to the result by another path: a refusal must not depend on there being none.
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad((gradient * a).sum(), a)


def test_vmap_and_half_precision():
    a = random(3, 4, 2)
    torch.testing.assert_close(torch.func.vmap(lambda m: prox_nuclear_norm(m, 0.5))(a), prox_nuclear_norm(a, 0.5))
    low = a.to(torch.bfloat16)
    assert prox_nuclear_norm(low, 0.5).dtype == torch.bfloat16
    assert prox_psd(low @ low.mT).dtype == torch.bfloat16


def test_firm_nonexpansiveness():
    a, b = 2 * random(2, 200, 3, 3)
    for prox in (lambda m: prox_nuclear_norm(m, 0.8), prox_psd):
        p, q = prox(a), prox(b)
        assert ((p - q).square().sum((-2, -1)) <= ((p - q) * (a - b)).sum((-2, -1)) + 1e-12).all()


def test_bad_inputs_are_refused():
    with pytest.raises(ShapeError, match="matrices"):
        prox_nuclear_norm(torch.randn(3))
    with pytest.raises(ShapeError, match="square"):
        prox_psd(torch.randn(3, 2))
    with pytest.raises(OptionError, match="positive"):
        prox_nuclear_norm(torch.randn(3, 2), -1.0)
    with pytest.raises(OptionError, match="0-d"):
        prox_nuclear_norm(torch.randn(3, 2), torch.ones(3))
