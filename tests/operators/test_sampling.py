import itertools
import math

import hypothesis
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import strategies as st

from solver_plugins.errors import OptionError
from solver_plugins.operators import (
    expected_smoothness,
    importance_mask,
    importance_weights,
    inclusion_probabilities,
    tau_nice_indices,
    tau_nice_mask,
    tau_nice_masks,
    tau_of,
)
from solver_plugins.operators.sampling import _fill_with_sets


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def subsets(n: int, tau: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(n), tau))


def test_tau():
    assert [tau_of(p, 10) for p in (0.0, 0.5, 0.94, 1.0)] == [10, 5, 1, 1]
    assert tau_of(0.5, 1) == 1
    for p, n in ((-0.1, 3), (1.1, 3), (0.5, 0)):
        with pytest.raises(OptionError):
            tau_of(p, n)


@pytest.mark.parametrize("batch", [(), (7,), (2, 3)])
@pytest.mark.parametrize("tau", [1, 4, 9])
def test_exact_count(batch, tau):
    mask = tau_nice_mask(batch, 9, tau, device="cpu", dtype=torch.bfloat16, generator=generator())
    assert mask.shape == (*batch, 9) and mask.dtype == torch.bfloat16
    assert set(mask.flatten().tolist()) <= {0.0, 1.0}
    assert (mask.float().sum(-1) == tau).all()


def test_reproducible_from_a_generator_or_the_global_state():
    draw = [tau_nice_mask((50,), 20, 7, generator=generator(3)) for _ in range(2)]
    assert torch.equal(*draw)
    torch.manual_seed(1)
    first = tau_nice_mask((50,), 20, 7)
    assert not torch.equal(first, tau_nice_mask((50,), 20, 7))
    torch.manual_seed(1)
    assert torch.equal(first, tau_nice_mask((50,), 20, 7))


def test_every_subset_is_equally_likely():
    draws = 20000
    mask = tau_nice_mask((draws,), 6, 3, generator=generator())
    codes = (mask.long() * 2 ** torch.arange(6)).sum(-1)
    counts = torch.bincount(codes, minlength=64)
    counts = counts[counts > 0].numpy()
    assert len(counts) == math.comb(6, 3)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


@hypothesis.given(st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=12), st.integers(1, 12))
@hypothesis.settings(max_examples=200)
def test_inclusion_probabilities(scores, tau):
    hypothesis.assume(tau <= len(scores))
    scores = torch.tensor(scores, dtype=torch.float64)
    pi = inclusion_probabilities(scores, tau)
    assert ((pi >= 0) & (pi <= 1)).all()
    assert float(pi.sum()) == pytest.approx(tau, abs=1e-9)
    if int((scores > 0).sum()) >= tau:
        # Proportional to the scores wherever they are not capped, and capped only where they would exceed one.
        free = (pi < 1) & (scores > 0)
        ratios = pi[free] / scores[free]
        if free.any():
            torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-7, atol=0)
            assert (scores[pi == 1] * ratios[0] >= 1 - 1e-7).all()
        assert not pi[scores == 0].any() or int((scores > 0).sum()) == tau
    else:
        assert (pi[scores > 0] == 1).all()


def test_inclusion_probabilities_of_batches_and_special_scores():
    torch.testing.assert_close(inclusion_probabilities(torch.zeros(4), 2), torch.full((4,), 0.5))
    torch.testing.assert_close(inclusion_probabilities(torch.ones(2, 4), 4), torch.ones(2, 4))
    pi = inclusion_probabilities(torch.tensor([[8.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]), 2)
    torch.testing.assert_close(pi, torch.tensor([[1.0, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5]]))
    assert inclusion_probabilities(torch.ones(3).bfloat16(), 2).dtype == torch.float32
    with pytest.raises(OptionError):
        inclusion_probabilities(torch.ones(3), 4)


@pytest.mark.parametrize("tau", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_importance_masks_have_the_count_and_the_probabilities(tau, dtype):
    scores = torch.tensor([0.0, 0.1, 1.0, 2.0, 3.0, 5.0, 8.0, 40.0], dtype=dtype)
    pi = inclusion_probabilities(scores, tau)
    draws = 20000
    mask = importance_mask(pi.expand(draws, -1), generator=generator())
    assert mask.dtype == dtype
    assert set(mask.flatten().tolist()) <= {0.0, 1.0}
    assert (mask.sum(-1) == tau).all()
    deviation = (mask.double().mean(0) - pi).abs() / (pi * (1 - pi) / draws).sqrt().clamp_min(1e-9)
    assert (deviation < 4.5).all()
    assert not mask[:, 0].any()
    weights = importance_weights(mask, pi.expand(draws, -1))
    possible = pi > 0
    error = ((1 - pi) / (pi * draws)).clamp_min(0).sqrt()
    assert ((weights.double().mean(0) - 1).abs()[possible] <= 4.5 * error[possible] + 1e-6).all()
    assert not weights[:, ~possible].any()


@hypothesis.given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 10**6))
@hypothesis.settings(max_examples=200)
def test_importance_count_is_exact_for_any_scores(scores, tau, seed):
    hypothesis.assume(tau <= len(scores))
    pi = inclusion_probabilities(torch.tensor(scores), tau)
    mask = importance_mask(pi.expand(16, -1), generator=generator(seed))
    assert set(mask.flatten().tolist()) <= {0.0, 1.0}
    assert (mask.sum(-1) == tau).all()


def test_importance_is_reproducible():
    pi = inclusion_probabilities(torch.rand(5, 30), 11)
    assert torch.equal(importance_mask(pi, generator=generator(5)), importance_mask(pi, generator=generator(5)))
    single = importance_mask(pi[0])
    assert single.shape == (30,) and single.sum() == 11


@pytest.mark.parametrize("tau", [1, 2, 3, 5])
def test_sampled_gram_is_unbiased(tau):
    matrix = torch.randn(4, 5, dtype=torch.float64)
    sampled = torch.stack([5 / tau * matrix[:, s] @ matrix[:, s].T for s in map(list, subsets(5, tau))])
    torch.testing.assert_close(sampled.mean(0), matrix @ matrix.T)


@pytest.mark.parametrize("rows, n, tau", [(3, 5, 1), (3, 5, 2), (4, 6, 3), (2, 6, 5), (3, 4, 4), (3, 1, 1)])
def test_expected_smoothness_bounds_the_mean_square(rows, n, tau):
    """``E |H_S x|^2 <= L_tau <x, H x>`` for all x: the difference of the two forms is positive semidefinite."""
    for seed in range(5):
        matrix = torch.randn(rows, n, dtype=torch.float64, generator=generator(seed))
        if seed == 0:
            matrix[:, 0] *= 5
        full = matrix @ matrix.T
        sampled = [n / tau * matrix[:, s] @ matrix[:, s].T for s in map(list, subsets(n, tau))]
        mean_square = torch.stack([gram.T @ gram for gram in sampled]).mean(0)
        L = torch.linalg.eigvalsh(full)[-1]
        constant = expected_smoothness(L, matrix.square().sum(0), n, tau)
        slack = torch.linalg.eigvalsh(constant * full - mean_square)[0]
        assert float(slack) >= -1e-9 * float(constant * L)
        if tau == n:
            assert float(constant) == float(L)
        if tau == 1 and n > 1:
            assert float(constant) == pytest.approx(n * float(matrix.square().sum(0).amax()))


def test_expected_smoothness_refuses_counts():
    for n, tau in ((3, 0), (3, 4)):
        with pytest.raises(OptionError):
            expected_smoothness(torch.tensor(1.0), torch.ones(3), n, tau)


def test_compiles_without_graph_breaks():
    def draw(scores):
        pi = inclusion_probabilities(scores, 3)
        return pi, importance_mask(pi), tau_nice_mask((2,), 8, 3, device=scores.device, dtype=scores.dtype)

    scores = torch.rand(2, 8)
    pi, mask, nice = torch.compile(draw, fullgraph=True, backend="aot_eager")(scores)
    torch.testing.assert_close(pi, inclusion_probabilities(scores, 3))
    assert (mask.sum(-1) == 3).all() and (nice.sum(-1) == 3).all()


def test_counts_survive_many_features():
    pi = inclusion_probabilities(torch.from_numpy(np.random.default_rng(0).pareto(1.0, 5000)).float(), 2500)
    assert (importance_mask(pi.expand(20, -1), generator=generator()).sum(-1) == 2500).all()


@pytest.mark.parametrize("batch", [(), (3, 4)])
def test_many_samples_in_one_call_are_those_of_many_calls(batch):
    one, each = generator(5), generator(5)
    masks = tau_nice_masks(6, batch, 9, 4, generator=one)
    assert masks.dtype == torch.uint8 and masks.shape == (6, *batch, 9)
    assert torch.equal(masks.float(), torch.stack([tau_nice_mask(batch, 9, 4, generator=each) for _ in range(6)]))
    assert torch.equal(torch.rand(1, generator=one), torch.rand(1, generator=each))
    if not batch:
        indices = tau_nice_indices(6, 9, 4, generator=generator(5))
        assert torch.equal(masks, torch.zeros_like(masks).scatter(-1, indices, 1))


def test_equal_keys_are_drawn_again():
    """Keys of two values only: nearly all rows have ties, and every set is still as likely as any other."""

    class Coarse(np.random.SFC64):
        def random_raw(self, size):
            return super().random_raw(size) & np.uint64(0x0000000300000003)

    mask = np.empty((30000, 5), np.bool_)
    _fill_with_sets(mask, 2, Coarse(1))
    assert (mask.sum(-1) == 2).all()
    counts = np.bincount(mask @ 2 ** np.arange(5), minlength=32)
    assert scipy.stats.chisquare(counts[counts > 0]).pvalue > 1e-3 and (counts > 0).sum() == math.comb(5, 2)


def test_without_numpy_the_count_is_exact_too():
    """Under a transform, and in a compiled graph, the sets are those of the largest uniform numbers."""
    masks = torch.func.vmap(lambda _: tau_nice_masks(3, (5,), 8, 3), randomness="different")(torch.zeros(4))
    assert masks.shape == (4, 3, 5, 8) and (masks.sum(-1) == 3).all() and not torch.equal(masks[0], masks[1])
    indices = torch.func.vmap(lambda _: tau_nice_indices(3, 8, 3), randomness="different")(torch.zeros(4))
    assert (indices.sort(-1).values.diff(dim=-1) > 0).all()
