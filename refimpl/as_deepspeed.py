"""refimpl under the name `deepspeed`, so that scripts written for DeepSpeed run unchanged.

    python -m refimpl.as_deepspeed script.py --its arguments
    torchrun --nproc-per-node 2 -m refimpl.as_deepspeed script.py --its arguments

or, as the first line of a program, `refimpl.alias_deepspeed()`. One finder in front of `sys.meta_path` answers both
questions that are asked of a package: where `deepspeed.x` is (it is the module `refimpl.deepspeed.x` itself, so
`isinstance` agrees under both names) and which version is installed (`importlib.metadata`). Nothing is written, and
other processes do not see it, but for those that multiprocessing starts under `python -m refimpl.as_deepspeed`: a data
loader's workers, whose path has `refimpl/spawned` too.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn

VERSION = "0.19.8+refimpl"  # the DeepSpeed whose behaviour is meant

# Files of DeepSpeed's folders that are one file here: each is that file.
WITHIN = {
    "deepspeed.comm": ["comm"],
    "deepspeed.ops.adagrad": ["cpu_adagrad"],
    "deepspeed.ops.adam": ["cpu_adam", "fused_adam", "multi_tensor_apply"],
    "deepspeed.ops.deepspeed4science": ["evoformer_attn"],
    "deepspeed.ops.lamb": ["fused_lamb"],
    "deepspeed.ops.lion": ["cpu_lion", "fused_lion"],
    "deepspeed.ops.op_builder": ["all_ops", "builder"],
}

# What is not here, nor what lies below it: what to do instead.
INSTEAD = {
    "deepspeed.autotuning": "`refimpl deepspeed --autotuning tune` tries configurations out",
    "deepspeed.inference": "call the model itself, in evaluation mode",
    "deepspeed.linear": "LoRA by PEFT trains in every stage",
    "deepspeed.model_implementations": "call the model itself, in evaluation mode",
    "deepspeed.ops.transformer": "use torch.nn.TransformerEncoderLayer, or transformers' layers",
    "deepspeed.runtime.data_pipeline.data_sampling": "give initialize a data set in the order that is wanted",
    "deepspeed.runtime.domino": "tensor_parallel.autotp_size cuts the layers of a model",
    "deepspeed.runtime.hybrid_engine": "call generate of engine.module",
    "deepspeed.runtime.swap_tensor": "offload_optimizer and offload_param of the configuration do it",
}


def alias_deepspeed(force: bool = False) -> bool:
    """Let `import deepspeed` mean `refimpl.deepspeed` in this process; True when it does.

    A DeepSpeed that is really installed wins, and False is returned, unless `force`. RuntimeError when it is forced
    after the other one was imported: two halves of two packages would be mixed.
    """
    if any(getattr(finder, "stands_for", None) == "refimpl.deepspeed" for finder in sys.meta_path):
        return True
    installed = any(True for _ in importlib.metadata.distributions(name="deepspeed"))
    if installed and not force:
        return False
    if "deepspeed" in sys.modules:
        raise RuntimeError("alias_deepspeed: deepspeed is imported already; call it before anything imports deepspeed")
    sys.meta_path.insert(0, Finder())
    return True


class Finder(MetaPathFinder):
    """Answers for `deepspeed` and everything below it, before the path is searched."""

    stands_for = "refimpl.deepspeed"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of `deepspeed...`; None for other names. ModuleNotFoundError for a part that is not built."""
        if fullname.partition(".")[0] != "deepspeed":
            return None
        folder, _, file = fullname.rpartition(".")
        ours = f"refimpl.{folder if file in WITHIN.get(folder, ()) else fullname}"
        found = importlib.util.find_spec(ours)
        if found is None:
            remedy = f"; {INSTEAD[fullname]}" if fullname in INSTEAD else ""
            raise ModuleNotFoundError(
                f"{fullname}: not part of this project; this `deepspeed` is refimpl ({ours} does not exist){remedy}",
                name=fullname,
            )
        return ModuleSpec(
            fullname, Alias(ours), origin=found.origin, is_package=found.submodule_search_locations is not None
        )

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = importlib.metadata.DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[importlib.metadata.Distribution]:
        """What `importlib.metadata.version("deepspeed")` reads."""
        return [Installed()] if context.name in (None, "deepspeed") else []


class Alias(Loader):
    """Loads nothing: the module is the one of another name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.name)
        vars(module).setdefault("__path__", [])  # so that a name below a file is looked up here too: see WITHIN
        vars(module).setdefault("__getattr__", partial(not_here, self.name.removeprefix("refimpl.")))
        self.own_spec = module.__spec__
        return module

    def get_code(self, name: str) -> CodeType | None:
        """What `python -m` runs."""
        found = importlib.util.find_spec(self.name)
        return found.loader.get_code(self.name) if found and isinstance(found.loader, InspectLoader) else None

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has just replaced it by the alias's


def not_here(module: str, name: str) -> NoReturn:
    """What a module says to a name that it does not have."""
    raise AttributeError(f"{module}.{name}: not part of this project; this `deepspeed` is refimpl")


class Installed(importlib.metadata.Distribution):
    """The metadata of a package that is not on disk."""

    def read_text(self, filename: str) -> str | None:
        metadata = (
            f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: refimpl in DeepSpeed's place\n"
        )
        return {"METADATA": metadata, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


def main(arguments: list[str]) -> None:
    """Run a script (or `-m module`) with its arguments; it finds refimpl even where a deepspeed is installed."""
    if not arguments or arguments == ["-m"]:
        raise SystemExit("usage: python -m refimpl.as_deepspeed [-m] script.py [arguments of the script]")
    alias_deepspeed(force=True)
    os.environ.setdefault("REFIMPL_STATE_DICT", "names")  # what rank 0 of its scripts asks for alone
    sys.path.insert(1, str(Path(__file__).parent / "spawned"))  # before an installed one
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as `python script.py` has it
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
