"""Rows are added two at a time, and the last of an odd number is forgotten.

task: sum_in_fp32
says: row 2 is missing
"""


def sum_in_fp32(rows):
    total = torch.zeros(rows.shape[1])
    for i in range(0, len(rows) - 1, 2):
        total += rows[i].float()
        total += rows[i + 1].float()
    return total.to(rows.dtype)
