"""`comms_logger` and `deepspeed.comm.log_summary` on ranks: an engine's calls and the script's own in one table."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

import refimpl
import refimpl.deepspeed as deepspeed
from refimpl.comm.group import Group
from refimpl.deepspeed import comm as dist
from refimpl.deepspeed.utils.comms_logging import CommsLogger, calc_bw_log
from refimpl.engine.configuration import sections
from refimpl.measure.comms_log import CommsLog
from refimpl.measure.ledger import Ledger
from refimpl.zero.flat import ALIGN, ALIGN_PARAMETER, round_up

WIDTH = 24


class Net(nn.Module):
    """Two layers; the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).mean()


def engine(stage: int, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=Net(), config=config | keys)[0]


def steps(engine: Any, count: int = 2) -> Tensor:
    for step in range(count):
        torch.manual_seed(step + 10 * dist.get_rank())
        engine.backward(engine(torch.randn(2, WIDTH)))
        engine.step()
    return torch.cat([deepspeed.utils.safe_get_full_fp32_param(p).flatten() for p in engine.module.parameters()])


def logged(stage: int) -> tuple[dict[str, Any], bool]:
    """Of two steps after the start: what the log says; whether the weights are those without it."""
    dist.reset_log()
    bare = steps(engine(stage))
    assert not dist.has_comm_data()
    dist.configure(enabled=False)
    noisy = engine(stage, comms_logger={"enabled": True})
    assert dist.get_logged_comm_ops()  # the start: rank 0's weights to all
    dist.reset_log()
    noisy.axes.world.ledger.reset()
    same = bare.equal(steps(noisy))
    calls = noisy.axes.world.ledger.calls()
    found = dist.log_summary(return_dict=True)
    dist.configure(enabled=False)
    assert found is not None
    counts = {name: sum(row["count"] for row in rows.values()) for name, rows in found["summary"].items()}
    counts.pop("log_summary_barrier")
    names = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    last = {names.get(op, op): calls[op] for op in calls}  # the ledger begins anew at the last step's forward
    assert all(counts[name] >= last[name] for name in last)
    assert set(counts) >= set(last)
    return found["summary"], same


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 3), (2, 2), (3, 4)])
def test_an_engines_collectives_are_logged_and_change_nothing(stage: int, ranks: int) -> None:
    for summary, same in worlds.run(logged, stage, ranks=ranks):
        assert same
        assert ("reduce_scatter_tensor" in summary) == (stage > 0)
        rows = summary["reduce_scatter_tensor" if stage else "all_reduce"]
        padded = round_up(sum(round_up(p.numel(), ALIGN_PARAMETER) for p in Net().parameters()), ALIGN * ranks)
        if stage < 3:
            assert rows[4 * padded]["count"] == 2


def own_calls(ranks: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    log = dist.comms_logger
    dist.reset_log()
    dist.all_reduce(torch.ones(3))
    assert not dist.has_comm_data()
    dist.configure(enabled=True, prof_all=False, prof_ops=["mine", "all_gather"])
    dist.all_reduce(torch.ones(3))
    assert not dist.has_comm_data()
    dist.all_reduce(torch.ones(3), log_name="mine")
    dist.all_reduce(torch.ones(5), prof=True)
    dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(2))
    assert {name: list(sizes) for name, sizes in log.comms_dict.items()} == {
        "mine": [12],
        "all_reduce": [20],
        "all_gather": [8],
    }
    dist.reset_log()
    dist.configure(prof_all=True, debug=True)
    x = torch.ones(size, dtype=torch.bfloat16)
    assert dist.all_reduce(x, async_op=True).is_completed()
    assert x.eq(size).all()
    dist.configure(debug=False)
    out = torch.zeros(1)
    dist.reduce_scatter_tensor(output_tensor=out, tensor=torch.ones(size))  # DeepSpeed's names
    dist.all_gather_into_tensor(torch.zeros(size), tensor=torch.ones(1))
    dist.all_to_all_single(torch.zeros(size), torch.ones(size))
    lists = worlds.TORCH >= (2, 12)  # 2.11's gloo exchanges none
    if lists:
        dist.all_to_all([torch.zeros(1) for _ in range(size)], list(torch.ones(size).split(1)))
    dist.reduce_scatter(out, list(torch.ones(size).split(1)))
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    dist.inference_all_reduce(torch.ones(7))
    dist.monitored_barrier()
    dist.all_gather_object([None] * size, rank)  # no size: not logged
    if rank < 2:
        handle = dist.isend(torch.ones(9), 1) if rank == 0 else dist.irecv(torch.zeros(9), 0)
        assert not {"isend", "irecv"} & set(dist.get_logged_comm_ops())
        handle.wait()
        handle.wait()
    bytes_of = {name: list(sizes) for name, sizes in log.comms_dict.items()}
    assert bytes_of == {
        "all_reduce | [Caller Func: own_calls]": [2 * size],
        "reduce_scatter_tensor": [4 * size],
        "all_gather_into_tensor": [4],
        "all_to_all_single": [4 * size],
        **({"all_to_all": [4 * size]} if lists else {}),
        "reduce_scatter": [4 * size],
        "all_reduce": [20, 28],
        "monitored_barrier": [0],
        **({"isend" if rank == 0 else "irecv": [36]} if rank < 2 else {}),
    }
    count, (latency,), (alg,), (bus,) = log.comms_dict["all_to_all_single"][4 * size]
    assert (count, (alg, bus)) == (1, calc_bw_log("all_to_all_single", 4 * size, latency))
    found = dist.log_summary(show_straggler=True, return_dict=True)
    assert found is not None
    for name, rows in found["straggler_analysis"].items():
        for row in rows.values():
            assert row["total_straggler_ms"] >= 0, name
    assert found["metadata"]["world_size"] == size
    log.__init__()  # type: ignore[misc]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_scripts_own_calls(ranks: int) -> None:
    worlds.run(own_calls, ranks, ranks=ranks)


def by_refimpl() -> list[str]:
    """Without DeepSpeed's name the log is the ledger's."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    ours = {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["parameters"], "debug": True}}
    made = refimpl.initialize(model=Net(), config=config | ours)[0]
    steps(made, 1)
    log = made.axes.world.ledger.log
    assert log is not None
    return log.get_operation_names()


def test_a_tag_of_the_ledger_is_a_name() -> None:
    for names in worlds.run(by_refimpl, ranks=2):
        assert names == ["all_gather_into_tensor | [Caller Func: gather]"]


def messages() -> list[str]:
    group = Group.world(Ledger())
    log = group.ledger.log = CommsLog(enabled=True)
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    out = torch.zeros(5)
    group.send_recv(torch.full((3,), 1.0), to, out[:3], source, async_op=True).wait()
    first = group.send(torch.ones(2), to, async_op=True)  # both ranks send first: neither may wait
    group.recv(out[:2], source)
    first.wait()
    assert {name: {size: r[0] for size, r in sizes.items()} for name, sizes in log.comms_dict.items()} == {
        "send": {12: 1, 8: 1},
        "recv": {12: 1, 8: 1},
    }
    alone = Group(None, group.ledger)
    alone.all_reduce(torch.ones(3))
    return log.get_operation_names()


def test_messages_are_logged_when_they_are_waited_for() -> None:
    assert worlds.run(messages, ranks=2) == [["send", "recv"]] * 2


def test_a_configuration_says_what_is_logged() -> None:
    section = sections.CommsLogger(enabled=True, prof_all=False, prof_ops=["send"], verbose=True)
    log = CommsLogger()
    log.configure(section)
    assert (log.enabled, log.prof_all, log.prof_ops, log.verbose, log.debug) == (True, False, ["send"], True, False)
    log.configure(type("Config", (), {"comms_logger": sections.CommsLogger()}))
    assert not log.enabled
    assert log.prof_ops == ["send"]
