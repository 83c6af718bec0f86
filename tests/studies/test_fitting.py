"""Training: images that are changed at random, and steps that go too far."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from solver_plugins.studies.training import Fitting, fit, scores
from solver_plugins.train.tensors import Part, changed


@pytest.mark.parametrize("settings", [{}, {"flip": True}, {"shift": 2}, {"shift": 1, "flip": True}])
def test_images_are_mirrored_and_shifted(settings):
    """Every image is one of the windows of the reflected image, mirrored or not; over many images all of them occur."""
    images = torch.randn(400, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    pad, mirrors = settings.get("shift", 0), settings.get("flip", False)
    found = changed(images, pad, mirrors, torch.Generator().manual_seed(0))
    ways = {}
    for flip in (False, True) if mirrors else (False,):
        padded = np.pad(
            (images.flip(-1) if flip else images).numpy(), ((0, 0), (0, 0), (pad,) * 2, (pad,) * 2), "reflect"
        )
        for down, right in itertools.product(range(2 * pad + 1), repeat=2):
            window = torch.from_numpy(padded[:, :, down : down + 5, right : right + 6])
            ways[flip, down, right] = (found == window).flatten(1).all(1)
    assert all(way.any() for way in ways.values()) and torch.stack(list(ways.values())).any(0).all()
    again = changed(images, pad, mirrors, torch.Generator().manual_seed(0))
    assert torch.equal(found, again)


def test_a_last_step_that_goes_too_far_is_no_training():
    """Its loss was finite; the weights that it left are not."""
    torch.manual_seed(0)
    part = Part(1e4 * torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    for lr, diverges in ((1e37, True), (1e-3, False)):
        settings = Fitting(lr=lr, batch_size=4, epochs=1)
        assert fit(nn.Linear(3, 2), settings.batches(part, 0), settings.settings()).diverged == diverges


def test_a_network_that_answers_nothing_is_evaluated():
    part = Part(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float("nan"))
    found = scores(model, part)
    assert math.isnan(found.loss) and found.accuracy <= 50
