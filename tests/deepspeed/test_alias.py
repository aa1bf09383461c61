"""refimpl under the name `deepspeed`: the same modules, the metadata, and a real installation beside it."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from foreign import run_on_ranks, run_python, run_script

from refimpl import launch
from refimpl.as_deepspeed import INSTEAD, Finder

SAME = """
import importlib.metadata, importlib.util, sys
import refimpl
assert refimpl.alias_deepspeed() and refimpl.alias_deepspeed()
assert sum(type(finder).__name__ == "Finder" for finder in sys.meta_path) == 1
assert importlib.util.find_spec("deepspeed") is not None
import deepspeed, deepspeed.comm as dist
from deepspeed import comm
assert comm.comm is comm and deepspeed.comm.comm.is_initialized()  # as OpenFold asks, without an import
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
import refimpl.deepspeed.runtime.zero.partition_parameters as ours
import refimpl.deepspeed.ops.adam
assert deepspeed is refimpl.deepspeed and dist is comm is refimpl.deepspeed.comm
assert FusedAdam is refimpl.deepspeed.ops.adam.FusedAdam and ZeroParamStatus is ours.ZeroParamStatus
import deepspeed.ops.adam.fused_adam, deepspeed.ops.adam.cpu_adam
from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply
import deepspeed.ops.lion.cpu_lion, deepspeed.ops.lamb.fused_lamb
import deepspeed.ops.adagrad.cpu_adagrad
from deepspeed.ops.deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention
from deepspeed.ops.op_builder.builder import OpBuilder
assert not OpBuilder.is_rocm_pytorch()
from deepspeed.ops.adam.fused_adam import FusedAdam as again
from deepspeed.comm.comm import init_distributed
from deepspeed.runtime.zero.stage3 import GatheredParameters
assert again is FusedAdam and init_distributed is deepspeed.init_distributed
assert GatheredParameters is deepspeed.zero.GatheredParameters
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
assert deepspeed.__spec__.name == "refimpl.deepspeed"
from packaging.version import Version
assert Version("0.19") < Version(deepspeed.__version__) < Version("0.20"), deepspeed.__version__
assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[0] == "LRRangeTest"  # without an import of its own
for name in ("deepspeed.model_implementations.transformers", "deepspeed.ops.adam.zenflow_torch_adam"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert name.startswith(error.name) and "not part of this project" in str(error), error
    else:
        raise AssertionError
assert not hasattr(deepspeed.utils, "is_initialized")
try:
    deepspeed.io.FastFileWriter
except AttributeError as error:
    assert "deepspeed.io: not part of this project" in str(error), error
else:
    raise AssertionError
assert importlib.util.find_spec("json") is not None
"""


def in_a_process(code: str, *path: Path) -> None:
    """Run it in a new process that has torch already."""

    def work() -> None:
        sys.path[:0] = map(str, path)
        exec(code, {"__name__": "__main__"})

    launch.run(work, ranks=1, device="cpu")


def test_both_names_are_the_same_modules() -> None:
    in_a_process(SAME)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which a deepspeed is installed."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("real = True\n")
    (tmp_path / "deepspeed-9.0.dist-info").mkdir()
    (tmp_path / "deepspeed-9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.0\n"
    )
    return tmp_path


def test_an_installed_deepspeed_wins_unless_forced(installed: Path) -> None:
    stays = (
        "import refimpl, importlib.metadata as m; assert not refimpl.alias_deepspeed(); import deepspeed; "
        "assert deepspeed.real and m.version('deepspeed') == '9.0'"
    )
    in_a_process(stays, installed)
    forced = (
        "import refimpl, importlib.metadata as m; assert refimpl.alias_deepspeed(force=True); import deepspeed; "
        "assert deepspeed is refimpl.deepspeed and 'refimpl' in m.version('deepspeed')"
    )
    in_a_process(forced, installed)
    late = "import deepspeed, refimpl; refimpl.alias_deepspeed(force=True)"
    with pytest.raises(launch.RankError, match="imported already"):
        in_a_process(late, installed)


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import deepspeed\nname = deepspeed.__name__\n")
    script = "import sys, beside; print(__name__, beside.name, sys.argv[1:], sys.path[0])"
    assert (
        run_script(script, tmp_path, "--x", "1", alias=True) == f"__main__ refimpl.deepspeed ['--x', '1'] {tmp_path}\n"
    )
    said = run_python("-m", "refimpl.as_deepspeed", "-m", "script", "2", path=(tmp_path,))
    assert said.startswith("__main__ refimpl.deepspeed ['2']")
    assert "usage" in run_python("-m", "refimpl.as_deepspeed", expect=1)


WORKER = """
from deepspeed.ops.adam import FusedAdam
import deepspeed, deepspeed.comm, refimpl.deepspeed.ops.adam
assert deepspeed is refimpl.deepspeed and FusedAdam is refimpl.deepspeed.ops.adam.FusedAdam
"""


def test_what_a_script_spawns_imports_it_too(installed: Path) -> None:
    """A data loader's worker runs the script's imports again; of the alias it has the path alone."""
    script = "import sys; print(*sys.path[1:], sep='\\n')"
    path = run_on_ranks(script, installed, ranks=1).splitlines()
    in_a_process(WORKER, Path(path[0]), installed)


def test_what_is_not_there_yet_says_so_when_it_is_used() -> None:
    import refimpl.deepspeed as deepspeed
    from refimpl.deepspeed.launcher.runner import parse_inclusion_exclusion
    from refimpl.deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
    from refimpl.deepspeed.runtime.utils import PartitionedTensor
    from refimpl.deepspeed.sequence.fpdt_layer import FPDT_FFN
    from refimpl.deepspeed.utils.zero_to_fp32 import get_model_state_file

    for use, what in (
        (lambda: deepspeed.init_inference(None), "inference"),
        (lambda: deepspeed.zero.Init(remote_device="nvme"), "nvme.*offload_param"),
        (lambda: deepspeed.zero.Init(zero_quantized_weights=True), "zero_quantized_weights"),
        (lambda: convert_to_random_ltd(None, None), "the model drops its tokens itself"),
        (lambda: FPDT_FFN(), r"deepspeed\.sequence\.layer shares a sequence"),
        (lambda: PartitionedTensor(None), "use PipelineEngine"),
        (lambda: deepspeed.checkpoint.DeepSpeedCheckpoint("folder"), "`refimpl checkpoint export` writes whole"),
        (lambda: parse_inclusion_exclusion({}, "", ""), "--include and --exclude"),
        (lambda: get_model_state_file("folder", 2), r"no pickles; .* get_fp32_state_dict_from_zero_checkpoint"),
        (lambda: deepspeed.get_accelerator().get_op_builder("FlashAttentionBuilder")(), "FlashAttentionBuilder"),
    ):
        with pytest.raises(NotImplementedError, match=what):
            use()


@pytest.mark.parametrize(
    ("name", "says"), [("inference", "); call the model itself"), ("elsewhere", "does not exist)")]
)
def test_a_part_that_is_not_here_says_what_to_do_instead(name: str, says: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^deepspeed\.{name}: not part of .*{re.escape(says)}") as refused:
        Finder().find_spec(f"deepspeed.{name}")
    assert refused.value.name == f"deepspeed.{name}"


def test_no_remedy_is_for_what_is_here() -> None:
    assert not [name for name in INSTEAD if find_spec(f"refimpl.{name}")]
