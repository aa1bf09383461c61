"""The question bank: cards with computed answers, a quiz that grades, a schedule of what to repeat."""

from refimpl.bank.site import export

__all__ = ["export"]
