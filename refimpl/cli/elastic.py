"""`refimpl elastic -c ds.json`: which batch, on how many ranks. In the lines that DeepSpeed's `ds_elastic` prints."""

from pathlib import Path

from refimpl.engine.configuration.batch import MICRO, STEPS
from refimpl.engine.configuration.elasticity import read, shared
from refimpl.engine.configuration.read import raw_config


def run(config: Path, world_size: int) -> None:
    """Print it; of a world size, in data-parallel ranks, the micro-batches too. ValueError says what is wrong."""
    section = read(raw_config(config))
    if section is None:
        raise ValueError(f"{config}: elasticity.enabled is not true, so nothing is chosen")
    if world_size < 0:
        raise ValueError(f"--world-size {world_size}: must not be negative")
    found = shared(section)
    print(f"final_batch_size .... {found.batch}")
    print(f"valid_gpus .......... {list(found.ranks)}")
    if world_size:
        sizes = found.triple(world_size)
        print(f"micro_batch_size .... {sizes[MICRO]}")
        print(f"accumulation_steps .. {sizes[STEPS]}")
