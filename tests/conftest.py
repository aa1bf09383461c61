"""Shared by all tests: helpers beside a test file can be imported from it, also in the ranks it starts."""

import gc
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from refimpl import launch
from refimpl.ranks.server import PRELOAD

if torch.cuda.is_available():
    os.environ.setdefault("REFIMPL_DEVICE", "cpu")  # engines alone here, and ranks of which no test says where
gc.disable()  # until all is collected: imports leave next to no garbage
torch.set_num_threads(1)  # as in the ranks: a matmul split over threads may add in another order
# What most ranks here would import, each by itself.
PRELOAD += ["pytest", "hypothesis", "refimpl.deepspeed", "refimpl.grading.noted", "worlds"]

# What a machine with torch, numpy and pytest may lack.
OPTIONAL = {
    "IPython", "hypothesis", "ipywidgets", "jupytext", "matplotlib", "nbformat", "pandas", "psutil", "pydantic", "rich",
    "safetensors", "typer",
}  # fmt: skip

with suppress(ImportError):  # `make gpu-check` runs on such
    import hypothesis

    # The same examples in every run, and few: seconds for all, and no test fails by chance.
    hypothesis.settings.register_profile("suite", derandomize=True, max_examples=50, deadline=None, database=None)
    hypothesis.settings.load_profile("suite")

for folder in sorted({p.parent for p in Path(__file__).parent.rglob("*.py")}):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="session", autouse=True)
def _ranks_that_stay() -> Iterator[None]:
    """Those of tests/worlds.py end with the session."""
    yield
    if "worlds" in sys.modules:
        sys.modules["worlds"].worlds().stop()


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    """Of this process, in which `deepspeed.initialize` makes a world of one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def pretended_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its library, from tests/gpu/device.cpp. Who asks is of the xdist_group "pretend", so that it is built once."""
    import pretend

    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the pretended device with")
    return pretend.built(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="session")
def on_paper(pretended_device: Path) -> Iterator[launch.World]:
    """A process that has the device, for streams on paper: see tests/gpu/paper.py."""
    import paper

    with launch.World(1, device="cpu", compare=False) as world:
        world.call(paper.begin, pretended_device)
        yield world


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file of tests whose package is not there is skipped."""
    report = yield
    if report.failed and (lacking := lacks(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, lacking)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """So is what needs one later on, here or in a rank."""
    try:
        yield
    except Exception as error:
        if not (lacking := lacks(str(error))):
            raise
        pytest.skip(lacking)


def lacks(text: str) -> str:
    """Which package an error says is missing; "" for any other error."""
    if "plain pickle cannot carry it" in text:
        return f"cloudpickle is not installed: {text}"
    found = re.search(r"No module named '(\w+)", text)
    return f"{found[1]} is not installed" if found and found[1] in OPTIONAL else ""


def pytest_collection_finish() -> None:
    """What was imported and collected is nobody's garbage: else each `gc.collect()` of a test looks at all of it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:  # before 8.4 it has no such name
    """How long each folder took, its fixtures included, the slowest first; with `-n` the sum over the processes."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if isinstance(report, pytest.TestReport):
            place = Path(report.nodeid.partition("::")[0])
            folder = str(place if place.parent.name == "tests" else place.parent)
            seconds[folder] += report.duration
            tests[folder] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.section("durations by folder")
        for folder, duration in seconds.most_common():
            terminalreporter.write_line(f"{duration:7.1f}s  {tests[folder]:5} tests  {folder}")
