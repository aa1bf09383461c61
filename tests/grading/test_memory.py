"""What stays alive is counted wherever it hides, and a changed input is named."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refimpl.comm.group import Group
from refimpl.grading.compare import Wrong
from refimpl.grading.memory import Kept, alive, in_place, let_go, own_memory, storage_bytes, untouched

SIZE = 1000  # elements: 4,000 bytes, more than Kept overlooks


@pytest.fixture(autouse=True)
def frozen() -> None:
    """As in a rank: what was there before is not looked through each time, neither in the tests that follow."""
    gc.collect()
    gc.freeze()


class Holder:
    pass


def in_a_closure() -> object:
    copy = torch.ones(SIZE)
    return lambda: copy


def in_a_cycle() -> object:
    holder = Holder()
    holder.itself, holder.copies = holder, {"a": [torch.ones(SIZE)]}  # type: ignore[attr-defined]
    return holder


def in_a_hook() -> object:
    layer, copy = nn.Linear(1, 1), torch.ones(SIZE)
    layer.register_forward_hook(lambda *_: copy)
    return layer


def in_grad() -> object:
    q = nn.Parameter(torch.zeros(SIZE))
    q.sum().backward()
    q.data = torch.zeros(0)  # the gradient is all that is left
    return q


def as_a_view() -> object:
    return torch.ones(SIZE)[:1]


@pytest.mark.parametrize("hide", [in_a_closure, in_a_cycle, in_a_hook, as_a_view, in_grad])
def test_what_is_kept_is_found(hide: object) -> None:
    kept = Kept(Group(None))
    hidden = hide()  # type: ignore[operator]
    with pytest.raises(Wrong, match=r"the answer keeps 4,0\d\d bytes alive, expected 0: free it"):
        kept.judge(0, "the answer", "free it")
    kept.judge(4 * SIZE, "the answer", "free it")
    del hidden
    kept.judge(0, "the answer", "free it")


def test_a_freed_storage_and_a_dead_tensor_count_nothing() -> None:
    before = alive()
    t = torch.ones(SIZE)
    assert alive() - before == 4 * SIZE
    assert alive([t]) - before == 0
    t.untyped_storage().resize_(0)
    assert alive() == before
    gone = weakref.ref(t)
    del t
    assert gone() is None


def test_one_storage_counts_once() -> None:
    t = torch.ones(SIZE)
    assert storage_bytes([t, t[:3], t.view(10, -1)]) == 4 * SIZE


def test_a_view_is_named_and_memory_of_its_own_is_not() -> None:
    own_memory(torch.ones(3), "the shard")
    with pytest.raises(Wrong, match="the shard is a view: it keeps 24 bytes alive, and its own elements are 12"):
        own_memory(torch.ones(6)[:3], "the shard")


def changed(x: Tensor, xs: list[Tensor], names: set[str], sizes: dict[str, int]) -> dict[str, object]:
    return {"x": lambda: x.add_(1), "xs[1]": lambda: xs[1].zero_(), "list `xs`": xs.reverse,
            "set `names`": lambda: names.add("c"), "dict `sizes`": lambda: sizes.pop("a")}  # fmt: skip


@pytest.mark.parametrize("what", ["x", "xs[1]", "list `xs`", "set `names`", "dict `sizes`"])
def test_a_changed_input_is_named(what: str) -> None:
    x, xs, names, sizes = torch.ones(2), [torch.ones(1), torch.ones(2)], {"a", "b"}, {"a": 1}
    with untouched(x=x, xs=xs, names=names, sizes=sizes):
        pass
    with pytest.raises(Wrong) as wrong, untouched(x=x, xs=xs, names=names, sizes=sizes):
        changed(x, xs, names, sizes)[what]()  # type: ignore[operator]
    assert what in wrong.value.headline


def test_another_shape_and_a_tensor_in_a_dict_are_changes() -> None:
    x, held = torch.ones(1), {"w": torch.ones(1)}
    with pytest.raises(Wrong, match="x was changed"), untouched(x=x):
        x.data = torch.ones(3)
    with pytest.raises(Wrong, match=r"held\['w'\] was changed"), untouched(held=held):
        held["w"].zero_()


def test_nan_is_no_change() -> None:
    with untouched(x=torch.tensor([float("nan"), 1.0])):
        pass


def test_new_memory_is_told_from_new_values() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    with in_place(x=one, both=[one, other]):
        one.add_(1)
    with pytest.raises(Wrong, match=r"both\[1\] lies in other memory"), in_place(x=one, both=[one, other]):
        other.data = one + 1


class Doubled(torch.autograd.Function):
    """Saves its result, if told to, which backward does not need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
        out = 2 * x
        ctx.save_for_backward(*[out] * saves)
        return out.view(out.shape)  # of a view its base counts too

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 2 * grad, None


def test_a_result_that_is_saved_for_backward_is_found() -> None:
    x = torch.ones(SIZE, requires_grad=True)
    torch.autograd.backward(let_go([Doubled.apply(x, False)], "the result"), torch.ones(SIZE))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((SIZE,), 2.0))
    with pytest.raises(Wrong, match="the result stays alive for backward"):
        let_go([Doubled.apply(x, True)], "the result")
