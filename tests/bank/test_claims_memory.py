"""What cards claim of memory: of the loss, of a chain of blocks, and of state on a disk, counted."""

from pathlib import Path

import pytest
import torch
from torch import nn
from worlds import run

from refimpl.activation.budget import every
from refimpl.activation.chain import count
from refimpl.measure.memory import MemoryMeter
from refimpl.model.gpt import GPT, GPTConfig
from refimpl.notebook import twin
from refimpl.offload.blocks import PAGE, pages
from refimpl.offload.homes import Disk
from refimpl.zero.offload.parts import Part

CONFIG = GPTConfig(vocab=256, context=32, width=64, layers=2, heads=2)


def test_the_backward_of_the_loss_holds_14_bytes_a_logit() -> None:
    """The logits in bf16 and their log-softmax in fp32, then the gradients of both fp32 tensors."""
    tokens, vocab = 64, 5000
    torch.manual_seed(0)
    head = nn.Linear(4, vocab, bias=False).bfloat16()
    meter = MemoryMeter(lambda: {"parameters": head.parameters()})
    with meter:
        logits = head(torch.randn(tokens, 4, dtype=torch.bfloat16))
        loss = nn.functional.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long))
        kept = meter.now()["activations"]
        meter.reset_peak()
        loss.backward()
    each = tokens * vocab
    assert 6 * each <= kept < 6.1 * each
    assert 14 * each <= meter.at_peak["activations"] + meter.at_peak["other"] < 14.1 * each


def test_the_least_peak_is_one_block_of_a_transformer_and_a_square_root_of_thin_layers() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 32)
    chains = {
        1: list(GPT(GPTConfig(vocab=64, context=16, width=32, layers=9, heads=2)).blocks),
        3: [nn.Tanh() for _ in range(9)],  # keeps its result alone, which is the next one's input
    }
    for least, blocks in chains.items():
        peaks = {k: count(every(k, 9), blocks, x) for k in (1, 3, 9)}
        assert min(peaks, key=lambda k: peaks[k]) == least


def moved(homes: tuple[str, ...], micro_batches: int, folder: Path) -> tuple[int, int, int, list[int]]:
    """On every rank: bytes read and written in the second step, bytes on the disk, the sizes of its shards."""
    disk = Disk(folder)
    stage = twin.start("zero3", CONFIG, **dict.fromkeys(homes, disk))
    batches, ranks = twin.data(), stage.group.size
    for step in range(2):
        read, written = disk.file.read_bytes, disk.file.written_bytes
        for a in range(micro_batches):
            loss = stage.model(*batches.batch(step, a * ranks + stage.group.rank))
            stage.backward(loss / micro_batches, sync=a == micro_batches - 1)
        stage.step()
    shards = [bucket.padded // ranks for bucket in stage.buckets]
    return disk.file.read_bytes - read, disk.file.written_bytes - written, disk.file.end, shards


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("away", ["optimizer", "optimizer parameter", "optimizer parameter gradient"])
def test_a_step_reads_and_writes_the_cards_bytes(away: str, micro_batches: int, tmp_path: Path) -> None:
    """fp32 and AdamW: 24 for the update; weights 8 a micro-batch and 4 a step; gradients 8 a micro-batch."""
    homes = tuple(f"{what}_home" for what in away.split())
    for read, written, on_disk, shards in run(moved, homes, micro_batches, tmp_path, ranks=2):
        states, fours = (sum(pages(size * n) for n in shards) for size in (12, 4))
        weights, gradients = fours * ("parameter" in away), fours * ("gradient" in away)
        assert read == states + micro_batches * (2 * weights + gradients)
        assert written == states + weights + micro_batches * gradients
        assert on_disk == states + weights + gradients


def buffers(count: int, gradients: bool, folder: Path) -> tuple[int, int]:
    """Bytes of host memory for the disk between backward and step, and elements of the longest part."""
    disk = Disk(folder, count)
    more = {"gradient_home": disk} if gradients else {}
    stage = twin.start("zero2", CONFIG, optimizer_home=disk, sub_group_size=4096, **more)
    stage.backward(stage.model(*twin.data().batch(0, 0)))
    parts: list[Part] = stage.update.parts  # type: ignore[attr-defined]
    return MemoryMeter(stage.tensors).now()["offload buffers"], max(len(part.weights) for part in parts)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_buffers_take_12_bytes_an_element_of_a_part_and_16_with_gradients(count: int, tmp_path: Path) -> None:
    """A page of them is for parameters; two buffers more carry gradients away."""
    [(plain, part)] = run(buffers, count, False, tmp_path, ranks=1)
    assert part == 4096
    assert plain == count * 12 * part + PAGE
    [(with_gradients, _)] = run(buffers, count, True, tmp_path, ranks=1)
    assert with_gradients == count * 16 * part + 2 * 4 * part + PAGE
