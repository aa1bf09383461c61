"""What one answer sets for its process does not judge the next, and ways round an exercise are named."""

import os
import sys
from pathlib import Path

import pytest
from answers import graded

from refimpl.grading.chapters import import_file

pytestmark = pytest.mark.xdist_group("grading")

LEFT = {
    "gradients off": "torch.set_grad_enabled(False)",
    "another default dtype": "torch.set_default_dtype(torch.float64)",
    "threads": "torch.set_num_threads(3)",
    "a seed": "torch.manual_seed(7)",
    "an environment variable": "import os\nos.environ['REFIMPL_TRANSPORT'] = 'shared'",
    "a function of torch": "torch.equal = torch.allclose = lambda *_, **__: False",
    "a method of all tensors": "torch.Tensor.tolist = lambda self: []\ntorch.Tensor.sum = None",
    "a method of the group": "type(group).all_reduce = lambda *_, **__: None",
    "a hook on every module": (
        "torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0)"
    ),
}
PROBE = """assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
assert torch.get_num_threads() == 1 and torch.rand(1).item() != SEED_7
assert torch.equal(torch.nn.Identity()(x), x) and torch.allclose(x, x) and x.sum().tolist() == 3
import os
assert 'REFIMPL_TRANSPORT' not in os.environ
y = x.clone()
group.all_reduce(y)
assert y.tolist() == [2, 4]
return x * 2"""


@pytest.mark.parametrize("what", LEFT)
def test_the_next_answer_finds_the_process_as_it_was(what: str, tmp_path: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(7)
    probe = PROBE.replace("SEED_7", repr(torch.rand(1, generator=generator).item()))
    graded(tmp_path, f"{LEFT[what]}\nreturn x * 2")  # its own verdict is its own affair
    after = graded(tmp_path, probe)
    assert after.outcome == "pass", after.text


def test_what_is_set_while_the_file_is_read_does_not_hold_for_the_grader(tmp_path: Path) -> None:
    head = "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)"
    body = "assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32\nreturn x * 2"
    assert graded(tmp_path, body, head).outcome == "pass"


def test_what_an_answer_has_left_switched_is_told_with_its_failure(tmp_path: Path) -> None:
    verdict = graded(tmp_path, "torch.set_grad_enabled(False)\nreturn x * 3")
    assert "Your code has left this changed for the whole process: torch.set_grad_enabled" in verdict.text


def test_an_answer_of_the_same_size_and_time_is_not_taken_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "answer.py"
    for sign in "+-":
        path.write_text(f"two = 1 {sign} 1")
        os.utime(path, (10**9, 10**9))
        assert import_file(path, "answer").two == 1 + int(f"{sign}1")


CHEATS = {
    "refimpl's own": ("from refimpl.comm import ring\nreturn ring.all_reduce(group, x)", "refimpl.comm.ring"),
    "refimpl's stage": ("import refimpl\nreturn refimpl.Zero2(x)", "refimpl.Zero2"),
    "the solution": ("from solutions import x as y\nreturn y", "the solution is imported"),
    "the solution's file": ("exec(open('solutions/01_collectives.py').read())\nreturn x * 2", "solutions are read"),
    "torch.distributed": ("import torch.distributed as dist\ndist.all_reduce(x)\nreturn x", "through `group`"),
    "torch.distributed, spelt out": ("torch.distributed.all_reduce(x)\nreturn x", "through `group`"),
    "the grader's connections": ("return sum(group.everyone(x))", "is for the grader"),
}


@pytest.mark.parametrize("what", CHEATS)
def test_a_way_round_the_exercise_is_named(what: str, tmp_path: Path) -> None:
    body, words = CHEATS[what]
    verdict = graded(tmp_path, body)
    assert verdict.outcome == "fail"
    assert verdict.headline.startswith("exercise.py line ")
    assert words in verdict.headline


def test_what_another_task_of_the_file_does_is_not_this_ones(tmp_path: Path) -> None:
    head = "import torch\nfrom refimpl.comm import ring\n\n\ndef other(group):\n    ring.f()"
    assert graded(tmp_path, "import torch.distributed as dist\ndist.get_rank()\nreturn x * 2", head).outcome == "pass"
    assert graded(tmp_path, "other(group)\nreturn x * 2", head).outcome == "fail"
