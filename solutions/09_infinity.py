"""Chapter 09, infinity: what a job must survive. Tasks about checkpoints: how often, by what
steps, read by whom.

No collectives here: a checkpoint is what is left when no rank is. What the operating system
offers:

    os.fsync(descriptor)        returns when a file's content, or a folder's names, are on disk
    os.open(path, os.O_RDONLY)  gives such a descriptor, of a folder too; os.close ends it
    os.rename, os.replace       another name for a file or a folder, at one moment: never half

Files that torch.save wrote are read with an unpickler of one's own like this:

    from types import SimpleNamespace
    door = SimpleNamespace(
        Unpickler=TensorsOnly, UnpicklingError=pickle.UnpicklingError, __name__="door"
    )
    torch.load(path, weights_only=False, pickle_module=door)
"""

import json
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch


def checkpoint_steps(step: float, write: float, between_failures: float, nodes: int) -> int:
    """How many steps to make between two checkpoints, so that the least time is lost.

    step: seconds of a step. write: seconds for which a save stops training. between_failures:
    seconds until one node fails, on average; a job on `nodes` of them ends with the first that
    does.

    With t seconds between checkpoints the share of time that is lost is
    write / t + t / (2 MTBF): the saves, and half an interval of work a failure. MTBF: seconds
    between two failures of the job. A checkpoint falls between two steps: the result is a whole
    number, at least 1, the smaller one of two that are equally good. It can be many millions:
    do not try them all.
    Example: checkpoint_steps(10, 60, 32 * 3000, 32) -> 60.
    """
    best = (2 * write * between_failures / nodes) ** 0.5 / step
    low = max(1, int(best))

    def lost(steps: int) -> float:
        return write / (steps * step) + steps * step * nodes / (2 * between_failures)

    return min((low, low + 1), key=lost)


class TensorsOnly(pickle.Unpickler):
    """An unpickler for files of tensors and plain containers, which runs nothing else that a
    file asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        """What a file means by module.name; pickle.UnpicklingError, with that name in it, for
        all that is not allowed.

        Allowed are four: collections.OrderedDict, torch.Size, and what tensors and parameters
        are rebuilt by: torch._utils._rebuild_tensor_v2 and torch._utils._rebuild_parameter.
        (Dictionaries, lists, tuples, numbers and strings ask for no name.) A name may have
        dots. No module is imported for what is refused: to import is to run.
        """
        allowed = {
            "collections.OrderedDict": OrderedDict,
            "torch.Size": torch.Size,
            "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
            "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
        }
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(
                f"the file asks for {module}.{name}, which is not allowed"
            )
        return allowed[f"{module}.{name}"]


class ResumableSampler:
    """The samples of one rank of `ranks`: another order every epoch, and each sample is taken
    by exactly one rank.

    sampler = ResumableSampler(10, ranks=4, rank=1)
    for index in sampler: ...                 # what is left of the epoch; then the next epoch
    state = sampler.state_dict()              # the same on all ranks that have drawn as many
    """

    def __init__(self, size: int, ranks: int, rank: int, seed: int = 0) -> None:  # given
        self.size, self.ranks, self.rank, self.seed = size, ranks, rank, seed
        self.epoch = 0
        self.taken = 0  # samples of this epoch's order that all ranks together have taken

    def __iter__(self) -> Iterator[int]:
        """This rank's share of what is left of the epoch: of every `ranks` samples in a row the
        one at its own place.

        The order of an epoch is torch.randperm(size) of a generator with seed `seed + epoch`;
        torch's own generator is left alone. Nothing is padded or dropped: where the last row is
        short, ranks at its end get nothing of it. An iterator that is left in the middle is
        followed by one that goes on behind it.
        """
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for index in order[self.taken + self.rank :: self.ranks]:
            self.taken = min(self.taken + self.ranks, self.size)
            yield index
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position, as numbers that JSON can hold."""
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind a `state_dict()` that any number of ranks has saved; behind a whole
        epoch with the next one.
        """
        self.epoch, self.taken = state["epoch"], state["taken"]
        if self.taken == self.size:
            self.epoch, self.taken = self.epoch + 1, 0


def reads(
    saved: dict[str, int], writers: int, here: dict[str, int], ranks: int, rank: int
) -> list[tuple[int, int, int, int]]:
    """What rank `rank` of `ranks` must read of a checkpoint that `writers` ranks have saved:
    (file, begin, end, at).

    Both runs lay their parameters (name -> elements) one behind the other in a flat buffer, in
    the order of the dict, pad it at the end to a multiple of the number of ranks, and cut it
    into equal shards. File r is the r-th shard of `saved`. `here` has the same parameters,
    perhaps in another order; rank r needs the r-th shard of it.

    Elements [begin, end) of `file` belong at element `at` of the shard and behind it. Ordered
    by `at`. Each element of a parameter in the shard is read once, padding never, no read is
    empty, and each parameter takes at most one of each file, however large it is.
    Examples, with saved = {"a": 5, "b": 2}, here = {"b": 2, "a": 5}, writers = 2, ranks = 3:
    rank 1 has elements 1 to 3 of "a", [(0, 1, 4, 0)]; rank 2 has the last of "a" and padding,
    [(1, 0, 1, 0)].
    """
    old, size = -(-sum(saved.values()) // writers), -(-sum(here.values()) // ranks)
    begins, total = {}, 0
    for name, numel in saved.items():
        begins[name], total = total, total + numel
    found, begin = [], 0
    for name, numel in here.items():
        low, high = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
        while low < high:
            there = begins[name] + low - begin
            file, first = there // old, there % old
            count = min(high - low, old - first)
            found.append((file, first, first + count, low - rank * size))
            low += count
        begin += numel
    return found


def save(root: Path, tag: str, files: dict[str, bytes]) -> None:
    """Write a checkpoint: the files into the folder root/tag, a manifest beside them, and the
    tag into root/latest.

    root/tag/manifest.json is {NAME: {"bytes": size, "sha256": hex digest}} of every file.
    `root` is there already, and names in it that begin with a dot are yours while you write.
    FileExistsError if root/tag is there already.

    The process can be killed between any two calls, and the power can fail: what was not
    flushed by os.fsync is lost then, in whatever order. Whenever that happens, root/latest must
    name a whole checkpoint, the one before or this one, and what is called root/tag must be
    whole. When `save` returns, all is on the disk. A save that was killed leaves something
    behind: the next save of that tag works, and clears it.
    """
    if (root / tag).exists():
        raise FileExistsError(f"{root / tag} is there already")
    new = root / f".{tag}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    about = {
        name: {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        for name, data in files.items()
    }
    for name, data in {**files, "manifest.json": json.dumps(about).encode()}.items():
        _write(new / name, data)
    _flush(new)
    os.rename(new, root / tag)
    _flush(root)
    _write(root / ".latest.new", tag.encode())
    os.replace(root / ".latest.new", root / "latest")
    _flush(root)


def _write(path: Path, data: bytes) -> None:
    """A file whose content is on the disk."""
    path.write_bytes(data)
    _flush(path)


def _flush(path: Path) -> None:
    """A file's content, or a folder's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


HINTS = {
    "checkpoint_steps": [
        "If one of 100 nodes fails each day, how long does a job on all 100 live?",
        "Where write / t falls as fast as t / (2 MTBF) rises, the sum is least: set the derivative to zero.",
        "That t is no whole number of steps. The best one is just below or just above: compare what both lose.",
    ],
    "TensorsOnly": [
        "A dictionary from the full name to the thing itself, and nothing else is ever looked up.",
        "super().find_class(module, name) imports the module, and follows dots: 'torch' has an attribute 'os'.",
    ],
    "ResumableSampler": [
        "order[taken + rank :: ranks] is this rank's share. Advance `taken` by `ranks` before each yield, up to size.",
        "When the loop over the share is over, the next epoch begins: epoch + 1, taken 0.",
        "A position that has reached `size` was saved behind the last sample: load it as the beginning of the next.",
    ],
    "reads": [
        "Sizes of shards: ceil(sum / writers) and ceil(sum / ranks). Where does each parameter begin, there and here?",
        "For each parameter of `here`: its elements [low, high) that lie in [rank * size, (rank + 1) * size).",
        "They may lie in several files: while low < high, read up to the end of the file that has element low.",
    ],
    "save": [
        "All under another name first. Which call makes a folder whole and visible at one moment?",
        "Before a name is given, what it names must be on the disk: fsync each file, then the folder that lists them.",
        "Then the name, fsync of root, and `latest` the same way: another name, fsync, os.replace, fsync of root.",
        "What was killed has left the other name behind: shutil.rmtree it first. f.flush() comes before os.fsync(f).",
    ],
}
