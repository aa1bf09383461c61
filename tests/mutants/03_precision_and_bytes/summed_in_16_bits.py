"""Every addition is rounded to 16 bits.

task: sum_in_fp32
says: keep the running sum in fp32
"""


def sum_in_fp32(rows):
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
