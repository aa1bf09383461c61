"""Ranks on the pretended device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pretend
import pytest

from refimpl import launch


@pytest.fixture(scope="session")
def ranks(pretended_device: Path) -> Iterator[launch.World]:
    """Two, whose tensors live there."""
    with living(pretended_device, 2) as world:
        yield world


@pytest.fixture(scope="session")
def four(pretended_device: Path) -> Iterator[launch.World]:
    with living(pretended_device, 4) as world:
        yield world


@contextmanager
def living(library: Path, number: int) -> Iterator[launch.World]:
    with launch.World(number, device="cpu") as world:
        world.call(pretend.live_on, library)
        yield world
