"""What all_gather gives is read as [B, T, C].

task: gather_tokens
says: the sequences are mixed
"""


def _all_tokens(x, group):
    out = x.new_empty(group.size, *x.shape)
    group.all_gather(out, x.contiguous())
    return out.reshape(x.shape[0], -1, x.shape[2])
