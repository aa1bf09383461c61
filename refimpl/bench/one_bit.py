"""1-bit Adam, 0/1 Adam and 1-bit LAMB beside Adam and LAMB on the demo's text: the loss reached, the bytes sent.

Every optimizer trains the same GPT from the same weights on the same micro-batches, under DDP in fp32, at one rate
for the kinds of Adam and one for those of LAMB; the 1-bit ones compress after a fifth of the steps. The loss is the
mean over the last eighth of the steps and all ranks; the bytes are what the ledger has counted of gradients and momenta
in the compressed steps, beside the 4 Psi (N-1)/N that DDP sends of fp16.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from refimpl import launch
from refimpl.comm.group import Group
from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.optim.lamb import Lamb
from refimpl.optim.one_bit_adam import OneBitAdam
from refimpl.optim.one_bit_lamb import OneBitLamb
from refimpl.optim.zero_one_adam import ZeroOneAdam
from refimpl.zero.ddp import DDP

RATES = {"adam": 1e-3, "lamb": 1e-2}
BESIDE = {"AdamW": "AdamW", "OneBitAdam": "AdamW", "ZeroOneAdam": "AdamW", "Lamb": "Lamb", "OneBitLamb": "Lamb"}


@dataclass(frozen=True)
class Row:
    """One optimizer's run."""

    optimizer: str
    ranks: int
    steps: int
    frozen_after: int  # steps; 0: never
    loss: float
    of_uncompressed: float  # loss / that of AdamW or Lamb
    sent_a_step: float  # bytes of gradients and momenta a rank sends, the mean over the compressed steps
    of_fp16: float | None  # ... / what DDP sends in fp16; None where nothing is sent


def optimizers(steps: int) -> dict[str, Callable[[list[nn.Parameter]], Optimizer]]:
    """By name, compressing after a fifth of the steps."""
    freeze, adam, lamb = max(1, steps // 5), RATES["adam"], RATES["lamb"]
    return {
        "AdamW": lambda params: torch.optim.AdamW(params, lr=adam, weight_decay=0.0, fused=True),
        "OneBitAdam": lambda params: OneBitAdam(params, lr=adam, freeze_step=freeze),
        "ZeroOneAdam": lambda params: ZeroOneAdam(
            params, lr=adam, var_freeze_step=freeze, local_step_scaler=freeze, local_step_clipper=4
        ),
        "Lamb": lambda params: Lamb(params, lr=lamb),
        "OneBitLamb": lambda params: OneBitLamb(params, lr=lamb, freeze_step=freeze),
    }


def measure(names: Sequence[str], model: GPTConfig, ranks: int, steps: int, batch: int = 4) -> list[Row]:
    """A row for each of `names`, and for what they are compared with. KeyError for another name.

    ValueError for a context longer than the text.
    """
    Batches(corpus(), model.context, batch)
    wanted = [name for name in BESIDE if name in names or name in {BESIDE[other] for other in names}]
    losses = dict[str, float]()
    rows = []
    for name in wanted:
        loss, sent, numel = launch.run(train, name, model, steps, batch, ranks=ranks, timeout=None)[0]
        losses[name] = loss
        fp16 = 4 * numel * (ranks - 1) / ranks
        frozen = 0 if BESIDE[name] == name else max(1, steps // 5)
        share = sent / fp16 if sent else None
        rows.append(Row(name, ranks, steps, frozen, loss, loss / losses[BESIDE[name]], sent, share))
    return rows


def train(name: str, config: GPTConfig, steps: int, batch: int) -> tuple[float, float, int]:
    """On each rank: the last steps' mean loss, bytes sent a step once compressed, the model's parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = Group.world()
    model = GPT(config).to(group.device)
    optimizer = optimizers(steps)[name](list(model.parameters()))
    stage = DDP(model, optimizer, group)
    batches = Batches(corpus(), config.context, batch)
    last, sent = torch.zeros((), dtype=torch.float64, device=group.device), 0
    warnings.filterwarnings("ignore", message=".*elements had no gradient")  # of bytes that the text does not have
    for step in range(steps):
        group.ledger.reset()
        loss = model(*batches.batch(step, group.rank, group.device))
        stage.backward(loss)
        stage.step()
        if step >= steps - max(1, steps // 8):
            last += loss.detach() / max(1, steps // 8)
        if step >= max(1, steps // 5):
            tags = group.ledger.sent_bytes("tag")
            sent += tags.get("gradients", 0) + tags.get("momentum", 0)
    group.all_reduce(last, "mean")
    return last.item(), sent / max(1, steps - max(1, steps // 5)), sum(p.numel() for p in model.parameters())


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| optimizer | loss | / uncompressed | bytes a step | / fp16's |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.optimizer} | {row.loss:.3f} | {row.of_uncompressed:.3f} | {row.sent_a_step:,.0f} | "
        + (f"1 / {1 / row.of_fp16:.1f} |" if row.of_fp16 else "- |")
        for row in rows
    ]
    return "\n".join(lines)
