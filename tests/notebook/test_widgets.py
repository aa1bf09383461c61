"""A figure with knobs draws again when one is turned, and its text form is the table."""

import matplotlib.pyplot as plt
import pandas as pd

from refimpl.notebook.widgets import Knobs, markdown

TABLE = pd.DataFrame({"stage": ["ddp", "zero3"], "GB": [16.0, 4.0]})


def test_a_turned_knob_draws_again_with_its_value():
    drawn = []

    def draw(ranks, dtype):
        drawn.append((ranks, dtype))
        return plt.figure()

    box = Knobs(draw, TABLE, ranks=[2, 4], dtype=["fp32", "bf16"]).widget()
    slider, _, picture = box.children
    assert drawn == [(2, "fp32")]
    slider.value = 4
    assert drawn == [(2, "fp32"), (4, "fp32")]
    assert bytes(picture.value).startswith(b"\x89PNG")
    assert plt.get_fignums() == [], "a figure left open would be shown once more by the notebook"


def test_it_starts_at_the_first_value_and_numbers_lie_in_order():
    knobs = Knobs(lambda **_: plt.figure(), TABLE, ranks=[4, 1, 64, 2], dtype=["fp32", "bf16"])
    ranks, dtype, _ = knobs.widget().children
    assert (ranks.value, list(ranks.options)) == (4, [1, 2, 4, 64])
    assert (dtype.value, list(dtype.options)) == ("fp32", ["fp32", "bf16"])


def test_the_text_form_is_the_table():
    bundle = Knobs(lambda n: plt.figure(), TABLE, n=[1])._repr_mimebundle_()
    assert bundle["text/markdown"] == markdown(TABLE)
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_numbers_stand_right_and_words_left():
    assert markdown(TABLE) == "| stage | GB |\n| --- | ---: |\n| ddp | 16.0 |\n| zero3 | 4.0 |"
