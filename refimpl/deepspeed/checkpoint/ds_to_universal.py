"""`main(args)`: nothing is converted, since every checkpoint is universal; the folder is copied to the name asked for.

    python -m refimpl.deepspeed.checkpoint.ds_to_universal --input_folder F/global_step1 --output_folder F/universal

Scripts that call DeepSpeed's converter go on working: they load what it has made with checkpoint.load_universal.
DeepSpeed: deepspeed/checkpoint/ds_to_universal.py.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refimpl.checkpoint import atomic, manifest
from refimpl.checkpoint.errors import CheckpointError, naming
from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's options; those that say how to convert have no effect."""
    parser = argparse.ArgumentParser("ds_to_universal", description="Copy a checkpoint to where a script expects it.")
    parser.add_argument("--input_folder", required=True, help="a checkpoint, or a folder with a file latest")
    parser.add_argument("--output_folder", required=True, help="the folder to make")
    for option in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(option, type=int, help="has no effect")
    for option in ("--keep_temp_folder", "--inject_missing_state", "--no_strict"):
        parser.add_argument(option, action="store_true", help="has no effect")
    return parser.parse_args(arguments)


def main(args: Any) -> None:
    """Copy the checkpoint args.input_folder to args.output_folder; `latest` beside it names it if there is none.

    CheckpointError if it is damaged or none of ours, or if the output folder is there already.
    """
    out = Path(args.output_folder)
    with Folder(*given(Path(args.input_folder))) as opened, naming(out):
        opened.check()
        if os.path.lexists(out):
            raise CheckpointError(f"{out}: is there already; move it away, or choose another name")
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic.hold(out.parent, manifest.NAME, manifest.ours):
            new = atomic.unfinished(out, atomic.new_id())
            try:
                shutil.copytree(opened.path, new, copy_function=copied)
                atomic.replace_folder(new, out, manifest.ours)
            except Exception:
                atomic.discard(new)
                raise
            latest = out.parent / "latest"
            if not os.path.lexists(latest):
                atomic.write_file(latest, lambda part: part.write_text(out.name))


def copied(source: str, target: str) -> None:
    """One file, on the disk. CheckpointError, which `copytree` does not collect as it does the system's."""
    with naming(Path(target)):
        shutil.copy2(source, target)
        atomic.sync(Path(target))


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except CheckpointError as reason:
        raise SystemExit(f"ds_to_universal: {reason}") from None
