"""torch's inference mode as a collective needs it: a step may run where somebody waits, in another mode than its own.

A tensor made in inference mode can be filled in that mode alone, and one made outside would be one of it ever after.
Leaving the mode turns gradients on, which no collective wants.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

UNCHANGED = nullcontext()


def inference(on: bool) -> AbstractContextManager[None]:
    """Nothing where it is so already: this is asked at every step of every collective."""
    return UNCHANGED if torch.is_inference_mode_enabled() == on else _switched(on)


@contextmanager
def _switched(on: bool) -> Iterator[None]:
    with torch.inference_mode(on), torch.no_grad():
        yield
