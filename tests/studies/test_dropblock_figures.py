"""What the DropBlock studies measure, against dense formulas and the theory."""

import json

import pytest
import torch

from solver_plugins.dropblock import BlockSizeError, GridBlocks, deterministic_objective
from solver_plugins.errors import OptionError
from solver_plugins.integrations.models import ModelError
from solver_plugins.studies import read_study_config, run_study
from solver_plugins.studies.dropblock_fig3 import ratio, shaped
from solver_plugins.studies.dropblock_fig4 import GRID, MATCHED, PRINTED, UNMATCHED, scheme_of
from solver_plugins.studies.dropblock_rank import balance, effective_rank
from solver_plugins.studies.dropblock_shallow import Sizes, objective_of, synthetic


@pytest.mark.parametrize("samples", [5, 40])
def test_compressed_problem_has_the_same_objective(samples):
    problem = synthetic(Sizes(samples=samples, inputs=7, hidden=6, outputs=5), 0)
    scheme = GridBlocks(0.3, 2)
    dense = deterministic_objective(problem.U, problem.V, problem.X, problem.Y, scheme)
    assert float(objective_of(problem, scheme)(problem.U, problem.V)) == pytest.approx(float(dense), rel=1e-12)
    # And for other weights, where the error is not what it was at first.
    U, V = torch.randn_like(problem.U), 0.1 * torch.randn_like(problem.V)
    dense = deterministic_objective(U, V, problem.X, problem.Y, scheme)
    assert float(objective_of(problem, scheme)(U, V)) == pytest.approx(float(dense), rel=1e-12)


def test_synthetic_problem_is_the_same_for_all_arms():
    first, second, other = (synthetic(Sizes(), seed) for seed in (1, 1, 2))
    assert torch.equal(first.Y, second.Y) and torch.equal(first.V, second.V) and not torch.equal(first.Y, other.Y)
    assert first.X.shape == (1000, 100) and first.U.shape == (80, 50) and first.V.shape == (100, 50)


def test_fig_1_small(tmp_path):
    """Both trainings approach the closed form from above; sampled objectives are the deterministic one on average."""
    config = read_study_config("dropblock-fig1", "smoke", ["descent.iterations=1500", "sizes.samples=40"])
    metrics = run_study("dropblock-fig1", config, tmp_path).metrics
    sampled, deterministic = metrics["cells"]
    assert sampled["attainable"]
    assert -1e-9 < deterministic["gap"] < 1e-3 and -1e-6 < sampled["gap"] < 0.02
    assert abs(sampled["sampled_over_deterministic"] - 1) < 4 * sampled["standard_error"] < 0.1


def test_fig_1_that_diverges_says_so(tmp_path):
    changes = ["descent.optimizer=sgd", "descent.lr=1e3", "descent.iterations=30"]
    outcome = run_study("dropblock-fig1", read_study_config("dropblock-fig1", "smoke", changes), tmp_path)
    assert [cell["gap"] for cell in outcome.metrics["cells"]] == [None, None]
    assert "diverged" in outcome.tables[0].markdown() and outcome.metrics["summary"]["largest_gap"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [("block_size=3", "nearest that divide"), ("thetas=[1.5]", "probability that a unit is kept"),
     ("arms=[both]", "'sampled' and 'deterministic'"), ("descent.lr=0", "descent.lr"), ("sizes.hiden=4", "hidden")],
)  # fmt: skip
def test_fig_1_mistakes(change, message):
    with pytest.raises(OptionError, match=message):
        read_study_config("dropblock-fig1", "smoke", [change])


@pytest.mark.slow
def test_fig_1_at_the_papers_size(tmp_path):
    """Within 0.1% of the closed form, in under three minutes."""
    config = read_study_config("dropblock-fig1", "short", ["seeds=[0]"])
    metrics = run_study("dropblock-fig1", config, tmp_path).metrics
    assert all(-1e-6 < cell["gap"] < 1e-3 for cell in metrics["cells"])
    assert sum(metrics["made"]["cpu_seconds"].values()) < 180


@pytest.mark.parametrize("arm", [GRID, MATCHED, PRINTED, UNMATCHED])
def test_fig_4_schemes_have_their_covariance(arm):
    """Mean and characteristic matrix of each scheme against 40000 masks of six units."""
    scheme, cbar = scheme_of(arm, 0.6, 3, 6)
    generator = torch.Generator().manual_seed(0)
    masks = scheme.mask((40_000,), (6,), generator=generator).double()
    kept = 0.6**3 if arm == UNMATCHED else 0.6
    assert scheme.mean == pytest.approx(kept)
    assert float((masks.mean(0) - kept).abs().max()) < 0.02
    found = torch.cov(masks.T, correction=0) / kept**2
    assert float((found - cbar).abs().max()) < 0.05 * float(cbar.max())


def test_fig_3_ratio_is_one_for_white_inputs_only():
    sizes = Sizes(samples=50, inputs=6, hidden=4, outputs=3)
    found = {}
    for kind in ("normal", "white", "correlated"):
        problem = synthetic(sizes, 0, lambda X, kind=kind: shaped(X, kind, 0.9))
        # Weights that follow the inputs, as trained ones do.
        V = torch.linalg.eigh(problem.X.mT @ problem.X).eigenvectors[:, -4:]
        found[kind] = ratio(problem, problem.U, V, 0.3)
        M = problem.X
        dense = sum(
            float(problem.U[:, k].square().sum()) * float((V[:, k] ** 2 * (M**2).sum(0)).sum()) for k in range(4)
        )
        dropout = sum(float(problem.U[:, k].square().sum()) * float((M @ V[:, k]).square().sum()) for k in range(4))
        assert found[kind] == pytest.approx(dense / dropout, rel=1e-12)
    assert found["white"] == pytest.approx(1, abs=1e-12)
    assert abs(found["normal"] - 1) < abs(found["correlated"] - 1) and found["correlated"] < 0.8


def test_correlated_inputs_have_their_covariance():
    X = shaped(
        torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), "correlated", 0.8
    )
    expected = torch.tensor([[1, 0.8, 0.64], [0.8, 1, 0.8], [0.64, 0.8, 1]], dtype=torch.float64)
    assert float((torch.cov(X.T) - expected).abs().max()) < 0.02


def test_balance_and_effective_rank():
    torch.manual_seed(0)
    X, U, V = torch.randn(9, 4).double(), torch.randn(3, 6).double(), torch.randn(4, 6).double()
    norms = [float((X @ V[:, k : k + 2] @ U[:, k : k + 2].T).norm()) for k in (0, 2, 4)]
    assert balance(X, U, V, 2) == pytest.approx(min(norms) / max(norms), rel=1e-10)
    assert balance(X, U, V, 6) == 1
    assert effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0])) == pytest.approx(3)


def test_rank_study_approaches_theory(tmp_path):
    changes = ["thetas=[0.5]", "block_sizes=[5]", "sizes.samples=20", "descent.iterations=1500"]
    outcome = run_study("dropblock-rank", read_study_config("dropblock-rank", "smoke", changes), tmp_path)
    (cell,) = outcome.metrics["cells"]
    assert cell["attainable"] and -1e-9 < cell["gap"] < 1e-3 and cell["balance"] > 0.9 > cell["balance_at_first"]
    assert cell["singular_value_error"] < 0.02 and cell["rank"] == cell["predicted_rank"]


def test_fig_2_starts_above_its_bound_and_descends(tmp_path):
    changes = ["iterations=12", "lr=5e-3", "arms=[deterministic]"]
    config = read_study_config("dropblock-fig2", "smoke", changes)
    run_study("dropblock-fig2", config, tmp_path)
    (path,) = (tmp_path / "cells").glob("*.json")
    values = json.loads(path.read_text())["values"]
    objective = values["curves"]["objective"]
    assert values["closed_form"] < objective[-1] < objective[0]
    assert len(values["curves"]["predicted"]) == len(values["curves"]["singular_values"]) == 10


def test_fig_2_models_that_timm_does_not_have(tmp_path):
    config = read_study_config("dropblock-fig2", "smoke", ["model.spec=timm/resnet5000"])
    with pytest.raises(ModelError, match="timm has no model 'resnet5000'"):
        run_study("dropblock-fig2", config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_regularizer_arms_start_from_the_same_weights(tmp_path):
    """Without dropping anything (theta near one) all three arms take the same steps."""
    changes = ["theta=0.9999999", "data.train=train[:32]", "fitting.epochs=2"]
    metrics = run_study(
        "dropblock-regularizer", read_study_config("dropblock-regularizer", "smoke", changes), tmp_path
    ).metrics
    first, *others = (cell["effective_rank"] for cell in metrics["cells"])
    assert others == pytest.approx([first] * 2, rel=1e-3)


def test_regularizer_mistakes_leave_nothing_behind(tmp_path):
    config = read_study_config("dropblock-regularizer", "smoke", ["block_size=7"])
    with pytest.raises(BlockSizeError, match="nearest that divide it: 6 or 8"):
        run_study("dropblock-regularizer", config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
