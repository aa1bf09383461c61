"""Samples a second: what is counted, by a stubbed time source, and what an engine counts."""

from types import SimpleNamespace

import pytest
import torch
from worlds import run

import refimpl
from refimpl.deepspeed.utils.timer import ThroughputTimer
from refimpl.measure import throughput


def test_the_warm_up_and_what_lies_between_steps_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    begins_of_the_warm_up, begins_and_ends = [0.0, 10.0], [20.0, 21.0, 30.0, 33.0, 40.0, 42.0]
    readings = iter(begins_of_the_warm_up + begins_and_ends)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    timer = ThroughputTimer(start_step=2)
    timer.stop(8)  # nothing has begun
    for samples in (8, 8, 0, 16, 8):  # the third only accumulates
        assert timer.avg_samples_per_sec() in (float("-inf"), 4.0)
        timer.start()
        timer.stop(samples)
    assert timer.avg_samples_per_sec() == 24 / (1 + 3 + 2)
    assert (timer.micro_step_count, timer.global_step_count) == (5, 4)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 0, 4)


def counted(patch: pytest.MonkeyPatch) -> tuple[int, int, float, float]:
    now = [0.0]
    patch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0), torch.nn.Linear(2, 1))
    model.register_forward_hook(lambda *_: now.append(now.pop() + 1.0))  # all that takes time
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    engine, *_ = refimpl.initialize(model=model, config=config)
    for _ in range(8):
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
    timer = engine.tput_timer
    found = timer.micro_step_count, timer.global_step_count, timer.avg_samples_per_sec()
    engine.eval()
    engine(torch.ones(2, 3))
    engine.step()  # without a forward in training: not a micro-step of the timer
    assert found[:2] == (timer.micro_step_count, timer.global_step_count)
    before = timer.total_elapsed_time
    engine.train_batch(iter([torch.ones(2, 3)] * 2))  # two micro-batches and one step
    return *found, timer.total_elapsed_time - before


def on_a_rank() -> tuple[int, int, float, float]:
    with pytest.MonkeyPatch.context() as patch:
        return counted(patch)


def test_an_engine_counts_micro_steps_and_updates() -> None:
    assert run(on_a_rank, ranks=2) == [(8, 4, 4.0, 2.0)] * 2
