"""A pipeline's weights as DeepSpeed lays them out, a file a layer: what its users convert a model to, to begin from it.

    layer_00-model_00-model_states.pt    layer 0 of tensor rank 0: {"weight": ...}, by the names inside the layer
    layer_00-model_states.pt             the same of a topology without a model axis, as `num_stages` makes it
    layer_3-model_00-model_states.pt     layer 3, as those write it who do not pad

A tied layer that has a function of its own has no file there: its weights are in that of another with its key.
`load_checkpoint(folder, load_module_only=True)` takes them; a rank reads the files of its layers. What else lies there,
counters and an optimizer's state, is not read. DeepSpeed: `load_state_dir` in deepspeed/runtime/pipe/module.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from refimpl.checkpoint import unpickle
from refimpl.checkpoint.errors import CheckpointError, naming, together
from refimpl.checkpoint.find import checked_tag, named_by
from refimpl.engine.state import TrainingState
from refimpl.parallel.pipeline.layers import TiedLayerSpec
from refimpl.parallel.pipeline.module import PipelineModule

FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")


def load(engine: TrainingState, load_dir: Path, tag: str | None, strict: bool) -> Path | None:
    """Load `tag`, by default what `latest` names: its folder. None, and nothing done, where it is no such checkpoint.

    A collective. CheckpointError on every rank, the engine unchanged, for files that are damaged or do not fit.
    """
    module = engine.module
    if not isinstance(module, PipelineModule):
        return None

    def read() -> tuple[Path, dict[str, Tensor]] | None:
        with naming(load_dir):
            folder = folder_of(load_dir, tag)
            return None if folder is None else (folder, weights_of(folder, module, engine.axes.tensor.rank, strict))

    found = together(engine.axes.world, read)
    if found is None:
        return None
    module.load_state_dict(found[1], strict=strict)
    return found[0]


def folder_of(load_dir: Path, tag: str | None) -> Path | None:
    """The folder of a checkpoint, if it holds such files."""
    latest = load_dir / "latest"
    if tag is None and not latest.is_file():
        return None
    tag, who = (named_by(latest), str(latest)) if tag is None else (tag, "load_checkpoint")
    if not tag:
        return None  # `find` says so
    folder = load_dir / checked_tag(tag, who)
    return folder if any(FILE.fullmatch(path.name) for path in folder.glob("layer_*")) else None


def weights_of(folder: Path, module: PipelineModule, tensor_rank: int, strict: bool) -> dict[str, Tensor]:
    """What the files have of the layers on this rank, by the module's names.

    CheckpointError for a weight of another shape, and, if `strict`, for one that only one side has.
    """
    found = {match.groups(): path for path in folder.iterdir() if (match := FILE.fullmatch(path.name)) is not None}
    files = {int(layer): path for (layer, rank), path in found.items() if int(rank or 0) == tensor_rank}
    here, given = module.state_dict(), dict[str, Tensor]()
    for places, prefix in layers_of(module):
        for path in [files[layer] for layer in places if layer in files][:1]:
            given |= {prefix + name: weight for name, weight in unpickle.load(path).items()}
    for name in sorted(here.keys() | given.keys()):
        there, ours = (str(tuple(side[name].shape)) if name in side else "not there" for side in (given, here))
        if there != ours and (strict or "not there" not in (there, ours)):
            raise CheckpointError(
                f"{folder}: {name} is {there} in its layer_*-model_{tensor_rank:02d}-model_states.pt (or layer_*-"
                f"model_states.pt), and {ours} in the model; convert the very model that is trained here"
            )
    return given


def layers_of(module: PipelineModule) -> Iterator[tuple[list[int], str]]:
    """(its number and those of layers with its key, what its weights' names begin with) of each layer on this rank."""
    tied = {i: spec.key for i, spec in enumerate(module.specs) if isinstance(spec, TiedLayerSpec)}
    for stage in module.stages:
        for i in range(*module.bounds[stage : stage + 2]):
            alike = [j for j, key in tied.items() if key == tied.get(i) and j != i]
            yield [i, *alike], f"tied_modules.{tied[i]}." if i in tied else f"{i}."
