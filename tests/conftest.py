"""Fixtures and settings of the whole suite."""

import gc
import os
import zlib
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# No deadline: the first call of a torch kernel takes many times as long as the next. CI repeats the same examples.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_finish() -> None:
    """Takes what the libraries made when they were imported out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Puts it back, as some of it has to be collected at exit."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed_torch(request: pytest.FixtureRequest) -> int:
    """Seeds torch with a number made from the test's name: the same alone, in the whole suite and in any order."""
    seed = zlib.crc32(request.node.name.encode())
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def environment() -> Iterator[os._Environ[str]]:
    """The environment, put back afterwards: Accelerate writes what it has found into it."""
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)
