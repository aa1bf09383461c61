"""The knobs of the pipeline's chapter: their numbers are the clock's, and every setting can be drawn."""

import itertools

import pytest

from refimpl.notebook.widgets import png
from refimpl.notebook.widgets_pipeline import picture, schedule_knobs, summary, table_of
from refimpl.parallel.pipeline import clock
from refimpl.parallel.pipeline.schedules.named import NAMES, schedule


def test_the_text_has_every_schedule_with_the_clocks_numbers() -> None:
    rows = summary(4, 8, 3).set_index("schedule")
    assert list(rows.index) == list(NAMES)
    for name in NAMES:
        table = schedule(name, 4, 8, 3 if name == "interleaved" else None)
        assert rows.loc[name, "idle"] == f"{clock.share(table):.1%}"
    assert rows.loc["gpipe", "alive at most"] == "8"
    assert rows.loc["1f1b", "alive at most"] == "4"
    assert float(rows.loc["dualpipe", "alive at most"]) == 5  # of one direction's layers each
    assert float(rows.loc["zb-v", "alive at most"]) == 4  # 8 half-sized ones


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_a_table(name: str) -> None:
    knobs = schedule_knobs().knobs
    for sizes in itertools.product(knobs["ranks"], knobs["micro_batches"], knobs["chunks"]):
        table = table_of(name, *sizes)
        assert table.ranks in (sizes[0], sizes[0] + 1)
        clock.play(table)


def test_a_picture_is_drawn() -> None:
    assert png(picture("interleaved", 3, 4, 2)).startswith(b"\x89PNG")
