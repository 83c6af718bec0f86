"""Networks of timm in studies: weights of their own, images as they expect them."""

import pytest
import timm
import torch

from solver_plugins.errors import InputError, WeightError
from solver_plugins.integrations.models import ModelError
from solver_plugins.studies import read_study_config, run_study
from solver_plugins.studies.images import Images, build_backbone, is_pretrained, prepared
from solver_plugins.train.config import ModelSection
from solver_plugins.train.tensors import Part
from tests.train.downloads import cifar10, efficientnet_lite0

CPU = torch.device("cpu")


def images_of(channels=3):
    generator = torch.Generator().manual_seed(0)
    part = Part(torch.rand(4, channels, 32, 32, generator=generator), torch.arange(4))
    return Images(part, part, None, 5)


@pytest.fixture
def weights(tmp_path):
    """Weights for seven classes, under other names."""
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=7)
    # A torch file: safetensors sort what they hold.
    state = {f"other.{place}": value for place, value in enumerate(model.state_dict().values())}
    torch.save(state, tmp_path / "weights.pth")
    return model.eval(), str(tmp_path / "weights.pth")


def test_own_weights_and_new_classes(weights):
    trained, file = weights
    section = ModelSection(spec="timm/test_resnet", weights=file, in_order=True)
    images = images_of()
    model = build_backbone(section, images).eval()
    assert is_pretrained(section) and model.get_classifier().out_features == 5
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.forward_features(x), trained.forward_features(x))
    assert build_backbone(section, images, classes=0)(x).shape == (2, trained.num_features)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_as_the_network_expects_them(channels, weights):
    images = images_of(channels)
    plain = ModelSection(spec="timm/test_resnet")
    own = plain.model_copy(update={"weights": weights[1]})
    model = build_backbone(plain, images)
    known = images.train
    found = prepared(plain, model, known, known, CPU).images
    assert abs(float(found.mean())) < 1e-6 and abs(float(found.std()) - 1) < 1e-6
    # Those that timm gives for this network, whatever the images are like.
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.6), std=(0.25, 0.5, 0.75))
    mean, std = ([0.3], [0.5]) if channels == 1 else ([0.1, 0.2, 0.6], [0.25, 0.5, 0.75])
    found = prepared(own, model, known, known, CPU).images
    for channel in range(channels):
        assert torch.allclose(found[:, channel], (known.images[:, channel] - mean[channel]) / std[channel], atol=1e-6)
    assert prepared(own, model, known, known, CPU, 48).images.shape == (4, channels, 48, 48)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ("model.spec=hf/some-model", ModelError, "'timm/NAME'; found 'hf/some-model'"),
        ("model.dtype=float64", ModelError, "float32"),
        ("model.args={num_classes: 3}", ModelError, "'num_classes' .* is taken from the data"),
        ("model.args={in_chans: 3}", ModelError, "'in_chans' .* is taken from the data"),
        ("model.args={depth: 3}", ModelError, "depth"),
        ("model.weights=missing.pth", InputError, "found nothing at missing.pth"),
        ("model={spec: timm/test_vit, weights: FILE, in_order: true}", WeightError, "Expected"),
    ],
)
def test_mistakes_leave_nothing_behind(change, error, text, weights, tmp_path):
    config = read_study_config("dropblock-regularizer", "smoke", [change.replace("FILE", weights[1])])
    with pytest.raises(error, match=text):
        run_study("dropblock-regularizer", config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_short_scales_start_from_imagenet(tmp_path_factory, tmp_path):
    """A linear head on frozen features, which without ImageNet's weights would be near chance (10%)."""
    folder = tmp_path_factory.mktemp("downloads")
    changes = [
        f"data.name={cifar10(folder, 500, 200)}", f"backbone.model.weights={efficientnet_lite0(folder)}", "seeds=[0]",
        "data.train=train", "data.validation=test", "data.test=test", "controls=[]", "search.rates=[1e-3]",
        "fitting.epochs=20",
    ]  # fmt: skip
    outcome = run_study("opteq-head", read_study_config("opteq-head", "short", changes), tmp_path / "run")
    assert min(cell["accuracy"] for cell in outcome.metrics["cells"]) > 45
    assert "timm/tf_efficientnet_lite0, pretrained" in (tmp_path / "run" / "table.md").read_text()
