"""Ulysses in transformers' own attention, by DeepSpeed's names.

    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sequence_parallel_size=2, micro_batch_size=1)
    engine, *_ = initialize(model=model, config=config, mpu=mpu)
    batches = UlyssesSPDataLoaderAdapter(loader, sp_rank, sp_group, sp_world_size, device)

From then on a model is called with this rank's run of each sequence, input_ids and position_ids; the attention that was
named sees all tokens of some heads: `parallel/context/ulysses.py`. What transformers masks, it masks for a rank's own
tokens, so masks are dropped and attention is causal, as in DeepSpeed. Unlike there, what only a mask says, packed or
left-padded sequences and windows, is refused where the attention does not read it from elsewhere, heads may be dealt
out unevenly, and a layer's `num_key_value_groups` is as before after the call.
Beside it stand the tiles that a long sequence's MLP and loss are computed in: tiled.py.
DeepSpeed: deepspeed/runtime/sequence_parallel/ulysses_sp.py. Bekman et al. 2025, arXiv:2506.13996.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from refimpl.comm.group import Group
from refimpl.deepspeed.runtime.sequence_parallel import parallel_state_sp
from refimpl.deepspeed.runtime.sequence_parallel.tiled import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from refimpl.deepspeed.sequence.layer import group_of
from refimpl.parallel.context.ulysses import shared_heads, ulysses
from refimpl.ranks.settings import forget_groups

__all__ = [
    "TiledFusedLogitsLoss", "TiledMLP", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "sequence_tiled_compute",
]  # fmt: skip

Attention = Callable[..., tuple[Tensor, Tensor | None]]  # transformers': (module, q, k, v, mask, ..) -> [B, T, h, D]
MASKED = ("sdpa",)  # knows packed sequences and windows by its mask alone


class UlyssesSPAttentionHF:
    """`register_with_transformers` is all there is of it here."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """The named attention of transformers works over ranks from now on; -> the mpu for `initialize`. A collective.

        model_name_or_path: a model, or what `AutoConfig.from_pretrained` takes. None for a size of 1. disable_in_eval:
        in evaluation each rank works alone. The sizes of batch and sequence are what they are at each call.
        ValueError for an attention that the model does not use, is not there, or needs a mask, and for too few heads.
        """
        if sequence_parallel_size == 1:
            return None
        attentions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        config = getattr(model_name_or_path, "config", None)
        if config is None:
            config = import_module("transformers").AutoConfig.from_pretrained(model_name_or_path)
        used = getattr(config, "_attn_implementation", None)
        if used not in (None, core_attn_implementation):
            raise ValueError(
                f"core_attn_implementation='{core_attn_implementation}' does not match model config "
                f"attn_implementation='{used}': give both the same"
            )
        if core_attn_implementation in ("eager", "paged|eager", "flex_attention"):
            raise ValueError(f"{core_attn_implementation} needs a mask of all tokens: use sdpa or flash_attention_2")
        if "/" in core_attn_implementation and core_attn_implementation not in attentions:  # a kernel of the hub
            flash = import_module("transformers.modeling_flash_attention_utils")
            flash.lazy_import_flash_attention(core_attn_implementation)  # loads and registers it
        if core_attn_implementation not in attentions:
            raise ValueError(
                f"{core_attn_implementation} is not a valid attn_implementation: there are "
                f"{', '.join(attentions.valid_keys())}"
            )
        text = config.get_text_config()
        heads = text.num_attention_heads
        shared_heads(heads, getattr(text, "num_key_value_heads", None) or heads, sequence_parallel_size)
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        group = group_of(parallel_state_sp.get_sequence_parallel_group())
        core = attentions[core_attn_implementation]
        if getattr(core, "func", None) is attend:  # registered before
            core = core.args[0]
        forget_groups.append(partial(attentions.__setitem__, core_attn_implementation, core))
        masked = core_attn_implementation in MASKED
        attentions[core_attn_implementation] = partial(attend, core, group, masked, disable_in_eval)
        return parallel_state_sp


def attend(
    core: Attention,
    group: Group,
    masked: bool,
    disable_in_eval: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, H, T/N, D], key, value [B, K, T/N, D] -> [B, T/N, H, D], by `core` over all T tokens of some heads."""
    if disable_in_eval and not module.training:
        return core(module, query, key, value, attention_mask, *args, **options)
    options["position_ids"] = all_positions(options.get("position_ids"), group)
    if masked:
        refuse_masks(options["position_ids"], options.get("sliding_window"))

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = getattr(module, "num_key_value_groups", None)
        module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]
        try:
            return core(module, q, k, v, None, *args, **options)[0].transpose(1, 2)
        finally:
            module.num_key_value_groups = before  # type: ignore[assignment]

    return ulysses(query, key, value, group, local).transpose(1, 2), None


def all_positions(mine: Tensor | None, group: Group) -> Tensor:
    """[B, T/N] -> [B, T]. ValueError for none: each rank would count its tokens from 0."""
    if mine is None:
        raise ValueError("Ulysses needs position_ids at each call of the model: those of this rank's tokens")
    parts = mine.new_empty(group.size, *mine.shape)
    group.all_gather(parts, mine.contiguous(), tag="positions")
    return torch.cat(list(parts), 1)


def refuse_masks(positions: Tensor, window: int | None) -> None:
    """ValueError for what a mask would have to say, and it is dropped."""
    if bool((positions.diff(dim=1) <= 0).any()):
        raise ValueError(
            "position_ids begin anew, as of packed or left-padded sequences, which sdpa knows by a mask alone: use "
            "flash_attention_2, or sequences of their own padded at the right"
        )
    if window is not None and window < positions.shape[1]:
        raise ValueError(
            f"a sliding window of {window} over {positions.shape[1]} tokens, which sdpa knows by a mask "
            "alone: use flash_attention_2, or config.sliding_window = None"
        )


class UlyssesSPDataLoaderAdapter:
    """Batches of all ranks that share sequences, one after the other, of each this rank's run of tokens."""

    def __init__(
        self, dl: Iterable[dict[str, Any]], sp_rank: int, sp_group: ProcessGroup | None, sp_world_size: int, device: Any
    ) -> None:
        """dl: of this rank, dictionaries of tensors [B, T, ..], input_ids, position_ids and labels among them."""
        self.dl, self.rank, self.group = dl, sp_rank, group_of(sp_group)
        self.size, self.device = sp_world_size, device

    def __len__(self) -> int:
        return len(self.dl) * self.size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """ValueError for a batch without position_ids, and for a length that the ranks do not divide."""
        for batch in self.dl:
            here = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in batch.items()}
            for whole in self.group.all_gather_object(here):
                yield self.part(whole)

    def part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """labels become shift_labels: each token's is the one that follows it, which the next rank may have."""
        if "position_ids" not in batch:
            raise ValueError("a batch without position_ids: each rank's tokens need their places in the sequence")
        tokens = batch["input_ids"].shape[1]
        if tokens % self.size:
            raise ValueError(f"a batch of {tokens} tokens over {self.size} ranks: pad it to a multiple")
        if "labels" in batch:
            batch["shift_labels"] = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        run = slice(self.rank * tokens // self.size, (self.rank + 1) * tokens // self.size)
        return {key: x[:, run].to(self.device) if isinstance(x, Tensor) else x for key, x in batch.items()}
