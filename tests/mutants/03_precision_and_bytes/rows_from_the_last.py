"""From the last row to the first.

task: sum_in_fp32
says: in row order nothing is lost here
"""


def sum_in_fp32(rows):
    total = rows[-1].float()
    for row in reversed(rows[:-1]):
        total += row
    return total.to(rows.dtype)
