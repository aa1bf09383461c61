"""What `new_lesson` lays out: the smallest chapter that is complete, an average over ranks.

NN_name stands for the chapter's name, TITLE for the words in it, NUMBER for its number without a zero before it.
"""

COURSE = '''\
# %% [markdown]
# # NUMBER · TITLE: what it gains, in a few words
#
# Say in three sentences what hurts, what helps, and which chapters one needs first.

# %% [markdown]
# ## 1. The pain
#
# Run the strategy of the chapter before until it hurts, and count it: bytes kept, bytes sent, or seconds. Ask before
# you tell: at least four predictions a chapter, each just above the cell that answers it.

# %%
# %load_ext refimpl.notebook

# %% tags=["hide-input"]
from refimpl.notebook import predict

predict(
    "How many bytes of 16 does each of 2 ranks send in an all-reduce?",
    2 * 16 / 2,
    unit="bytes",
    why="2n(N-1)/N",
)

# %% [markdown]
# ## 2. The idea
#
# One picture (a `mermaid` block, or matplotlib) and one formula. Say what each letter counts.

# %% tags=["hide-input"]
predict("Rank r of 2 holds 10 r. What is the mean over the ranks?", (0 + 10) / 2)

# %% [markdown]
# ## 3. Build it
#
# A few small cells on real ranks, each with one new thing. A task of the exercises is written here. What stands around
# it does not print its solution, but what tells a right answer from others:


# %%
# %%task NN_name mean_of_ranks
def mean_of_ranks(group: Group, x: Tensor) -> Tensor:
    """x [n] on every rank -> [n]: the mean over ranks, the same on each. x must keep its values.

    One all-reduce of n elements.
    Example with 2 ranks: x = [1, 2] on rank 0 and [3, 6] on rank 1 -> [2, 4] on both.
    """
    raise NotImplementedError("mean_of_ranks")


# %% tags=["hide-input"]
predict("What happens first?", ["the sum over ranks", "the division by N"], order=True)


# %%
# %%ranks 2
x = torch.arange(4.0) + 10 * rank
total = x.clone()
group.all_reduce(total)
print("the sum over ranks:", total.tolist(), "| sent:", group.ledger.sent_bytes())

# %% [markdown]
# ## 4. Read it
#
# The code of refimpl that does it in earnest: `show.source`, or `show.diff` to the stage before.

# %% [markdown]
# ## 5. Measure it
#
# The formula beside the count in one table (`show.compare`), and one plot. They agree, or the cell names the residual.

# %% [markdown]
# ## 6. Break it
#
# Plant one famous bug, show how it looks (a hang, NaN, silent divergence), and how one finds it. A cell that is to fail
# has the tag `raises-exception`; one whose output depends on the clock has `nbval-ignore-output`.

# %% tags=["hide-input"]
predict("Gradients are summed over 2 ranks, not averaged. How many times too large?", 2)

# %% [markdown]
# ## 7. Prove it
#
# Link the exercises, the quiz, the tests and the code, DeepSpeed's own file, and the paper's section.
#
# - **Exercises:** [exercises/NN_name](../exercises/NN_name/exercise.py): `pytest exercises/NN_name`
# - **Code:** [refimpl/comm/group.py](../refimpl/comm/group.py)
'''

SOLUTION = '''\
"""Chapter NN, TITLE: what is built here, in one sentence.

`group` is a refimpl Group: `group.rank`, `group.size`, and

    group.all_reduce(x, "mean")      # in place: x becomes the mean over the ranks

Letters in shapes: n elements.
"""

from torch import Tensor

from refimpl.comm.group import Group


def mean_of_ranks(group: Group, x: Tensor) -> Tensor:
    """x [n] on every rank -> [n]: the mean over ranks, the same on each. x must keep its values.

    One all-reduce of n elements.
    Example with 2 ranks: x = [1, 2] on rank 0 and [3, 6] on rank 1 -> [2, 4] on both.
    """
    mean = x.clone()
    group.all_reduce(mean, "mean")
    return mean


HINTS = {
    "mean_of_ranks": [
        "An all-reduce works in place, and x must keep its values.",
        "Clone x first, then all-reduce the clone with the operation that the task is named after.",
    ],
}
'''

GRADER = '''\
"""Grades chapter NN: the result at 2, 3 and 4 ranks, and what each rank sent."""

import torch

from refimpl.grading.compare import equal
from refimpl.grading.grade import on_ranks
from refimpl.grading.memory import untouched
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup, all_done, same_traffic


@on_ranks(2, 3, 4)
def test_mean_of_ranks(answer: Answer, group: WatchedGroup) -> None:
    for n, dtype in ((5, torch.float32), (1, torch.float32), (4, torch.bfloat16)):
        case(f"{n} elements of {dtype}")
        watched, oracle = group.fresh(), group.oracle()
        inputs = [(torch.arange(n) + 10.0 * rank).to(dtype) for rank in range(group.size)]
        x, mine = inputs[group.rank].clone(), inputs[group.rank]
        oracle.all_reduce(mine.clone(), "mean")
        with untouched(x=x):
            found = answer.mean_of_ranks(watched, x)
        known = {"it is your own x, nothing of the other ranks is in it": mine}
        equal(found, torch.stack(inputs).mean(0), "the mean", ranks=group.size, known=known, rtol=1e-2)
        same_traffic(watched, oracle, "mean_of_ranks", itemsize=dtype.itemsize)
        all_done(watched, "mean_of_ranks")
'''

MUTANT = '''\
"""The sum where the mean is asked.

task: mean_of_ranks
says: summed over the ranks, not averaged
"""


def mean_of_ranks(group, x):
    total = x.clone()
    group.all_reduce(total)
    return total
'''
