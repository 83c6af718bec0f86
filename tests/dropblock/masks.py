"""Every mask of a small scheme with its probability, written out bit by bit."""

import itertools

import torch


def bernoulli_patterns(n, keep):
    """Yields every pattern of ``n`` independent bits with its probability."""
    for bits in itertools.product((0.0, 1.0), repeat=n):
        ones = int(sum(bits))
        yield bits, keep**ones * (1 - keep) ** (n - ones)


def enumerate_masks(scheme, size, theta, r):
    """Returns all masks ``(n, prod(size))`` and their probabilities, from the definition of the scheme."""
    height, width = size if len(size) == 2 else (1, *size)
    rows = r if len(size) == 2 else 1
    masks, weights = [], []
    if scheme == "dropout":
        rows = r = 1
    if scheme == "overlapping":
        # A block starts at each of these corners, or none does: those before the border count, too.
        corners = [(y, x) for y in range(1 - rows, height) for x in range(1 - r, width)]
        for bits, weight in bernoulli_patterns(len(corners), theta ** (1 / (r * rows))):
            mask = torch.ones(height, width, dtype=torch.float64)
            for (y, x), kept in zip(corners, bits, strict=True):
                if not kept:
                    mask[max(y, 0) : y + rows, max(x, 0) : x + r] = 0
            masks.append(mask.flatten())
            weights.append(weight)
    else:
        blocks = [(y, x) for y in range(0, height, rows) for x in range(0, width, r)]
        for bits, weight in bernoulli_patterns(len(blocks), theta):
            mask = torch.zeros(height, width, dtype=torch.float64)
            for (y, x), kept in zip(blocks, bits, strict=True):
                mask[y : y + rows, x : x + r] = kept
            masks.append(mask.flatten())
            weights.append(weight)
    return torch.stack(masks), torch.tensor(weights, dtype=torch.float64)


CASES = [
    ("dropout", (4,), 0.3, 1),
    ("dropout", (1,), 0.9, 1),
    ("dropblock", (6,), 0.5, 2),
    ("dropblock", (6,), 0.8, 6),
    ("dropblock", (6,), 0.8, 1),
    ("dropblock", (2, 4), 0.6, 2),
    ("overlapping", (5,), 0.7, 3),
    ("overlapping", (4,), 0.5, 1),
    ("overlapping", (1,), 0.5, 4),
    ("overlapping", (3,), 0.9, 7),
    ("overlapping", (2, 2), 0.6, 2),
    ("overlapping", (2, 3), 0.4, 2),
]
