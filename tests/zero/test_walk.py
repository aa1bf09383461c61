"""The way of one gradient, and of one parameter: which of our functions hold its data, and in how many files.

A function counts if, when it returns, one of its arguments or variables is a tensor as long as a shard. Who only
watches (the ledger, the board) or schedules (hooks, passes) holds none. The walk ends where a transport takes the data
(`TRANSPORTS`) and goes on where it gives it back. `-s` prints it.
"""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES
from worlds import NEAR

from refimpl import launch
from refimpl.comm.group import Group

WIDTH = 64
TRANSPORTS = ("collectives.py", "composed.py", "mapped.py", "shared.py", "work.py")
AT_MOST = {"ddp": (24, 10), "zero1": (26, 10), "zero2": (25, 10), "zero3": (31, 13)}  # functions, files


def holds(value: Any) -> bool:
    """Whether a tensor as long as a shard of the weight is there."""
    if isinstance(value, Tensor):
        return value.numel() >= WIDTH * WIDTH // 2
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(map(holds, value))


def walk(stage_name: str) -> list[str]:
    """Runs on every rank: "folder/file.py Class.function" in the order in which they return, in the third step."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    STAGES[stage_name](model, optimizer, Group.world())
    seen: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = "/refimpl/" in code.co_filename and not code.co_name.startswith("<")
        ours = ours and not code.co_filename.endswith(TRANSPORTS)
        if event == "return" and ours and any(map(holds, frame.f_locals.values())):
            seen[f"{code.co_filename.split('/refimpl/')[1]} {code.co_qualname}"] = None

    for _ in range(3):
        seen.clear()
        loss = None if stage_name == "zero3" else model(torch.ones(2, WIDTH)).sum()
        sys.setprofile(look)
        (model(torch.ones(2, WIDTH)).sum() if loss is None else loss).backward()
        optimizer.step()
        sys.setprofile(None)
    return list(seen)


@pytest.mark.skipif(NEAR != "shared", reason="gloo's way is longer: a thread makes the second half")
@pytest.mark.parametrize("stage", list(STAGES))
def test_the_walk_is_short(stage: str) -> None:
    functions = launch.run(walk, stage, ranks=2)[0]
    files = {line.split()[0] for line in functions}
    print(f"\n{stage}: {len(functions)} functions in {len(files)} files", *functions, sep="\n  ")
    assert any("reduce" in line for line in functions)  # it does look
    most_functions, most_files = AT_MOST[stage]
    assert len(functions) <= most_functions
    assert len(files) <= most_files
