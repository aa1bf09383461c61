"""`disable_python_gc`: garbage is looked for when asked, from the first engine that says so to the end of the last."""

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import refimpl
from refimpl.comm.group import Group
from refimpl.engine.engine import Engine
from refimpl.parallel.pipeline.module import PipelineModule

SETTINGS = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "disable_python_gc": True}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


def made() -> Any:
    return refimpl.initialize(model=nn.Linear(2, 2), config=SETTINGS)[0]


def test_it_is_off_from_the_first_engine_to_the_end_of_the_last() -> None:
    first, second = made(), made()
    first.destroy()
    first.destroy()
    assert not gc.isenabled()
    second.destroy()
    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    made().destroy()
    assert not gc.isenabled()


def test_an_engine_made_without_initialize_heeds_it() -> None:
    engine = Engine(model=nn.Linear(2, 2), config=SETTINGS)
    assert not gc.isenabled()
    engine.destroy()
    assert gc.isenabled()


def test_cycles_go_when_the_engine_is_told() -> None:
    engine = made()
    layer = nn.Linear(2, 2)
    layer.itself = [layer]  # type: ignore[assignment]
    gone = weakref.ref(layer)
    del layer
    assert gone() is not None
    assert engine.collect_python_gc() > 0
    assert gone() is None
    engine.destroy()


def test_an_engine_that_is_refused_leaves_it_on() -> None:
    pipeline = PipelineModule([nn.Linear(2, 2)], Group.world(), nn.functional.mse_loss)
    with pytest.raises(NotImplementedError):
        refimpl.initialize(model=pipeline, config={**SETTINGS, "zero_optimization": {"stage": 2}})
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_it_on() -> None:
    engine = made()
    if not (child := os.fork()):
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not gc.isenabled()
    engine.destroy()
