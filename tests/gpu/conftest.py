"""The pretended device, built once for the tests that share it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pretend
import pytest

from refimpl import launch


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretend.built(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="session")
def ranks(library: Path) -> Iterator[launch.World]:
    """Two, whose tensors live there."""
    with living(library, 2) as world:
        yield world


@pytest.fixture(scope="session")
def four(library: Path) -> Iterator[launch.World]:
    with living(library, 4) as world:
        yield world


@contextmanager
def living(library: Path, number: int) -> Iterator[launch.World]:
    with launch.World(number, device="cpu") as world:
        world.call(pretend.live_on, library)
        yield world
