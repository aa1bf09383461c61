"""Grades chapter 06's unit: parameters whose memory comes and goes, and the shard that stays."""

import torch
from torch import Tensor, nn

from refimpl.grading.compare import Wrong, as_stored, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import Kept, storage_bytes
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, places, same_traffic


def odd_params(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 5), (4,), (1, 2, 3))
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    params[1].requires_grad_(False)  # frozen ones take as much memory
    return [*params, nn.Parameter(torch.randn(2, 5, generator=generator).to(dtype).t())]  # not contiguous


@on_ranks(2, 3, 4)
def test_ShardedParams(answer: Answer, group: WatchedGroup) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gather_and_free(answer, group, dtype)
    case("module.parameters(), an iterator: 15 + 5 elements")
    layer = nn.Linear(3, 5)
    try:
        unit = answer.ShardedParams(layer.parameters(), group.fresh())
    except (TypeError, IndexError, ValueError, StopIteration) as error:
        raise Wrong(
            "an iterator can be walked once, and has no length: begin with list(params)", f"  {error}"
        ) from error
    padded, enough = unit.full.numel(), -(-20 // group.size) * group.size
    require(padded >= 20, "an iterator can be walked once: begin with list(params)")
    more = f"self.full has {padded} elements, and {enough} are enough: no padding where N divides their number"
    require(padded == enough, more, f"  20 parameters, {group.size} ranks")


def gather_and_free(answer: Answer, group: WatchedGroup, dtype: torch.dtype) -> None:
    case(f"{dtype}, ranks begin with different values; one parameter is not contiguous")
    watched, truth = group.fresh(), [p.detach().clone() for p in odd_params(0, dtype)]
    numel, itemsize = sum(t.numel() for t in truth), dtype.itemsize
    shard = -(-numel // group.size)
    end = torch.zeros(shard * group.size - numel, dtype=dtype)
    padded = torch.cat([*(t.reshape(-1) for t in truth), end])
    of_ranks = [torch.cat([*(p.detach().reshape(-1) for p in odd_params(r, dtype)), end]) for r in range(group.size)]
    stored = as_stored(truth, shard * group.size)
    kept = Kept(watched)
    params = odd_params(group.rank, dtype)
    unit = answer.ShardedParams(params, watched)
    left = storage_bytes(params)
    require(left == 0, f"{left} bytes of parameters are alive after ShardedParams(...): free them")
    trains = [i for i, p in enumerate(params) if p.requires_grad != (i != 1)]
    require(not trains, f"parameter {trains[:1]} has another requires_grad than before: what is frozen stays frozen")
    kept.judge(
        shard * itemsize, "ShardedParams(...)", "self.mine alone may stay; where are the original values, or a copy?"
    )
    known = {"it is cut from this rank's own values: take rank 0's": of_ranks[group.rank], **stored}
    known |= {f"it is cut from rank {r}'s values: take rank 0's": of_ranks[r] for r in range(1, group.size)}
    known = {sentence: whole.view(group.size, shard)[group.rank] for sentence, whole in known.items()}
    known |= {f"it is shard {r}, and rank r has the r-th": t for r, t in enumerate(padded.view(group.size, shard))}
    judge_shard(unit, padded.view(group.size, shard)[group.rank], known)
    buffer, filled = unit.full, places(watched, "all_gather", "out")
    for again in range(2):
        case(f"{dtype}, gather and free, number {again}")
        watched.ledger.reset()
        unit.gather()
        all_done(watched, "gather")
        nothing = "gather() after free() does nothing: does free() leave word that the parameters are whole?"
        require(watched.ledger.calls() or not again, nothing)
        straight = filled[-1:] == [unit.full.data_ptr()]
        require(straight, "gather() fills another buffer than self.full, as large, and copies: gather into self.full")
        for i, (p, t) in enumerate(zip(params, truth, strict=True)):
            known = {"it is still this rank's own: take rank 0's": odd_params(group.rank, dtype)[i].detach()}
            equal(p.detach(), t, f"parameter {i} after gather()", known=known if group.rank else None)
        unit.gather()
        oracle = group.oracle()
        oracle.all_gather(torch.zeros(shard * group.size, dtype=dtype), torch.zeros(shard, dtype=dtype))
        same_traffic(watched, oracle, "gather(), called twice,", itemsize=itemsize)
        whole = storage_bytes(params)
        size = len(padded) * itemsize
        require(whole == size, f"{whole} bytes are alive after gather(), the buffer has {size}: {itemsize} an element")
        kept.judge(size + shard * itemsize, "between gather() and free() the unit", "self.full and self.mine alone")
        unit.free()
        judge_free(unit, params, truth)
    case(f"{dtype}, the shard changes, as in a step")
    with torch.no_grad():
        unit.mine += 1
    unit.gather()
    stepped = torch.cat([p.detach().reshape(-1) for p in params])
    equal(
        stepped, padded[:numel] + 1, "the parameters", known={"they are what they were before the step": padded[:numel]}
    )
    case(f"{dtype}, the shard changes while the parameters are whole")
    with torch.no_grad():
        unit.mine += 1
    unit.free()
    unit.gather()
    stepped = torch.cat([p.detach().reshape(-1) for p in params])
    kept_old = {
        "free() has written the old parameters over the shard: it gives memory back, no more": padded[:numel] + 1
    }
    equal(stepped, padded[:numel] + 1 + 1, "the parameters", known=kept_old)
    case("autograd keeps a view of a parameter in forward; freed and gathered before backward")
    x = torch.ones(1, 5, requires_grad=True, dtype=dtype)
    y = x @ params[0].t()
    unit.free()
    unit.gather()
    same = "self.full is another tensor now: autograd has kept views of the first one, which stay without memory"
    require(unit.full is buffer, same)
    y.sum().backward()
    assert x.grad is not None
    loose = 1e-5 if dtype == torch.float32 else 0.02
    equal(x.grad, (truth[0] + 2).sum(0, keepdim=True), "the gradient", rtol=loose, atol=loose)
    del x, y, stepped, kept_old
    unit.free()
    kept.judge(shard * itemsize, "after gather() and free(), the unit", "self.mine alone may stay")


def judge_shard(unit: object, expected: Tensor, known: dict[str, Tensor]) -> None:
    mine = getattr(unit, "mine", None)
    require(isinstance(mine, Tensor), "self.mine is missing")
    assert isinstance(mine, Tensor)
    nbytes = mine.untyped_storage().nbytes()
    require(mine.dtype == expected.dtype, f"self.mine has dtype {mine.dtype}, expected {expected.dtype}")
    require(
        not mine.requires_grad, "self.mine requires a gradient: it is a plain tensor, which a step changes in place"
    )
    require(nbytes > 0, "self.mine has lost its memory: it is a view of the buffer that was freed; clone it")
    require(
        nbytes <= expected.numel() * expected.element_size(),
        f"self.mine keeps {nbytes} bytes alive, and a shard is {expected.numel() * expected.element_size()}: "
        "nothing is sharded, or it is a view, which keeps the whole storage",
    )
    equal(mine.detach(), expected, "self.mine", known=known)
    require(isinstance(getattr(unit, "full", None), Tensor), "self.full is missing")


def judge_free(unit: object, params: list[nn.Parameter], truth: list[Tensor]) -> None:
    left = storage_bytes(params)
    require(left == 0, f"{left} bytes are alive after free(): resize the storage to 0, a view keeps all of it")
    full = getattr(unit, "full", None)
    require(isinstance(full, Tensor), "self.full is missing")
    assert isinstance(full, Tensor)
    require(full.untyped_storage().nbytes() == 0, "self.full still has memory after free()")
    for i, (p, t) in enumerate(zip(params, truth, strict=True)):
        require(p.shape == t.shape, f"parameter {i} has shape {tuple(p.shape)} after free(), expected {tuple(t.shape)}")
