"""The oracle of chapters 5 and 6: what N ranks train, trained by one process of plain torch that reads all of it."""

import torch
from torch import Tensor

from refimpl.model.data import Batches, corpus
from refimpl.model.gpt import GPT, GPTConfig


def one_process(
    config: GPTConfig, ranks: int, micro_batches: int = 1, ranks_first: bool = False, steps: int = 2
) -> dict[str, Tensor]:
    """Weights after `steps` of AdamW. `ranks_first`: each micro-batch is summed over ranks, and then the sums are."""
    torch.set_num_threads(1)
    batches = Batches(corpus(), context=32, size=2)
    torch.manual_seed(0)
    model = GPT(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = [[a * ranks + r for a in range(micro_batches)] for r in range(ranks)]
    if ranks_first:
        order = [list(column) for column in zip(*order, strict=True)]
    for step in range(steps):
        sums = []
        for inner in order:
            for micro in inner:
                (model(*batches.batch(step, micro)) / micro_batches).backward()
            sums.append([p.grad / ranks if ranks_first else p.grad for p in model.parameters()])  # type: ignore[operator]
            adamw.zero_grad()
        for p, *grads in zip(model.parameters(), *sums, strict=True):
            total = sum(grads[1:], start=grads[0])
            p.grad = total if ranks_first else total / ranks
        adamw.step()
        adamw.zero_grad()
    return dict(model.state_dict())
