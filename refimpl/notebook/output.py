"""A cell's output as an Output widget keeps it."""

from typing import Any


def shown(markdown: str) -> dict[str, Any]:
    """Markdown, which a client without it shows as it is."""
    return {"output_type": "display_data", "metadata": {}, "data": {"text/markdown": markdown, "text/plain": markdown}}
