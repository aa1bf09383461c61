"""DualPipeV: DualPipe folded in the middle, onto ZB-V's places. One copy of the model, the pairs of DualPipe.

    dualpipe_v(2, 4)
    rank 0  F0a F1a F2a F0b I0b W0b F1b F3a B1b B1b F2b B0a B0a B2b B2b F3b ... B1a B1a B3b B3b I2a W2a I3a W3a
    rank 1  ... F0a F0b F1a F1b F2a B0b B0b F2b B0a B0a F3a B1b B1b F3b B1a B1a B2b B2b B2a B2a I3b I3a W3b W3a

Of DualPipe over 2p ranks the first p are left, and each does its mirror image's part of its own micro-batches: what
came from the other end now comes back from the turn. So rank r holds stages r and 2p-1-r, a micro-batch ends where it
began, and a forward on the one leg is still paired with a backward on the other.

Bubble (p-1)(f+i-w) when f = i = w and m >= 2p; for fewer micro-batches and other costs no formula. DeepSeek's,
(PP/2-1)(F&B + B - 3W) for PP = 2p stages, is that of pairs run as one operation, as of DualPipe. That is more than
ZB-V's, which is none: what is bought are the pairs, whose messages hide behind each other's computation.
With no backward split, `whole(dualpipe_v(..))`, which is how DeepSpeed runs it, it is 4(p-1)-1 forwards for p > 1: more
than the 3(p-1) of interleaved 1F1B, which has two stages a rank, too.
Memory: one copy of every parameter. Alive: 2p+1 half-sized chunks at most, on every rank; one more than in ZB-V.
Cut in half by Sea AI Lab (hackmd.io/@ufotalent/r1lVXsa9Jg); github.com/deepseek-ai/DualPipe, dualpipe/dualpipev.py.
torch's ScheduleDualPipeV; DeepSpeed: DualPipeVSchedule in deepspeed/runtime/pipe/schedule.py, since 0.19.8.
"""

from refimpl.parallel.pipeline.schedules.dualpipe import words
from refimpl.parallel.pipeline.schedules.table import Cost, Table, check, count_off, first


def dualpipe_v(ranks: int, micro_batches: int) -> Table:
    """Two stages a rank. With fewer than 2p micro-batches: the pattern of 2p, less what is too many."""
    check("dualpipe-v", ranks, micro_batches)
    last, drawn = 2 * ranks - 1, max(micro_batches, 2 * ranks)

    def bubble(cost: Cost) -> float | None:
        if micro_batches < 2 * ranks or not cost.forward == cost.input == cost.weight:
            return None
        return (ranks - 1) * (cost.forward + cost.input - cost.weight)

    down = tuple(range(ranks))
    return Table(
        "dualpipe-v",
        orders=tuple(first(count_off(words(r, ranks, drawn), (r, last - r)), micro_batches) for r in range(ranks)),
        paths=(down + down[::-1],),
        micro_batches=micro_batches,
        alive=(min(2 * ranks + 1, 2 * micro_batches),) * ranks,
        bubble=bubble,
    )
