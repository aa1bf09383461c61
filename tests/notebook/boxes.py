"""What a test finds in an ipywidgets box."""

from typing import Any

import ipywidgets


def parts(box: Any, kind: type) -> list[Any]:
    """The widgets of a kind in a box, at any depth, in order."""
    found = [box] if isinstance(box, kind) else []
    return found + [part for child in getattr(box, "children", []) for part in parts(child, kind)]


def said(widget: Any) -> str:
    """What its outputs show."""
    return "\n".join(o["data"]["text/markdown"] for out in parts(widget, ipywidgets.Output) for o in out.outputs)
