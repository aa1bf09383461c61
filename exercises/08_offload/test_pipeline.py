"""Grades chapter 08's pipelines: what is under way while a part is used, in how much memory, and after an error."""

from collections.abc import Callable
from inspect import isgenerator

import torch
from torch import Tensor

from refimpl.grading.compare import Wrong, require
from refimpl.grading.drive import EMPTY, PAGE, LateDisk
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

Places = list[tuple[int, int]]
SIZES = [[1, 1, 1], [1, 3, 2, 1, 3, 1, 2], [2, 1], [1], []]  # pages of each place


class Scene:
    """A disk with something at each place; the places are in no order, and there are pages between them."""

    def __init__(self, pages: list[int], word: str = "place") -> None:
        self.disk, self.places, self.word = LateDisk(), Places(), word
        end = PAGE
        for n in pages:
            self.places.append((end, n * PAGE))
            end += (n + 1) * PAGE
        self.places.reverse()
        self.contents = [self.random(k, nbytes) for k, (_, nbytes) in enumerate(self.places)]
        for (offset, _), values in zip(self.places, self.contents, strict=True):
            self.disk.poke(offset, values)

    def random(self, k: int, nbytes: int) -> Tensor:
        return torch.randint(1, 200, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))

    def judge_memory(self, buffers: int) -> None:
        found, largest = sum(map(len, self.disk.buffers)), max((n for _, n in self.places), default=PAGE)
        room = buffers * largest
        require(
            found <= room,
            f"buffers of {found:,} bytes for {len(self.places)} {self.word}s, expected {buffers} of {largest:,}",
        )

    def judge_contents(self, k: int, memory: Tensor) -> None:
        """What the caller, or `update`, sees of place k."""
        what, expected = f"{self.word} {k}", self.contents[k]
        require(
            isinstance(memory, Tensor) and memory.shape == expected.shape,
            f"{what} has {expected.numel():,} bytes; handed out was {getattr(memory, 'shape', type(memory).__name__)}",
        )
        if torch.equal(memory, expected):
            start = memory.data_ptr()
            inside = any(b.data_ptr() <= start < b.data_ptr() + len(b) for b in self.disk.buffers)
            return require(inside, f"{what} is handed out as a copy: hand out the buffer itself")
        if any(t.memory.data_ptr() == memory.data_ptr() for t in self.disk.under_way if t.kind == "read"):
            offset = self.places[k][0]
            late = any(t.offset == offset for t in self.disk.under_way)
            require(not late, f"{what} is used before its read was waited for")
            raise Wrong(f"{what} is handed out, and the next {self.word} is being read into the same memory")
        if bool((memory == EMPTY).all()):
            raise Wrong(f"{what} holds nothing but {EMPTY:#x}: it was never read")
        raise Wrong(f"{what} is handed out with other bytes than the disk holds there")

    def judge_end(self, when: str) -> None:
        left = [f"the {t.kind} of {self.word} {self.number(t.offset)}" for t in self.disk.under_way]
        require(not left, f"{when} {' and '.join(left)} is still under way: wait for it, in `finally`")

    def is_under_way(self, kind: str, k: int) -> bool:
        return any(t.kind == kind and self.number(t.offset) == k for t in self.disk.under_way)

    def number(self, offset: int) -> int:
        return [at for at, _ in self.places].index(offset)

    def judge_count(self, kind: str) -> None:
        found = sorted((at, n) for what, at, n in self.disk.log if what == kind)
        require(
            found == sorted(self.places),
            f"there were {len(found)} {kind}s of {len(self.places)} {self.word}s: each once",
        )


@on_ranks(1)
def test_read_ahead(answer: Answer, group: WatchedGroup) -> None:
    for pages in SIZES:
        case(f"{len(pages)} places")
        scene = Scene(pages)
        read = answer.read_ahead(scene.disk, scene.places)
        require(isgenerator(read), f"the result is a {type(read).__name__}, expected a generator: write `yield`")
        seen = 0
        for memory in read:
            judge_ahead(scene, seen, memory)
            memory.fill_(7)  # the caller's until it asks for more
            seen += 1
        require(seen == len(pages), f"{seen} places were handed out, expected {len(pages)}")
        scene.judge_end("at the end")
        scene.judge_count("read")
        scene.judge_memory(2)
    case("the caller stops after the second of 5 places")
    scene = Scene([1] * 5)
    read = answer.read_ahead(scene.disk, scene.places)
    next(read), next(read)
    read.close()
    scene.judge_end("after the caller closed the generator")
    case("the disk fails at the third of 5 places")
    scene = Scene([1] * 5)
    scene.disk.broken = scene.places[2][0]
    failed(scene, lambda: list(answer.read_ahead(scene.disk, scene.places)))


def judge_ahead(scene: Scene, k: int, memory: Tensor) -> None:
    require(k < len(scene.places), f"more than {len(scene.places)} places are handed out")
    scene.judge_contents(k, memory)
    if k + 1 < len(scene.places):
        begun = ("read begins", scene.places[k + 1][0]) in scene.disk.events
        require(begun, f"while place {k} is used nothing is read: begin the read of {k + 1} before you hand {k} out")
        waited = not scene.is_under_way("read", k + 1)
        require(not waited, f"place {k + 1} was waited for before place {k} was handed out: only begin it")


def failed(scene: Scene, call: Callable[[], object]) -> None:
    """The disk's error must reach the caller, and leave nothing under way."""
    try:
        call()
    except OSError:
        return scene.judge_end("after the disk's error")
    raise Wrong("a transfer failed, and nobody was told: wait for each, and let its OSError pass")


@on_ranks(1)
def test_update_parts(answer: Answer, group: WatchedGroup) -> None:
    for pages in SIZES:
        case(f"{len(pages)} parts")
        scene, done = Scene(pages, "part"), list[int]()

        def update(k: int, memory: Tensor, scene: Scene = scene, done: list[int] = done) -> None:
            require(k == len(done), f"part {k} is updated as number {len(done)}: in order, each once")
            scene.judge_contents(k, memory)
            judge_overlap(scene, k)
            memory.add_(k + 1)
            done.append(k)

        answer.update_parts(scene.disk, scene.places, update)
        require(len(done) == len(pages), f"{len(done)} parts were updated, expected {len(pages)}")
        scene.judge_end("at the end")
        judge_disk(scene, len(pages))
        for kind in ("read", "write"):
            scene.judge_count(kind)
        scene.judge_memory(3)
    case("the update of part 3 of 7 raises an error")
    scene = Scene([1] * 7, "part")
    try:
        answer.update_parts(scene.disk, scene.places, lambda k, memory: breaks(k, memory, at=3))
        raise Wrong("update raised a ZeroDivisionError, which must reach the caller")
    except ZeroDivisionError:
        scene.judge_end("after update's error")
    judge_disk(scene, 3)
    case("the disk fails at part 4 of 7")
    scene = Scene([1] * 7, "part")
    scene.disk.broken = scene.places[4][0]
    failed(scene, lambda: answer.update_parts(scene.disk, scene.places, lambda k, memory: None))
    for part in (3, 5, 6):
        case(f"the disk fails at the write of part {part} of 7")
        scene = Scene([1] * 7, "part")
        scene.disk.broken, scene.disk.fails = scene.places[part][0], ("write",)
        failed(scene, lambda scene=scene: answer.update_parts(scene.disk, scene.places, lambda k, memory: None))  # type: ignore[misc]


def breaks(k: int, memory: Tensor, at: int) -> None:
    memory.add_(k + 1)
    if k == at:
        raise ZeroDivisionError("the update's own")


def judge_overlap(scene: Scene, k: int) -> None:
    """While k is updated: k + 1 is being read, k - 1 is being written."""
    events, places = scene.disk.events, scene.places
    if k + 1 < len(places):
        begun = ("read begins", places[k + 1][0]) in events
        require(begun, f"part {k} is updated, and the read of {k + 1} has not begun: the disk idles meanwhile")
        require(scene.is_under_way("read", k + 1), f"part {k + 1} was waited for before {k} is updated: only begin it")
    if k > 0:
        begun = ("write begins", places[k - 1][0]) in events
        require(begun, f"part {k} is updated, and the write of {k - 1} has not begun")
        still = scene.is_under_way("write", k - 1)
        require(still, f"the write of part {k - 1} was waited for before {k} is updated: only begin it")


def judge_disk(scene: Scene, updated: int) -> None:
    """The first `updated` parts are updated on the disk; the others are as they were."""
    for k, ((offset, nbytes), old) in enumerate(zip(scene.places, scene.contents, strict=True)):
        found, expected = scene.disk.peek(offset, nbytes), old + (k + 1) * (k < updated)
        if torch.equal(found, expected):
            continue
        if k < updated:
            raise Wrong(f"part {k} was updated, and the disk holds what it held before" if torch.equal(found, old)
                        else f"part {k} is not on the disk as update left it")  # fmt: skip
        raise Wrong(f"part {k} is changed on the disk, though its update did not come to its end")
