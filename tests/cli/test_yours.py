"""`refimpl demo --yours`: what the learner wrote trains as one process does; what is kept or sent too much shows."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refimpl.cli import demo, options, progress, yours
from refimpl.cli.main import app
from refimpl.grading.chapters import project_folder
from refimpl.grading.ladder import LADDER
from refimpl.grading.progress import Progress
from refimpl.grading.stubs import stub
from refimpl.grading.verdict import Verdict
from refimpl.plan.formulas import Strategy


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which nothing is written."""
    shutil.copytree(project_folder() / "solutions", tmp_path / "solutions", ignore=lambda *_: ["__pycache__"])
    for chapter, _ in LADDER.values():
        path = tmp_path / "exercises" / chapter / "exercise.py"
        path.parent.mkdir(parents=True)
        path.write_text(stub((tmp_path / "solutions" / f"{chapter}.py").read_text()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFIMPL_DATA", str(tmp_path))
    return tmp_path


def write(learner: Path, strategy: Strategy, old: str = "", new: str = "") -> None:
    """An answer that has passed: the solution, with one thing changed."""
    chapter, task = LADDER[strategy]
    source = (learner / "solutions" / f"{chapter}.py").read_text()
    assert old in source
    (learner / "exercises" / chapter / "exercise.py").write_text(source.replace(old, new) if old else source)
    Progress.load().record({(chapter, task): Verdict(task, "pass", "")})


def plan(learner: Path, ranks: int, *strategies: str) -> options.Plan:
    return yours.asked(options.plan(ranks, strategies, 2, None, 1, 64, 16, 0, "cpu", learner / "out"))


def test_right_answers_have_the_bits_of_one_process_and_the_bytes_of_the_formulas(
    learner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy in LADDER:
        write(learner, strategy)
    assert demo.run(plan(learner, 3)) == 0
    out = capsys.readouterr().out
    assert out.count(" yes ") == 4
    assert "≠" not in out
    assert out.count(" = ") >= 4 * 3 + 7


def test_a_second_copy_and_a_second_reduction_show(learner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(learner, "zero2", "mine = torch.empty_like(flat[:shard])", "mine = torch.empty_like(flat)[:shard]")
    write(learner, "ddp", "self.flights.append(", 'self.group.all_reduce(flat, "mean")\n        self.flights.append(')
    assert demo.run(plan(learner, 2, "ddp", "zero2")) == 0
    memory, traffic = capsys.readouterr().out.split("MB sent")
    assert memory.count("≠") == 1
    assert traffic.count("≠") == 1


def test_wrong_bits_show(learner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(learner, "zero1", '"mean"', '"sum"')
    assert demo.run(plan(learner, 2, "zero1")) == 1
    assert " NO " in capsys.readouterr().out


def test_who_has_not_passed_is_told_what_to_do(learner: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none of your classes can train yet\. ddp: your Ddp has not passed yet; grade it"
    ):
        plan(learner, 2)
    write(learner, "zero3")
    asked = plan(learner, 2)
    assert list(asked.strategies) == ["zero3"]
    assert [note.partition(":")[0] for note in asked.notes] == ["ddp", "zero1", "zero2"]


def test_other_demos_have_no_answers_of_yours(learner: Path) -> None:
    refused = CliRunner().invoke(app, ["demo", "--yours", "--mesh", "dp=2"])
    assert refused.exit_code == 2
    assert "--mesh: --yours trains by your own classes, on the CPU; leave it out" in refused.output


def test_progress_says_when_all_four_can_train(learner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in LADDER:
        progress.run()
        assert "refimpl demo --yours" not in capsys.readouterr().out
        write(learner, strategy)
    progress.run()
    assert "refimpl demo --yours" in capsys.readouterr().out
