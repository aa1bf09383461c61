"""Ranks that torch alone has joined agree on a folder, each job on another, and leave none behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from refimpl import launch
from refimpl.ranks import here


def asks_late() -> tuple[Path | None, bool]:
    del os.environ[here.VARIABLE]
    if dist.get_rank() == 0:
        dist.barrier()  # it need not ask when the others do
        return here.of_job(), True
    found = here.of_job()
    dist.barrier()
    return found, found is not None and found.is_dir()


def test_ranks_find_one_folder_and_the_last_takes_it_away() -> None:
    found = launch.run(asks_late, ranks=3, device="cpu")
    folder, _ = found[0]
    assert folder is not None
    assert found == [(folder, True)] * 3
    assert not folder.exists()


@contextmanager
def job(store: dist.Store) -> Iterator[None]:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(here.VARIABLE, raising=False)


def test_the_next_job_on_the_same_store_has_another_folder(nobody_says: None) -> None:
    assert here.of_job() is None
    store, folders = dist.HashStore(), list[Path]()
    for _ in range(2):
        with job(store):
            folder = here.of_job()
            assert folder is not None
            assert folder.is_dir()
            assert here.of_job() is folder
            folders.append(folder)
        assert not folder.exists()
    assert folders[0] != folders[1]


def test_a_folder_that_this_rank_does_not_see_is_none(nobody_says: None, tmp_path: Path) -> None:
    with job(dist.HashStore()):
        key = f"refimpl/folder/1/{here.host()}"
        _get_default_store().add(f"{key}/asked", 1)
        _get_default_store().set(key, str(tmp_path / "in another mount"))
        assert here.of_job() is None


def test_a_launcher_may_say_that_there_is_none(nobody_says: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(here.VARIABLE, "")
    with job(dist.HashStore()):
        assert here.of_job() is None
