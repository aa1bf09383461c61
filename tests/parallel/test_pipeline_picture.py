"""What a picture shows is what the clock says."""

import pytest

from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.picture import draw, label, text
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule
from refimpl.parallel.pipeline.schedules.table import Cost


@pytest.mark.parametrize("name", NAMES)
def test_a_column_is_a_tick_and_a_dot_is_idle(name: str) -> None:
    table = schedule(name, 4, 8)
    lines = [line.split()[2:] for line in text(table).splitlines()]
    assert len(lines) == 4
    spans = clock.play(table)
    for row, order, idle in zip(lines, table.orders, clock.idle(table), strict=True):
        begin, end = int(spans[order[0]].begin), int(spans[order[-1]].end)
        assert sum(set(cell) == {"."} for cell in row[begin:end]) == idle
        for op in order:
            assert row[int(spans[op].begin)] == label(table, op)


def test_a_fraction_of_a_tick_cannot_be_drawn_as_text() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        text(schedule("1f1b", 2, 2), Cost(0.5))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_figure_has_a_box_an_operation_as_long_as_it_takes(name: str) -> None:
    table = schedule(name, 4, 8)
    cost = Cost(1, 1.5, 2)
    (axis,) = draw(table, cost).axes
    boxes = sorted((round(box.get_y() + box.get_height() / 2), box.get_x(), box.get_width()) for box in axis.patches)
    spans = clock.play(table, cost)
    assert boxes == sorted((table.rank_of(op.stage, op.micro), s.begin, s.end - s.begin) for op, s in spans.items())
