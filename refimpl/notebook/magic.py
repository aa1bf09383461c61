"""The cell magic: `%%ranks 4` runs a cell on four processes and labels what they show.

    %%ranks 4                      run the cell on 4 ranks; new ones if there are not 4 yet
    %%ranks                        ... on the ranks there are (2 at first)
    %%ranks 4 --only 0,1           only ranks 0 and 1 run it
    %%ranks 4 --timeout 3          give up after 3 s without an end, and say where each rank waits

A rank has the names rank, world_size, group (`Group.world()`), torch and dist, and keeps its variables between cells.
In the notebook itself, `ranks.pull("x")` is the list of the ranks' values of x, and `ranks.push(x=1)` sets it on all.
"""

from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import MagicArgumentParser

from refimpl.notebook.cell import file_of
from refimpl.notebook.session import Ranks, Shown, merged, names


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
        if stopped := session.start(options.size):
            print(f"[{options.size} new ranks; the variables of the {stopped} before are gone]")
        # The magic line is line 1 of the cell, as in the editor's margin.
        shown, failure = session.run("\n" + cell, file_of(number), options.only, options.timeout)
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


def _show(shell: InteractiveShell, shown: Shown) -> None:
    for ranks, text in merged(shown.texts):
        label = f"[{names(ranks)}] "
        print(label + text.rstrip("\n").replace("\n", "\n" + " " * len(label)))
    frozen = {rank: tuple(tuple(b.items()) for b in bundles) for rank, bundles in shown.bundles.items()}
    for ranks, bundles in merged(frozen):
        if bundles:
            print(f"[{names(ranks)}]")
        for bundle in bundles:
            shell.display_pub.publish(data=dict(bundle))
