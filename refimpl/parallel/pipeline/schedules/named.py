"""Every schedule by its name."""

from refimpl.parallel.pipeline.schedules.dualpipe import dualpipe
from refimpl.parallel.pipeline.schedules.dualpipe_v import dualpipe_v
from refimpl.parallel.pipeline.schedules.gpipe import gpipe
from refimpl.parallel.pipeline.schedules.interleaved import interleaved
from refimpl.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from refimpl.parallel.pipeline.schedules.table import Table
from refimpl.parallel.pipeline.schedules.zero_bubble import zero_bubble
from refimpl.parallel.pipeline.schedules.zero_bubble_v import zero_bubble_v

ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zero_bubble}
TWO_CHUNKS = {"zb-v": zero_bubble_v, "dualpipe": dualpipe, "dualpipe-v": dualpipe_v}
NAMES = (*ONE_CHUNK, "interleaved", *TWO_CHUNKS)


def schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Table:
    """The table of that name. `chunks`: stages a rank, as many as the schedule has if it is None; 2 for "interleaved".

    ValueError for a name that is none of NAMES, and for chunks that the schedule cannot have.
    """
    if name == "interleaved":
        return interleaved(ranks, micro_batches, 2 if chunks is None else chunks)
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is none of {', '.join(NAMES)}")
    has = 1 if name in ONE_CHUNK else 2
    if chunks not in (None, has):
        raise ValueError(f"schedule {name!r} has {has} stage{'s' * (has > 1)} a rank, not {chunks}: try 'interleaved'")
    return {**ONE_CHUNK, **TWO_CHUNKS}[name](ranks, micro_batches)
