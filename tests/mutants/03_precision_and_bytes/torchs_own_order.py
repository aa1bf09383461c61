"""torch.sum in fp32: exact enough, and in an order of its own.

task: sum_in_fp32
says: torch.sum has an order of its own
"""


def sum_in_fp32(rows):
    return rows.float().sum(0).to(rows.dtype)
