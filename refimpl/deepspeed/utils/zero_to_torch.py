"""Whole weights from a checkpoint of any stage, in a dtype of one's choice. DeepSpeed: utils/zero_to_torch.py.

    python -m refimpl.deepspeed.utils.zero_to_torch CHECKPOINT_DIR OUTPUT_DIR [--dtype bf16] [--safe_serialization] ...

What is no floating number, as a mask, keeps its dtype.
"""

from collections.abc import Sequence

from refimpl.deepspeed.utils.zero_to_fp32 import arguments_of, convert_zero_checkpoint_to_state_dict, converted

__all__ = ["convert_zero_checkpoint_to_state_dict", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command, with DeepSpeed's arguments."""
    parser = arguments_of("zero_to_torch", "Whole weights out of a checkpoint.")
    parser.add_argument("--dtype", default="fp32", help="of floating weights and buffers: fp32, bf16 or fp16")
    converted(parser, arguments)


if __name__ == "__main__":
    main()
