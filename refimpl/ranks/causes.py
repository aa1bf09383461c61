"""An error is often wrapped: by torch, by a compiler, by us. What tells them apart may stand in any of the layers."""

from collections.abc import Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or while, and so on, outermost first. None has none."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
