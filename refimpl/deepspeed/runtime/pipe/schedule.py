"""DeepSpeed's words for what a pipeline stage does, step by step: to read, print and compare, and for who runs his own.

All stages take their steps together, a forward or a backward in each. Of p stages, micro-batch k is at stage s

    in TrainSchedule        forward in step s + 2k, backward in step 2p - 1 - s + 2k: of 2 (m + p - 1)        1F1B
    in InferenceSchedule    in step s + k: of m + p - 1

so forwards and backwards take turns on every stage, and a value that is made in one step is sent in the next one. In
DualPipeVSchedule ranks have no steps in common: what is sent and received waits for the next CommitP2P. The
engine itself runs the tables of `refimpl.parallel.pipeline.schedules`, in which nobody waits for a common step.
DeepSpeed: deepspeed/runtime/pipe/schedule.py.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar


class PipeInstruction:
    """One command to a stage; its options are its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Average the gradients over the replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of weights that stages share."""


class BufferOpInstruction(PipeInstruction):
    """A command for one buffer, which has a micro-batch's input and output."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read the inputs, or the labels."""


class ForwardPass(BufferOpInstruction): ...


class BackwardPass(BufferOpInstruction): ...


class SendActivation(BufferOpInstruction): ...


class RecvActivation(BufferOpInstruction): ...


class SendGrad(BufferOpInstruction): ...


class RecvGrad(BufferOpInstruction): ...


class CommitP2P(PipeInstruction):
    """Begin the sends and receives said since the last one, together, and wait for them."""


class PipeSchedule(ABC):
    """Of one stage; iterating gives its commands, a list a step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        """ValueError for a stage that there is not, and for no micro-batch."""
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise ValueError(f"stage {stage_id} of {stages}, {micro_batches} micro-batches")
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The commands of each step."""

    @abstractmethod
    def num_pipe_buffers(self) -> int:
        """Buffers that a stage needs; commands number them from 0."""

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def buffer(self, micro: int) -> int:
        """That of a micro-batch."""
        return micro % self.num_pipe_buffers()

    def exists(self, micro: int) -> bool:
        return 0 <= micro < self.micro_batches


class InferenceSchedule(PipeSchedule):
    """Forward alone, with two buffers by turns."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            commands: list[PipeInstruction] = []
            if self.exists(micro) and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(self.buffer(micro)))
            send = [SendActivation(self.buffer(micro - 1))] if self.exists(micro - 1) and not self.is_last_stage else []
            receive = [RecvActivation(self.buffer(micro))] if self.exists(micro) and not self.is_first_stage else []
            # Of two neighbours one sends first and the other one receives: neither waits for the other for ever.
            commands += [*receive, *send] if self.stage_id % 2 else [*send, *receive]
            if self.exists(micro):
                commands.append(ForwardPass(self.buffer(micro)))
            yield commands

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            (micro, forward), (before, _) = self.at(step), self.at(step - 1)
            commands = self.messages(micro, before, forward)
            if self.exists(micro):
                if forward and (self.is_first_stage or self.is_last_stage):
                    commands.append(LoadMicroBatch(self.buffer(micro)))
                commands.append((ForwardPass if forward else BackwardPass)(self.buffer(micro)))
            if step == total - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def at(self, step: int) -> tuple[int, bool]:
        """(micro-batch, whether it goes forward); one that does not exist where the stage idles."""
        forward = (step - self.stage_id) % 2 == 0
        begin = self.stage_id if forward else 2 * self.stages - 1 - self.stage_id
        return (step - begin) // 2, forward

    def messages(self, micro: int, before: int, forward: bool) -> list[PipeInstruction]:
        """What this step's micro-batch needs, and what the one before it, which went the other way, has made."""
        found: list[PipeInstruction] = []
        if forward and not self.is_first_stage:
            found += [SendGrad(self.buffer(before))] if self.exists(before) else []
            found += [RecvActivation(self.buffer(micro))] if self.exists(micro) else []
        if not forward and not self.is_last_stage:
            found += [RecvGrad(self.buffer(micro))] if self.exists(micro) else []
            found += [SendActivation(self.buffer(before))] if self.exists(before) else []
        return found

    def num_pipe_buffers(self) -> int:
        """As many as micro-batches are alive here, two at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class DualPipeVSchedule(PipeSchedule):
    """Two stages a rank, phase 0 on the way down and 1 on the way back. Backwards are whole.

    In the words below a letter is an instruction and the digit its phase. C is CommitP2P, w one that stands where
    DeepSeek's have a weight half, and is none without backward.
    """

    WORDS: ClassVar = {
        "r": RecvActivation, "F": ForwardPass, "s": SendActivation, "g": RecvGrad, "B": BackwardPass, "t": SendGrad
    }  # fmt: skip

    def __init__(self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False) -> None:
        """ValueError for fewer than two micro-batches a rank."""
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches < 2 * stages:
            raise ValueError(f"DualPipeV over {stages} ranks needs {2 * stages} micro-batches, not {micro_batches}")
        self.forward_only = forward_only

    def steps(self) -> Iterator[list[PipeInstruction]]:
        seen = Counter[str]()
        for sentence in self.sentences():
            yield [command for word in sentence.split() for command in self.commands(word, seen)]
        yield [CommitP2P(), *([] if self.forward_only else [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()])]

    def sentences(self) -> Iterator[str]:
        r, rest = self.stage_id, self.stages - 1 - self.stage_id
        yield from ["r0 C F0 s0"] * (2 * rest)
        yield "r0"
        for i in range(r + 1):
            yield f"C F0 r0 r1 C F1 {'' if self.is_last_stage and i == r else 's1'} s0"
        yield from ["g1 C B1 t1 r1 w C F1 s1"] * rest
        yield ("g1 C F0 B1 s0 t1" if rest else "C F0 s1 g1 C B1 s0 t1") + " r1 g0 C F1 B0 s1 t0"
        yield from ["r0 g1 C F0 B1 s0 t1 r1 g0 C F1 B0 s1 t0"] * (self.micro_batches - 2 * self.stages + r)
        yield from ["g1 C B1 t1 r1 g0 C F1 B0 s1 t0"] * rest
        yield from ["g1 C B1 t1 g0 C B0 t0"] * (r + 1)
        yield from ["w g0 C B0 t0"] * rest
        yield from ["w"] * (r + 1)

    def commands(self, word: str, seen: Counter[str]) -> list[PipeInstruction]:
        """Of one word, by the micro-batches that it was said of so far. None for messages beyond the V's ends."""
        if word in ("C", "w"):
            return [] if word == "w" and self.forward_only else [CommitP2P()]
        nowhere = ["r0", "s1", "g1", "t0"] * self.is_first_stage + ["s0", "r1", "g0", "t1"] * self.is_last_stage
        if word in nowhere or (self.forward_only and word[0] in "gBt"):
            return []
        phase = int(word[1])
        buffer_id = phase * self.micro_batches + seen[word]
        seen[word] += 1
        load = [LoadMicroBatch(buffer_id)] if word == "F0" and self.is_first_stage else []
        return [*load, self.WORDS[word[0]](buffer_id, phase=phase)]

    def num_pipe_buffers(self) -> int:
        """One a phase and micro-batch."""
        return 2 * self.micro_batches


class DataParallelSchedule(PipeSchedule):
    """One stage: micro-batch after micro-batch."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro in range(self.micro_batches):
            last: list[PipeInstruction] = [ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        return 1
