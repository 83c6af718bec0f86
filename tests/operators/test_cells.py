import math

import numpy as np
import pytest
import torch

from solver_plugins.operators.cells import Cells, covering

CPU = torch.device("cpu")


def best_product(cells: Cells, points: np.ndarray) -> np.ndarray:
    """Returns for each frequency the largest product of cosines to a centre, or to the mirror image of one."""
    centres = cells.centres.numpy()
    distances = np.abs(points[:, None] - np.concatenate([centres, -centres])[None]) % (2 * math.pi)
    distances = np.minimum(distances, 2 * math.pi - distances)
    half_angles = np.minimum(np.array(cells.degrees) * distances, math.pi) / 2
    return (np.cos(half_angles) ** 2).prod(-1).max(1)


@pytest.mark.parametrize("factor", [1.05, 1.7, 3.3])
@pytest.mark.parametrize(
    "degrees", [(1,), (2,), (6,), (2, 2), (1, 4), (4, 1), (6, 6), (0, 2), (2, 0, 3), (1, 1, 1), (2, 1, 2)]
)
def test_every_frequency_is_near_a_centre(degrees, factor):
    generator = np.random.default_rng(0)
    cells = covering(degrees, factor, CPU)
    assert 1 / factor <= cells.shrink <= 1
    points = generator.uniform(-math.pi, math.pi, (200, len(degrees)))
    assert best_product(cells, points).min() >= cells.shrink * (1 - 1e-12)
    # After a split, too: every point of the boxes around the old cells is near a new centre.
    some = torch.arange(len(cells.centres)) % 7 == 0
    children = cells.split(some)
    assert len(children.centres) == 2 ** sum(degree > 0 for degree in degrees) * int(some.sum())
    assert children.shrink > cells.shrink
    centres = cells.centres[some].numpy()
    inside = centres[generator.integers(len(centres), size=100)]
    inside = inside + generator.uniform(-1, 1, inside.shape) * np.array(cells.widths)
    assert best_product(children, inside).min() >= children.shrink * (1 - 1e-12)


def test_boxes_contain_their_hexagons():
    """Every frequency lies in the box around some centre: splitting boxes loses nothing."""
    cells = covering((2, 3), 1.2, CPU)
    points = np.random.default_rng(0).uniform(-math.pi, math.pi, (2000, 2))
    centres = np.concatenate([cells.centres.numpy(), -cells.centres.numpy()])
    distances = np.abs(points[:, None] - centres[None]) % (2 * math.pi)
    distances = np.minimum(distances, 2 * math.pi - distances)
    product = (np.cos(np.minimum(np.array(cells.degrees) * distances, math.pi) / 2) ** 2).prod(-1)
    nearby = (distances <= np.array(cells.widths)).all(-1) & (product >= cells.shrink * (1 - 1e-12))
    assert nearby.any(1).all()


def test_hexagons_are_fewer_than_squares():
    squares = math.ceil(math.pi / math.acos(1.1**-0.25)) ** 2 / 2
    assert len(covering((2, 2), 1.1, CPU).centres) <= 0.8 * squares


@pytest.mark.parametrize("degrees", [(), (0,), (0, 0)])
def test_a_matrix_has_one_cell(degrees):
    cells = covering(degrees, 1.01, CPU)
    assert cells.centres.shape == (1, len(degrees)) and cells.shrink == 1
    again = cells.split(torch.tensor([True]))
    assert again.centres.shape == (1, len(degrees)) and again.shrink == 1
    assert len(cells.split(torch.tensor([False])).centres) == 0
