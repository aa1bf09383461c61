"""Probabilities are compared in bf16.

task: top_k_gate
says: compared in 16 bits
"""

import torch


def top_k_gate(logits, k):
    p = torch.softmax(logits.float(), -1)
    experts = torch.sort(p.bfloat16(), dim=-1, descending=True, stable=True).indices[:, :k]
    w = p.gather(1, experts)
    return (experts, w / w.sum(1, keepdim=True) if k > 1 else w)
