"""The cell magic: `%%ranks 4` runs a cell on four processes and labels what they show.

    %%ranks 4                      run the cell on 4 ranks; new ones if there are not 4 yet
    %%ranks                        ... on the ranks there are (2 at first)
    %%ranks 4 --only 0,1           only ranks 0 and 1 run it
    %%ranks 4 --timeout 3          give up after 3 s without an end, and say where each rank waits

What ranks print is shown when the cell ends, equal texts once; of a cell that takes longer than a second also while it
runs. A rank has the names rank, world_size, group (`Group.world()`), torch and dist, and keeps its variables between
cells.
In the notebook itself, `ranks.pull("x")` is the list of the ranks' values of x, and `ranks.push(x=1)` sets it on all.
"""

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import clear_output

from refimpl.notebook.cell import file_of
from refimpl.notebook.session import Ranks, Shown, merged, names

LONG, AGAIN = 1.0, 0.3  # seconds until a cell is long, and between two looks at what it has printed


def load(shell: InteractiveShell) -> None:
    """Add `%%ranks` and `ranks` to a notebook."""
    session, number = Ranks(), 0

    def ranks(line: str, cell: str) -> None:
        nonlocal number
        # Of this cell, counted in the history: execution_count is that of the next one in newer IPython. A client that
        # keeps no history would call all cells In[1].
        history = shell.history_manager
        number = max(len(history.input_hist_raw) - 1 if history else 0, number + 1)
        options = _options(line, session.size)
        stopped = session.start(options.size)
        note = f"[{options.size} new ranks; the variables of the {stopped} before are gone]\n" if stopped else ""
        print(note, end="")
        so_far = SoFar(note)
        # The magic line is line 1 of the cell, as in the editor's margin.
        shown, failure = session.run("\n" + cell, file_of(number), options.only, options.timeout, so_far)
        so_far.end()
        _show(shell, shown)
        if failure:
            raise failure

    ranks.__doc__ = __doc__
    shell.register_magic_function(ranks, "cell")  # type: ignore[arg-type]
    shell.push({"ranks": session}, interactive=False)


def _options(line: str, default: int) -> Any:
    """size, only, timeout. UsageError, which a notebook shows in one line, if they make no sense."""
    parser = MagicArgumentParser("%%ranks", add_help=False)
    parser.add_argument("size", nargs="?", type=int, default=default)
    parser.add_argument("--only", type=lambda text: [int(rank) for rank in text.split(",")])
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_argstring(line)
    if options.size < 1:
        raise UsageError(f"%%ranks needs at least 1 rank, not {options.size}")
    if options.only and not set(options.only) <= set(range(options.size)):
        raise UsageError(f"--only names a rank that is not among the {options.size} ranks 0 to {options.size - 1}")
    return options


class SoFar:
    """Shows what the ranks of a long cell have printed so far, in place of what it showed before."""

    def __init__(self, note: str) -> None:
        """`note`: what stays above. REFIMPL_STREAM=0: nothing is shown before the end, for who compares outputs."""
        self.note, self.shows = note, False
        never = os.environ.get("REFIMPL_STREAM") == "0"
        self.due = math.inf if never else time.monotonic() + LONG

    def __call__(self, texts: Mapping[int, str]) -> None:
        if time.monotonic() >= self.due:
            self.shows = True
            self.end()
            _print(texts)
            self.due = time.monotonic() + AGAIN

    def end(self) -> None:
        """Take away what was shown, when something else is there to be shown."""
        if self.shows:
            clear_output(wait=True)
            print(self.note, end="")


def _print(texts: Mapping[int, str]) -> None:
    for ranks, text in merged(texts):
        label = f"[{names(ranks)}] "
        print(label + text.rstrip("\n").replace("\n", "\n" + " " * len(label)))


def _show(shell: InteractiveShell, shown: Shown) -> None:
    _print(shown.texts)
    frozen = {rank: tuple(tuple(b.items()) for b in bundles) for rank, bundles in shown.bundles.items()}
    for ranks, bundles in merged(frozen):
        if bundles:
            print(f"[{names(ranks)}]")
        for bundle in bundles:
            shell.display_pub.publish(data=dict(bundle))
