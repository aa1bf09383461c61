"""What cards say of pipelines and no other test shows."""

from refimpl.bank.card import Order
from refimpl.bank.load import load
from refimpl.parallel.pipeline.schedules.named import schedule


def test_the_order_of_the_card_is_the_tables() -> None:
    card = load()["pipeline-order-1f1b"]
    assert isinstance(card, Order)
    words = {"F": "Forward", "B": "Backward"}
    order = schedule("1f1b", 3, 4).orders[0]
    assert list(card.items) == [f"{words[op.kind]} of micro-batch {op.micro}" for op in order]
