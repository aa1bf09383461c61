"""Saving: each rank writes what it owns, once and in parallel; rank 0 then gives the folder its name.

    save_dir/latest                           the tag of the last complete checkpoint, written when all ranks are done
    save_dir/zero_to_{fp32,torch}.py          make files of whole weights of one of them, as DeepSpeed's
    save_dir/<tag>/checkpoint.json            what was saved and where it lies; size and checksum of every file
    save_dir/<tag>/rank00000.safetensors      one a rank: its elements of weights, masters and optimizer state
    save_dir/<tag>/rank00000.json             schedule, loss scale, random state, position in the data, client_state

A save writes a folder beside <tag> and renames it when every rank's files are on the disk (checkpoint/atomic.py), so a
checkpoint that is replaced stays whole until its successor is; the disk must have room for both. No rank ever holds
more than it trains with, nothing is sent, and nothing that is read later is unpickled. `refimpl checkpoint export`
makes files of whole weights of it.

Asynchronous (`checkpoint.writer.decoupled`, as in DeepSpeed): the ranks copy what they own to host memory, 12 Psi / N
bytes, and go on training; a thread on each writes. Threads may hold no collective, so rank 0's waits for the others'
files in the folder that all see. What fails there is raised on every rank by the next `step` that updates,
`save_checkpoint` or `load_checkpoint`: until all have written, a step tells a word more (`hear`), and later none.
Whoever wants to read what was saved calls `engine.wait_for_checkpoint()` on every rank. A program waits for its own
rank's thread when it ends; a rank of `launch.run` is ended with its function, and must wait before.
DeepSpeed: `save_checkpoint` in deepspeed/runtime/engine.py, which writes into the folder itself, without checksums.
"""

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from refimpl.checkpoint import atomic
from refimpl.checkpoint.background import Background
from refimpl.checkpoint.errors import CheckpointError, naming, together
from refimpl.checkpoint.find import checked_tag
from refimpl.checkpoint.folder import notes_file
from refimpl.checkpoint.tensors import Later, brought
from refimpl.checkpoint.write import begin, finish, write_rank
from refimpl.comm.group import Group
from refimpl.engine.saving.contents import about_engine, contents
from refimpl.engine.state import TrainingState
from refimpl.zero.agreement.alike import raised_alone
from refimpl.zero.loop.since import refuse_added
from refimpl.zero.optimizer.own_states import own_states

FAILED = ".failed"
CANNOT = "could not write its part"
LAST_WAIT = 60.0  # seconds for the other ranks' files when this rank's program has ended


class Heard(CheckpointError):
    """What failed on another rank, which says it itself."""


def save(
    engine: TrainingState,
    save_dir: str | Path,
    tag: str | float | None,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
    asynchronous: bool = False,
) -> bool:
    """Write a checkpoint of every rank under `save_dir/tag`, by default `global_step<n>`. Collective; returns True.

    CheckpointError on every rank if one cannot write its part: what was there before is there still.
    """
    if not save_dir:
        raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder")
    group = engine.axes.world
    wait(engine)
    id_ = agreed_id(engine)
    save_dir = Path(agreed(group, "folders", str(Path(save_dir).absolute())))
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    tag = agreed(group, "checkpoint tags", tag, engine._config.checkpoint.tag_validation)
    tag = checked_tag(tag, "save_checkpoint")
    engine.stage.catch_up()
    together(group, lambda: refuse_unfit(engine))
    folder, new = save_dir / tag, atomic.unfinished(save_dir / tag, id_)
    own = {} if engine.optimizer is None else own_states(engine.stage)
    mine, notes = together(group, lambda: contents(engine, client_state, exclude_frozen, own))
    notes = {"save": {"id": id_, "rank": group.rank}} | notes
    about = {"id": id_} | about_engine(engine, exclude_frozen)
    held = ExitStack()
    try:
        together(group, lambda: begin(folder, new, held) if group.rank == 0 else None)
        if asynchronous:
            copies = together(group, lambda: copied(mine, folder))
        else:
            together(group, lambda: write_rank(new, mine, notes))
            together(group, lambda: finish(folder, new, about, save_latest) if group.rank == 0 else None)
    except Exception:
        if group.rank == 0:
            atomic.discard(new)
        held.close()
        raise
    if not asynchronous:
        held.close()
        return True
    hopeless = engine.saving.hopeless.is_set
    do = partial(write_behind, folder, new, copies, notes, about, save_latest, held, hopeless)
    engine.saving.start(do, f"save {tag}")
    return True


def agreed_id(engine: TrainingState) -> str:
    """Rank 0's. CheckpointError on every rank if an update raised on some ranks alone. A collective."""
    group = engine.axes.world
    said = dict(zip(group.ranks, group.all_gather_object((atomic.new_id(), engine.stage.update.raised)), strict=True))
    if raised := raised_alone({rank: raised for rank, (_, raised) in said.items()}):
        raise CheckpointError(f"save_checkpoint: {raised}")
    return str(said[group.ranks[0]][0])


def refuse_unfit(engine: TrainingState) -> None:
    """What a checkpoint cannot keep, before anything of it is written."""
    engine.stage.refuse_unfit()
    refuse_added(engine.module, engine.stage.names)


def hear(engine: TrainingState) -> None:
    """At a step: CheckpointError on every rank if an asynchronous save has failed on one.

    A collective from the save until every rank's thread has ended, then nothing.
    """
    saving = engine.saving
    if saving.unheard:
        standing = engine.axes.world.all_gather_object("failed" if saving.failed else "busy" if saving.busy else "done")
        if "failed" in standing or "busy" not in standing:
            wait(engine)


def wait(engine: TrainingState) -> None:
    """Return when no asynchronous save is under way. Collective; CheckpointError on every rank if it failed on one.

    Rank 0's thread waits for the others' files; of a rank that cannot even write that it failed it hears here.
    """
    group, saving = engine.axes.world, engine.saving
    if group.rank > 0:
        saving.settle()
    if any(group.all_gather_object(group.rank > 0 and saving.failed)):
        saving.hopeless.set()
    saving.unheard = False
    together(group, partial(own, saving))


def own(saving: Background) -> None:
    """Wait, and raise what failed on this rank itself."""
    with suppress(Heard):
        saving.wait()


def copied(mine: Mapping[str, Tensor | Later], folder: Path) -> dict[str, Tensor]:
    """What a save into `folder` will write, as it is now. CheckpointError if a disk has lost some of it."""
    with naming(folder):
        return {name: brought(tensor).to("cpu", copy=True) for name, tensor in mine.items()}


def write_behind(
    folder: Path,
    new: Path,
    mine: dict[str, Tensor],
    notes: dict[str, Any],
    about: dict[str, Any],
    save_latest: bool,
    held: ExitStack,
    hopeless: Callable[[], bool],
) -> None:
    """In a thread of each rank: write its files; rank 0's waits for the others' and finishes."""
    rank = notes["save"]["rank"]
    with held:
        try:
            write_rank(new, mine, notes)
            mine.clear()
            if rank == 0:
                wait_for_ranks(new, about["world_size"], hopeless)
                finish(folder, new, about, save_latest)
        except BaseException as error:
            if rank == 0:
                atomic.discard(new)
                raise
            try:
                (new / f"{rank}{FAILED}").write_text(str(error))
            except FileNotFoundError:
                raise CheckpointError(f"{new}: rank 0 has given the save up; what failed is rank 0's error") from error
            except OSError:  # its disk takes no word more: see `wait`
                raise error from None
            raise


def wait_for_ranks(new: Path, ranks: int, hopeless: Callable[[], bool]) -> None:
    """Return when every rank's notes are there; Heard when a rank says that it failed, CheckpointError if one died."""
    patience: float | None = None
    while not all((new / notes_file(rank)).is_file() for rank in range(ranks)):
        for failure in new.glob(f"*{FAILED}"):
            raise Heard(f"rank {failure.stem}: {failure.read_text() or CANNOT}")
        if hopeless():
            raise Heard(f"{new}: another rank {CANNOT}")
        if not threading.main_thread().is_alive():
            patience = patience or time.monotonic() + LAST_WAIT
            if time.monotonic() > patience:
                missing = [str(rank) for rank in range(ranks) if not (new / notes_file(rank)).is_file()]
                raise CheckpointError(f"{new}: rank {', '.join(missing)} has not written its part; it may have died")
        time.sleep(0.005)


def agreed(group: Group, what: str, mine: str, check: str = "WARN") -> str:
    """Rank 0's. When another rank names another one, as names that hold the time of day may do: nothing ("IGNORE"), a
    warning or an error ("FAIL")."""
    said = group.all_gather_object(mine)
    if check != "IGNORE" and len(set(said)) > 1:
        by_rank = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(said))
        different = f"save_checkpoint: the ranks name different {what}: {by_rank}"
        if check == "FAIL":
            raise CheckpointError(f"{different}; name one on all ranks")
        if group.rank == 0:
            warnings.warn(f"{different}; rank 0's is taken", stacklevel=4)
    return str(said[0])
