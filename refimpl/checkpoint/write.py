"""A checkpoint written: begun by one process, a file pair a rank, and finished by the process that began.

Until `finish` renames it, the folder has a name that nobody takes for a checkpoint: see refimpl/checkpoint/atomic.py.
"""

import json
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from refimpl.checkpoint import atomic, manifest, tensors
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.folder import notes_file, rank_file
from refimpl.checkpoint.tensors import Later

SCRIPTS = {  # beside the checkpoints, as DeepSpeed leaves its own there: scripts look for them and run them
    "zero_to_fp32.py": "OUTPUT_DIR [--safe_serialization] [-t TAG]",
    "zero_to_torch.py": "OUTPUT_DIR --dtype bf16 [--safe_serialization] [-t TAG]",
}
LINES = """\
#!/usr/bin/env python
\"\"\"Whole weights of a checkpoint in this folder, without the ranks that wrote it:

    python {module}.py . {arguments}
\"\"\"
from refimpl.deepspeed.utils.{module} import main

main()
"""


def _write_scripts(folder: Path) -> None:
    """Those that are not there."""
    for name, arguments in SCRIPTS.items():
        script = folder / name
        with naming(script):
            if not os.path.lexists(script):
                lines = LINES.format(module=script.stem, arguments=arguments)
                atomic.write_file(script, partial(_write_script, lines))


def _write_script(lines: str, part: Path) -> None:
    part.write_text(lines)
    with suppress(PermissionError):  # a share without such a right, as in DeepSpeed: there `python` runs it
        part.chmod(part.stat().st_mode | stat.S_IXUSR)


def begin(folder: Path, new: Path, held: ExitStack) -> None:
    """Clear what killed saves have left in the parent folder, hold it, and make the folder to write into."""
    save_dir = folder.parent
    with naming(save_dir):
        if not save_dir.is_dir():
            save_dir.mkdir(parents=True)
            atomic.sync(save_dir.parent)
        held.enter_context(atomic.hold(save_dir, manifest.NAME, manifest.ours))
    with naming(folder), atomic.alone_with(folder):
        is_other = os.path.lexists(folder) and not manifest.is_in(folder) and any(folder.iterdir())  # a file: an error
        if is_other and folder.is_symlink():
            raise CheckpointError(
                f"{folder}: a link to something else than a checkpoint (it has no {manifest.NAME}); move it away, or "
                "choose another tag"
            )
        new.mkdir()


def write_rank(new: Path, mine: Mapping[str, Tensor | Later], notes: dict[str, Any]) -> None:
    """Write this rank's two files, the notes last: when they have their name, the rank has written all."""
    path = new / rank_file(notes["save"]["rank"])
    with naming(path):
        digest = tensors.write(path, mine)
        atomic.sync(path)
    write_notes(new, digest, notes)


def write_notes(new: Path, digest: dict[str, Any], notes: dict[str, Any]) -> None:
    """A rank's JSON, with the size and checksum of its tensors."""
    about = new / notes_file(notes["save"]["rank"])
    part = atomic.unfinished(about, atomic.new_id())
    with naming(about):
        part.write_text(json.dumps({"tensors": digest} | notes))
        atomic.sync(part)
        atomic.sync(new)  # the name of the tensors, before that of what tells of them
        os.replace(part, about)  # and nothing after it: rank 0 syncs the folder, and may have renamed it already


def finish(folder: Path, new: Path, about: dict[str, Any], save_latest: bool) -> None:
    """Rank 0, when every rank has written its files: the manifest, the name, the script, and last `latest`."""
    files = {}
    for rank in range(about["world_size"]):
        path = new / notes_file(rank)
        with naming(path):
            files[rank_file(rank)] = json.loads(path.read_bytes())["tensors"]
        files[path.name] = manifest.digest(path)
    with naming(new / manifest.NAME):
        manifest.write(new / manifest.NAME, about | {"files": files})
        atomic.sync(new / manifest.NAME)
        atomic.sync(new)
    with naming(folder), atomic.alone_with(folder):
        if folder.is_dir() and not (folder.is_symlink() or manifest.is_in(folder)):  # a script's, with its tokenizer
            atomic.join_folder(new, folder, manifest.NAME)
        else:
            atomic.replace_folder(new, folder, manifest.ours)
    _write_scripts(folder.parent)
    if save_latest:
        latest = folder.parent / "latest"
        with naming(latest):
            atomic.write_file(latest, lambda part: part.write_text(folder.name))
