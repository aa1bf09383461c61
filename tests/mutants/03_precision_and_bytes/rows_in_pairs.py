"""Pairs of rows first, then pairs of pairs: another order.

task: sum_in_fp32
says: in row order nothing is lost here
"""


def sum_in_fp32(rows):
    parts = [row.float() for row in rows]
    while len(parts) > 1:
        parts = [sum(parts[i : i + 2][1:], parts[i]) for i in range(0, len(parts), 2)]
    total = parts[0]
    return total.to(rows.dtype)
