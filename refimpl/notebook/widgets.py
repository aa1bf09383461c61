"""A figure with knobs; where nothing can be turned (GitHub, the site, a terminal), a table stands in its place.

    Knobs(draw, table, ranks=[2, 4, 8], dtype=["fp32", "bf16"])

shows `draw(ranks=2, dtype="fp32")` and draws again whenever a slider moves.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Knobs:
    """`draw(**values)` returns a matplotlib Figure; `knobs` lists the values of each slider, the first is the start.

    On the slider numbers lie in order.

    `table`, a DataFrame of the same numbers, is the text form: it is what a stored notebook keeps.
    """

    def __init__(self, draw: Callable[..., "Figure"], table: "pd.DataFrame", **knobs: Sequence[Any]) -> None:
        self.draw, self.table, self.knobs = draw, table, knobs

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """What a notebook displays: the live widget if it has one, else the Markdown table."""
        text = {"text/plain": self.table.to_string(index=False), "text/markdown": markdown(self.table)}
        view: dict[str, Any] = self.widget()._repr_mimebundle_()
        return view | text

    def widget(self) -> Any:
        """The sliders above the picture (an ipywidgets VBox)."""
        import ipywidgets  # type: ignore[import-untyped]

        picture = ipywidgets.Image(format="png")
        sliders = {
            name: ipywidgets.SelectionSlider(
                options=values if isinstance(values[0], str) else sorted(values),
                value=values[0],
                description=name.replace("_", " "),
                style={"description_width": "initial"},
            )
            for name, values in self.knobs.items()
        }

        def turned(_: Mapping[str, Any] | None = None) -> None:
            picture.value = png(self.draw(**{name: slider.value for name, slider in sliders.items()}))

        for slider in sliders.values():
            slider.observe(turned, names="value")
        turned()
        return ipywidgets.VBox([*sliders.values(), picture])


def png(figure: "Figure") -> bytes:
    """The figure as a PNG file, and closed, so that the notebook does not show it once more."""
    import matplotlib.pyplot as plt

    figure.savefig(file := io.BytesIO(), format="png", bbox_inches="tight")
    plt.close(figure)
    return file.getvalue()


def markdown(table: "pd.DataFrame") -> str:
    """A DataFrame as a Markdown table, without its index; numbers to the right."""
    import pandas as pd

    numeric = [pd.api.types.is_numeric_dtype(table[name]) for name in table.columns]
    rows = [list(table.columns), ["---:" if number else "---" for number in numeric], *table.to_numpy(object).tolist()]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
