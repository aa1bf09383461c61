"""`refimpl exercise reset`: begin a chapter's exercises anew; what was written there is kept beside it.

`refimpl exercise watch`: grade what is saved, as it is saved.
"""

import typer

from refimpl.cli.refuse import refusing
from refimpl.grading.chapters import find_chapter
from refimpl.grading.stubs import stub
from refimpl.userdata import set_aside

app = typer.Typer(help="The files of your exercises.", no_args_is_help=True, add_completion=False)


@app.callback()
def exercises() -> None:
    """The files of your exercises."""


@app.command()
def reset(chapter: str, yes: bool = typer.Option(False, "--yes", help="Do not ask.")) -> None:
    """Put the stub of a chapter's exercises back, e.g. `refimpl exercise reset 02_ddp`. Keeps a copy of your file."""
    with refusing("refimpl exercise reset", ValueError, FileNotFoundError):
        found = find_chapter(chapter)
    path, fresh = found.exercise, stub(found.solution.read_text())
    if path.exists() and path.read_text() == fresh:
        print(f"{path}: nothing is written there yet")
        return
    if path.exists():
        if not yes:
            typer.confirm(f"Replace {path} by the stub? Your file will be kept beside it.", abort=True)
        print(f"{set_aside(path, 'kept')}: what you had written")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fresh)
    print(f"{path}: the stub again")


@app.command()
def watch(chapter: str, once: bool = typer.Option(False, "--once", help="Grade what is written, and leave.")) -> None:
    """Grade a chapter's exercises whenever you save them, e.g. `refimpl exercise watch 02_ddp`. Ctrl-C ends it."""
    from refimpl.cli import watch

    with refusing("refimpl exercise watch", ValueError, FileNotFoundError):
        try:
            watch.run(find_chapter(chapter), once)
        except KeyboardInterrupt:
            print()
