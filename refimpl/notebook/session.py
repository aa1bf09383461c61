"""The ranks of a notebook: they stay from cell to cell with their variables, until one fails or their number changes.

What goes wrong is told in a few lines: which ranks, which error, which line of which cell; after a hang, the collective
and the line in which each rank waits. Errors that only follow from another rank's are left out.
"""

import ast
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from refimpl.launch import RankDied, RankError, RankTimeout, World
from refimpl.notebook import cell
from refimpl.notebook.cell import Bundle, Stop
from refimpl.ranks.stand import LEFT_ALONE, STUCK

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

_LOST = "The ranks were stopped and their variables are lost: the next %%ranks cell starts new ones."
_KEPT = "Every rank failed alike, so the ranks stay and keep their variables."


class CellError(RuntimeError):
    """What went wrong on the ranks. A notebook shows the text alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class Shown:
    """What a cell showed: each rank's text (printed, then its last expression), and each rank's tables and figures."""

    texts: dict[int, str]
    bundles: dict[int, list[Bundle]]


class Ranks:
    """`pull` and `push` move values between the notebook and its ranks; `run` is what `%%ranks` does."""

    def __init__(self) -> None:
        self._world: World | None = None
        self.size = 2  # of the world, or of the one before

    def pull(self, expression: str, timeout: float | None = 60) -> list[Any]:
        """The value of a Python expression on every rank, in rank order. CellError if it fails on one."""
        return self._call(range(self.size), timeout, None, cell.evaluate, expression)

    def push(self, timeout: float | None = 60, **values: Any) -> None:
        """Set variables to the same values on every rank."""
        self._call(range(self.size), timeout, None, cell.assign, values)

    def start(self, size: int) -> int:
        """Have `size` ranks. Returns how many had to be stopped, with their variables, because they were not `size`."""
        stopped = 0
        if self._alive and self.size != size:
            stopped = self.size
            self.stop()
        if not self._alive:
            self._world, self.size = World(size, keep_settings=True), size
            self._world.call(cell.prepare)
        return stopped

    def run(
        self,
        source: str,
        file: str,
        only: Collection[int] | None = None,
        timeout: float | None = 60,
        printed: Callable[[Mapping[int, str]], object] = lambda _: None,
    ) -> tuple[Shown, CellError | None]:
        """Run a cell on all ranks, or on those of `only`: what it showed, and how it failed if it did.

        timeout: seconds until all ranks are stopped if none has ended the cell. `printed` is called whenever a rank has
        printed something, with all that each has printed so far.
        """
        only = range(self.size) if only is None else only
        texts: dict[int, str] = defaultdict(str)
        bundles: dict[int, list[Bundle]] = {}
        cell.remember(file, source)
        failure = None
        try:
            ast.parse(source, file)  # a slip of the pen should cost no rank its variables
            results = self._call(only, timeout, texts, cell.execute, source, file, only, printed=printed)
            bundles = dict(enumerate(results))
        except SyntaxError as error:
            failure = CellError("".join(traceback.format_exception_only(error)).strip())
        except CellError as error:
            failure = error
        for rank, shown in bundles.items():
            if shown and list(shown[0]) == ["text/plain"]:
                before = texts[rank]
                gap = "\n" if before and not before.endswith("\n") else ""
                texts[rank] = before + gap + shown.pop(0)["text/plain"]
        return Shown(dict(sorted(texts.items())), bundles), failure

    def stop(self) -> None:
        """Let the ranks go."""
        if self._world:
            self._world.stop()

    @property
    def _alive(self) -> bool:
        return self._world is not None and self._world.alive

    def _call(
        self,
        only: Collection[int],
        timeout: float | None,
        texts: dict[int, str] | None,
        fn: Callable[..., T],
        *args: Any,
        printed: Callable[[Mapping[int, str]], object] = lambda _: None,
    ) -> list[T]:
        world, stops = self._world, dict[int, Stop]()
        if world is None or not world.alive:
            raise CellError("there are no ranks yet: run a cell that begins with %%ranks 2 first")

        def on_report(rank: int, obj: object) -> None:
            if isinstance(obj, Stop):
                stops[rank] = obj

        def on_output(rank: int, stream: str, text: str) -> None:
            if texts is None:
                print(text, end="")
            else:
                texts[rank] += text
                printed(texts)

        try:
            return world.call(fn, *args, timeout=timeout, on_report=on_report, on_output=on_output)
        except KeyboardInterrupt as interrupt:
            where = "\n".join(getattr(interrupt, "__notes__", []))
            raise CellError(f"Interrupted:\n{where}\n{_LOST}") from None
        except RankError as error:
            alike = len(stops) == len(only) and len(set(stops.values())) == 1
            if not alike or any(stop.secondary for stop in stops.values()):
                world.stop()
            raise CellError(f"{_reason(error, stops, timeout)}\n{_KEPT if world.alive else _LOST}") from None


def _reason(error: RankError, stops: Mapping[int, Stop], timeout: float | None) -> str:
    if isinstance(error, RankTimeout):
        head, _, standings = str(error).partition("\n")
        if head in (LEFT_ALONE, STUCK):
            return f"{head[0].upper()}{head[1:]}:\n{standings}"
        return f"The cell did not end within {timeout:g} s:\n{standings}"
    first = {rank: stop for rank, stop in stops.items() if not stop.secondary}
    if isinstance(error, RankDied) or not first:
        return str(error).partition("\n\n")[0]
    return "\n".join(f"{names(ranks)} raised {stop}" for ranks, stop in merged(first))


def merged(by_rank: Mapping[int, H]) -> list[tuple[list[int], H]]:
    """Equal values together, with the ranks that have them, in the order of their first rank."""
    ranks: dict[H, list[int]] = {}
    for rank in sorted(by_rank):
        ranks.setdefault(by_rank[rank], []).append(rank)
    return [(numbers, value) for value, numbers in ranks.items()]


def names(ranks: list[int]) -> str:
    """[2] -> "rank 2"; [0, 1, 2] -> "ranks 0-2"; [0, 2] -> "ranks 0,2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {','.join(map(str, ranks))}"
