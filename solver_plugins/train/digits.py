"""The embedded data set: handwritten digits, for a first run without a network."""

from importlib import resources

import torch
from torch import Tensor


def load_digits() -> tuple[Tensor, Tensor]:
    """Returns 1797 images of handwritten digits, and their labels.

    The test set of the *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, UCI Machine Learning
    Repository, 1998, CC BY 4.0): images ``[1797, 8, 8]`` of integers from 0 (white) to 16, and labels from 0 to 9.
    """
    import numpy

    # No pickle: an .npz file of plain arrays, read as such.
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file:
        found = numpy.load(file, allow_pickle=False)
        return torch.from_numpy(found["images"]), torch.from_numpy(found["labels"]).long()
