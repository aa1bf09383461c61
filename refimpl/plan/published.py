"""Runs that others have published, to stand beside what the formulas say. Nothing here is computed.

Narayanan et al. 2021, arXiv:2104.04473, table 1: GPTs on A100 GPUs with 80 GB, 8 in a node; blocks recomputed,
vocabulary 51,200, sequences of 2,048, micro-batches of one. Its table 2: two of these models by ZeRO-3 alone, and so.
Attention was not fused then, with dropout, and no rank had a part of the tokens between cut matrices.
Korthikanti et al. 2022, arXiv:2205.05198, tables 3 and 5: seconds of a step of such GPTs.
Le Scao et al. 2022, arXiv:2211.05100: BLOOM, by ZeRO-1 over 8 x 12 x 4 of these GPUs; the speed at its full batch is
that of BigScience's notes on the training.
Smith et al. 2022, arXiv:2201.11990, section 2.4: MT-NLG, Narayanan's model of 530 billion laid out alike, of whose GPUs
2,240 reach 126 TFLOP/s each, and 159 in his second table: no formula of model and layout can say both.
Black et al. 2022, arXiv:2204.06745: GPT-NeoX-20B on A100 GPUs with 40 GB, as its public configuration lays it out; it
waits for the GPU after each layer, and fuses neither norms nor rotations.
Llama team 2024, arXiv:2407.21783, table 4: 405 billion parameters on H100 GPUs. Its TFLOP/s count no recomputation; a
rank of its pipeline has 7 or 8 chunks of a block each, which divide the bubble.
Mixtures: their own config.json, as far as sizes go, and the sizes that their papers or model cards give.
Runs looked up on 2026-11-22 and 23 in stored copies, which agree with each other but for a data-parallel size that
one has garbled; that follows from the others.
"""

from dataclasses import dataclass, replace
from typing import Any

from refimpl.plan.formulas import Strategy
from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape


@dataclass(frozen=True)
class Run:
    """billions: of parameters. batch: sequences of a step, micro: of a micro-batch. tflops: that a GPU reached.

    scores, sequence: as of `Mesh`.
    """

    billions: float
    shape: Shape
    gpus: int
    tp: int
    pp: int
    cp: int
    batch: int
    tflops: float
    micro: int = 1
    scores: int = 5
    sequence: bool = False

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    def mesh(self, zero: Strategy, recompute: bool = True) -> Mesh:
        """Its layout."""
        return Mesh(
            self.dp, self.pp, self.tp, self.batch, self.micro, zero, recompute,
            cp=self.cp, sequence=self.sequence, scores=self.scores,
        )  # fmt: skip


def megatron(
    billions: float, heads: int, width: int, layers: int, tp: int, pp: int, gpus: int, batch: int, tflops: float = 0
) -> Run:
    shape = Shape(layers, width, heads, 51_200, 2048, hidden=4 * width, kv_heads=heads)
    return Run(billions, shape, gpus, tp, pp, 1, batch, tflops)


MEGATRON = (
    megatron(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    megatron(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    megatron(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    megatron(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    megatron(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    megatron(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    megatron(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    megatron(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    megatron(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    megatron(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)

GPT_175 = Shape(96, 12288, 96, 51_200, 2048, hidden=4 * 12288, kv_heads=96)
ZERO3 = (  # no other axis than data
    Run(174.6, GPT_175, 384, 1, 1, 1, 1536, 144, 4),
    Run(174.6, GPT_175, 768, 1, 1, 1, 1536, 88, 2),
    Run(174.6, GPT_175, 1536, 1, 1, 1, 1536, 44, 1),
    Run(529.6, MEGATRON[8].shape, 640, 1, 1, 1, 2560, 138, 4),
    Run(529.6, MEGATRON[8].shape, 1120, 1, 1, 1, 2240, 98, 2),
    Run(529.6, MEGATRON[8].shape, 2240, 1, 1, 1, 2240, 48, 1),
)
PTD = (  # the same models and as many GPUs, with tensor and pipeline parallelism
    Run(174.6, GPT_175, 384, 8, 12, 1, 1536, 153),
    Run(174.6, GPT_175, 768, 8, 12, 1, 1536, 149),
    Run(174.6, GPT_175, 1536, 8, 12, 1, 1536, 141),
    Run(529.6, MEGATRON[8].shape, 560, 8, 35, 1, 2240, 171),
    Run(529.6, MEGATRON[8].shape, 1120, 8, 35, 1, 2240, 167),
    Run(529.6, MEGATRON[8].shape, 2240, 8, 35, 1, 2240, 159),
)


KORTHIKANTI = (  # seconds with blocks recomputed whole; with their scores alone, under sequence parallelism
    (replace(megatron(22, 64, 6144, 48, 8, 1, 8, 4), micro=4), 1.42, 1.10),
    (megatron(175, 96, 12288, 96, 8, 8, 64, 64), 18.13, 13.75),
    (megatron(530, 128, 20480, 105, 8, 35, 280, 280), 49.05, 37.83),
    (megatron(1008, 160, 25600, 128, 8, 64, 512, 512), 94.42, 71.49),
)
BLOOM_176 = Shape(70, 14_336, 112, 250_880, 2048, 4 * 14_336, 112, positions=False, rest=2 * 14_336)
BLOOM = Run(176.2, BLOOM_176, 384, 4, 12, 1, 2048, 150, 2, scores=2)  # without dropout

MT_NLG = tuple(
    Run(529.6, MEGATRON[8].shape, gpus, 8, 35, 1, 1920, tflops)
    for gpus, tflops in ((2240, 126), (2800, 121), (3360, 113))
)
NEOX = Run(
    20.6, Shape(44, 6144, 64, 50_432, 2048, 4 * 6144, 64, positions=False, tied=False), 96, 2, 4, 1, 1536, 117, 4, 2
)


def llama(context: int, gpus: int, cp: int, batch: int, tflops: float) -> Run:
    """126 blocks: with embedding and head as a block each they make 128, which 16 stages divide."""
    shape = Shape(
        126, 16_384, 128, 128_256, context, hidden=53_248, kv_heads=8, matrices=3, biases="none", positions=False,
        tied=False,
    )  # fmt: skip
    return Run(405, shape, gpus, 8, 16, cp, batch, tflops, scores=0, sequence=True)


TOKENS = 16 * 2**20  # of a step, in each of the three
LLAMA = (
    llama(8192, 8192, 1, TOKENS // 8192, 430),
    llama(8192, 16_384, 1, TOKENS // 8192, 400),
    llama(131_072, 16_384, 16, TOKENS // 131_072, 380),
)


def configuration(
    family: str, layers: int, width: int, heads: int, hidden: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
        "intermediate_size": hidden, "vocab_size": vocab, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


def latent(queries: int | None, routed: int, shared: int, k: int, hidden: int, dense: int) -> dict[str, Any]:
    """DeepSeek's keys; heads of 128 features, and 64 that are rotated."""
    return {
        "q_lora_rank": queries, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": routed, "n_shared_experts": shared, "num_experts_per_tok": k,
        "moe_intermediate_size": hidden, "first_k_dense_replace": dense,
    }  # fmt: skip


def mixtral(layers: int, width: int, heads: int, hidden: int, vocab: int) -> dict[str, Any]:
    more = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    return configuration("mixtral", layers, width, heads, hidden, vocab, **more)


def qwen(family: str, layers: int, width: int, heads: int, hidden: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return configuration(family, layers, width, heads, hidden, 151_936, num_key_value_heads=kv_heads, **more)


def routed(experts: int, k: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": experts, "num_experts_per_tok": k, "moe_intermediate_size": hidden, **more}


# name -> (configuration, billions of parameters, billions that a token meets), as published.
PUBLIC_MIXTURES: dict[str, tuple[dict[str, Any], float, float]] = {
    "Mixtral 8x7B": (mixtral(32, 4096, 32, 14_336, 32_000), 46.7, 12.9),
    "Mixtral 8x22B": (mixtral(56, 6144, 48, 16_384, 32_768), 141, 39),
    "OLMoE": (configuration("olmoe", 16, 2048, 16, 1024, 50_304, num_experts=64, num_experts_per_tok=8), 6.9, 1.3),
    "Qwen1.5-MoE-A2.7B": (
        qwen("qwen2_moe", 24, 2048, 16, 5632, 16, **routed(60, 4, 1408, shared_expert_intermediate_size=5632)),
        14.3, 2.7,
    ),
    "Qwen2-57B-A14B": (
        qwen("qwen2_moe", 28, 3584, 28, 18_944, 4, **routed(64, 8, 2560, shared_expert_intermediate_size=20_480)),
        57, 14,
    ),
    "Qwen3-30B-A3B": (qwen("qwen3_moe", 48, 2048, 32, 6144, 4, head_dim=128, **routed(128, 8, 768)), 30.5, 3.3),
    "Qwen3-235B-A22B": (qwen("qwen3_moe", 94, 4096, 64, 12_288, 4, head_dim=128, **routed(128, 8, 1536)), 235, 22),
    "GLM-4.5": (
        configuration(
            "glm4_moe", 92, 5120, 96, 12_288, 151_552, num_key_value_heads=8, head_dim=128, attention_bias=True,
            use_qk_norm=True, n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8,
            moe_intermediate_size=1536, first_k_dense_replace=3,
        ), 355, 32,
    ),
    "gpt-oss-120b": (
        configuration(
            "gpt_oss", 36, 2880, 64, 2880, 201_088, num_key_value_heads=8, num_local_experts=128, num_experts_per_tok=4
        ), 117, 5.1,
    ),
    "DeepSeek-V2-Lite": (
        configuration("deepseek_v2", 27, 2048, 16, 10_944, 102_400, **latent(None, 64, 2, 6, 1408, 1)), 15.7, 2.4
    ),
    "DeepSeek-V2": (
        configuration("deepseek_v2", 60, 5120, 128, 12_288, 102_400, **latent(1536, 160, 2, 6, 1536, 1)), 236, 21
    ),
    "DeepSeek-V3": (
        configuration("deepseek_v3", 61, 7168, 128, 18_432, 129_280, **latent(1536, 256, 1, 8, 2048, 3)), 671, 37
    ),
    "Kimi K2": (
        configuration("kimi_k2", 61, 7168, 64, 18_432, 163_840, **latent(1536, 384, 1, 8, 2048, 1)), 1040, 32.6
    ),
}  # fmt: skip
