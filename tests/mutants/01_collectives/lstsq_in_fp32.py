"""Least squares in fp32.

task: fit_alpha_beta
says: digits are lost
"""

import torch


def fit_alpha_beta(sizes, seconds):
    a = torch.tensor([[1.0, s] for s in sizes])
    alpha, beta = torch.linalg.lstsq(a, torch.tensor(list(seconds)).unsqueeze(1)).solution.flatten().tolist()
    return (alpha, beta)
