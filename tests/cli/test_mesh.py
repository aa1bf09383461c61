"""`refimpl demo --mesh` in miniature: the curve of one process, every byte by formula, and what cannot be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refimpl.cli import mesh as meshes
from refimpl.cli.main import app


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,cp=2"])
def test_the_mesh_lies_on_one_process_and_its_bytes_on_the_formulas(mesh: str, tmp_path: Path) -> None:
    found, task, out = meshes.asked(mesh, None, 3, None, 2, 128, 16, 0, tmp_path / "out")
    assert meshes.run(found, task, out) == 0
    said = json.loads((out / "report.json").read_text())
    assert said["bytes_exact"]
    assert said["largest_deviation"] < meshes.BOUND
    assert said["one_process"][-1] < said["one_process"][0]
    inner = "tp" if "tp" in mesh else "cp"
    assert said["ranks"][1]["place"] == {"pp": 0, "dp": 0, "cp": 0, "tp": 0} | {inner: 1}
    assert (out / "mesh.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--mesh", "dp=2,sp=2"], "'sp=2' is not one of dp=N, pp=N, cp=N, tp=N, each once"),
        (["--mesh", "dp=2,dp=2"], "'dp=2' is not one of"),
        (["--mesh", "dp=²"], "'dp=²' is not one of"),
        (["--mesh", "pp=7"], "4 layers, embedding and head over 7 pipeline stages: each needs one of them"),
        (["--mesh", "tp=2", "--ranks", "4"], "--ranks 4: --mesh tp=2 has 2; leave --ranks out"),
        (["--mesh", "cp=2", "--context", "6"], "6 tokens over context ranks, two runs each: does not divide by 4"),
        (["--mesh", "dp=2", "--device", "cuda"], "--device: --mesh trains by ZeRO-1, on the CPU; leave it out"),
        (["--mesh", "dp=2", "--seed", "-1"], "--seed -1: it must not be negative"),
        (["--mesh", "dp=2", "--out", __file__], "it is a file, and a folder is needed"),
        (["--mesh", "tp=8"], "tp must divide the 4 heads and the vocabulary of 256"),
    ],
)
def test_what_cannot_be(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
