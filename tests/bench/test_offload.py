"""The rows of `refimpl bench offload`: the same work from every home, and bytes that follow the formula."""

from pathlib import Path

from refimpl.bench.offload import ADAMW, ADAMW_AT_HOST, HOST, LATE, PLAIN, measure
from refimpl.bench.race import Turns
from refimpl.bench.zero import Workload


def test_every_home_does_the_same_work_and_moves_its_bytes(tmp_path: Path) -> None:
    (heat,) = measure([2], [Workload(200_000, context=16, turns=Turns(1, 2))], [3], tmp_path)
    rows = {row.home: row for row in heat if not row.home.startswith("DeepSpeed")}
    pages = 16 * 20 * 4096 / heat[0].parameters  # what is moved is rounded up to whole pages
    formula = {PLAIN: 0, HOST: 0, "Disk: optimizer": 12, LATE: 12, "Disk: optimizer, gradients": 16, "Disk: all": 22}
    formula |= {ADAMW: 0, ADAMW_AT_HOST: 0}
    assert list(rows) == list(formula)
    for home, a_parameter in formula.items():  # both ways, divided by two ranks
        assert a_parameter <= rows[home].moved <= a_parameter + (pages if a_parameter else 0)
    assert rows[PLAIN].of_plain == rows[ADAMW].of_plain == 1
    assert rows[ADAMW_AT_HOST].of_plain == rows[ADAMW_AT_HOST].step_ms / rows[ADAMW].step_ms
    assert not list(tmp_path.iterdir())
