"""`main(args)`: nothing is converted, since every checkpoint is universal; the folder is copied to the name asked for.

Scripts that call DeepSpeed's converter go on working: they load what it has made with checkpoint.load_universal.
DeepSpeed: deepspeed/checkpoint/ds_to_universal.py.
"""

import shutil
from pathlib import Path
from typing import Any

from refimpl.checkpoint.find import given
from refimpl.checkpoint.folder import Folder


def main(args: Any) -> None:
    """Copy the checkpoint args.input_folder to args.output_folder. CheckpointError if it is damaged or none of ours."""
    opened = Folder(*given(Path(args.input_folder)))
    opened.check()
    shutil.copytree(opened.path, args.output_folder)
