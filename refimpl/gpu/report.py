"""The report of one check: report.json for programs, report.md for people, both from the same data."""

import datetime
import importlib
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refimpl.bench.written import finite
from refimpl.checkpoint import atomic
from refimpl.gpu import libcuda


@dataclass
class Result:
    """One part. `ended`: how it ended too early, "" if it did not. `log`: the last lines of its output then."""

    name: str
    seconds: float
    ended: str
    findings: list[dict[str, Any]]
    log: list[str]

    @property
    def verdict(self) -> str:
        failed = sum(f["passed"] is False for f in self.findings)
        checks = sum(f["passed"] is not None for f in self.findings)
        if self.ended:
            return f"FAILED ({self.ended})"
        return f"FAILED ({failed} of {checks} checks)" if failed else f"passed ({checks} checks)"

    @property
    def passed(self) -> bool:
        return not self.ended and all(f["passed"] is not False for f in self.findings)


@dataclass
class Report:
    """All parts so far."""

    device: str
    results: list[Result] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: versions())

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def write(self, folder: Path) -> None:
        parts = [{**asdict(r), "verdict": r.verdict} for r in self.results]
        data = {"device": self.device, "passed": self.passed, "environment": self.environment, "parts": parts}
        as_json = json.dumps(finite(data), indent=1, allow_nan=False) + "\n"
        for name, text in (("report.json", as_json), ("report.md", self.markdown())):
            atomic.write_file(folder / name, partial(Path.write_text, data=text))  # or the one before it stays

    def markdown(self) -> str:
        lines = ["# GPU check", ""]
        if self.device == "cpu":
            lines += ["**A run in miniature on a CPU: it tests the program and says nothing about GPUs.**", ""]
        lines += [f"- {name}: {value}" for name, value in self.environment.items()]
        lines += ["", "| part | result | seconds |", "|---|---|---|"]
        lines += [f"| {r.name} | {r.verdict} | {r.seconds} |" for r in self.results]
        for result in self.results:
            lines += ["", f"## {result.name}", ""]
            for finding in result.findings:
                mark = {None: "", True: "ok: ", False: "**FAILED**: "}[finding["passed"]]
                lines.append(f"- {mark}{finding['name']}: {_text(finding['value'])}")
            if result.log:
                lines += ["", "The end of its output:", "", "```", *result.log, "```"]
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """What the results depend on: date, GPUs, driver, libraries."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpus": gpus(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["driver"] = driver()
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ["none"]  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, nccl))
        found["triton"] = triton_version()
        if folder := libcuda.missed():
            found["libcuda"] = (
                f"in {folder}, where Triton does not look: outside this check set {libcuda.VARIABLE}={folder}"
            )
    return found


def gpus() -> str:
    """Their names, as torch gives them."""
    try:
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none"
    except RuntimeError as error:  # a driver that is there and does not work: the parts will say more
        return f"unknown: {error}".splitlines()[0]


def triton_version() -> str:
    """What it says itself: torch's nightly builds and NVIDIA's containers have its package under another name."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return "none"


def driver() -> str:
    """Its version, the mode that decides how many processes may compute, and MIG's; as nvidia-smi says it.

    Without that tool a report is still a report.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        version, mode, mig = said.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "unknown: nvidia-smi does not say"
    return f"{version}, compute mode {mode}, MIG {mig}"


def why_none() -> str:
    """Why torch finds no GPU, as far as can be seen from here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs; install one for CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all or names none that is there"
    if not (there := driver()).startswith("unknown"):
        wants = f"CUDA {torch.version.cuda}, of torch {torch.__version__}"
        return f"nvidia-smi finds one, driver {there}: perhaps too old for {wants}, or MIG is on without an instance"
    return "nvidia-smi finds none either, or does not answer"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
