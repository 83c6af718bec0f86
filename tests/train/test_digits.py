"""The embedded data set, beside the copy of it that scikit-learn ships."""

import torch
from sklearn import datasets

from solver_plugins.train import load_digits


def test_digits_are_those_of_scikit_learn():
    images, labels = load_digits()
    expected = datasets.load_digits()
    assert images.dtype == torch.uint8 and labels.dtype == torch.int64
    assert torch.equal(images, torch.from_numpy(expected.images).to(torch.uint8))
    assert torch.equal(labels, torch.from_numpy(expected.target))
