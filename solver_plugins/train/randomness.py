"""Random numbers that depend on a seed and a place in the run, and do not disturb the global generators."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy
import torch


def seed_for(*place: int | str) -> int:
    """Returns a seed for a place in the run, such as ``seed_for(seed, "order", epoch)``."""
    text = "/".join(str(part) for part in place)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@contextlib.contextmanager
def seeded(*place: int | str, devices: bool = False) -> Iterator[None]:
    """Seeds the generators of Python, numpy and torch inside the block, and restores them afterwards.

    Args:
        *place: See :func:`seed_for`.
        devices: Whether to include the generators of accelerators.
    """
    seed = seed_for(*place)
    python, array = random.getstate(), numpy.random.get_state()
    device = torch.accelerator.current_accelerator() if devices else None
    kind = "cuda" if device is None else device.type
    with torch.random.fork_rng(devices=None if devices else [], device_type=kind):
        try:
            random.seed(seed)
            numpy.random.seed(seed)
            # torch.manual_seed would also seed accelerators.
            torch.default_generator.manual_seed(seed)
            if device is not None:
                torch.get_device_module(device).manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)
