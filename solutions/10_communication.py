"""Chapter 10, communication: fewer bytes, nearer neighbours.

    N   ranks of a group               P   ranks of a node
    n   elements of a gradient         k   elements of it that are sent

`group` is a refimpl Group: `group.rank`, `group.size` (N), and, for contiguous tensors of any
dtype,

    group.all_reduce(x)            # x becomes the ranks' sum, on every rank
    group.reduce_scatter(out, x)   # x [N*s] -> out [s]: this rank's chunk of the sum
    group.all_gather(out, x)       # x [s] -> out [N*s], in rank order
    group.all_to_all(out, x)       # x [N*s] -> out [N*s]: rank i's chunk for this rank becomes
                                   # out's i-th chunk
    group.send_recv(x, to, out, source)   # x goes to rank `to`, out comes from rank `source`

`error` is what earlier steps did not send: fp32, as large as what is compressed, and changed in
place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from refimpl.comm.group import Group


def top_k(grad: Tensor, error: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k elements of grad + error that are largest in magnitude; the rest stays in the
    error.

    grad [n], fp32 or bf16; error [n] fp32, changed in place; k is at least 1, and may be above
    n -> (values [k] in grad's dtype, indices [k] int32, ascending), of min(k, n) elements. Of
    equally large ones the first are taken. Nothing is lost: what is sent and the new error add
    up to grad + error in fp32, also where a value was rounded to grad's dtype. grad keeps its
    values.
    Example: grad [3, -1, 2], error [0, -4, 0], k = 1 -> values [-5], indices [1]; the error is
    [3, 0, 2].
    """
    whole = grad.float() + error
    chosen = whole.abs().argsort(descending=True, stable=True)[:k].sort()[0]
    values = whole[chosen].to(grad.dtype)
    error.copy_(whole)
    error[chosen] -= values.float()
    return values, chosen.int()


def sparse_mean(values: Tensor, indices: Tensor, n: int, group: Group) -> Tensor:
    """The mean over ranks of sparse vectors -> [n] fp32, zeros where nobody has sent anything.

    values [k], fp32 or bf16, and indices [k] int32, without repetition, are this rank's; k is
    the same on all ranks. Two all-gathers: k values in their dtype and k int32 indices. Where
    several ranks have one element, their values add up, in fp32 and in rank order. The mean is
    over all N ranks.
    Example: 2 ranks with [4] at [1] and [2] at [1], n = 3 -> [0, 3, 0].
    """
    k = len(values)
    all_values, all_indices = (
        values.new_empty(group.size * k),
        indices.new_empty(group.size * k),
    )
    group.all_gather(all_values, values.contiguous())
    group.all_gather(all_indices, indices.contiguous())
    total = torch.zeros(n)
    for value, index in zip(all_values.split(k), all_indices.split(k), strict=True):
        total[index.long()] += value.float()
    return total / group.size


def quantize_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """int8 with a scale for each block -> (q [n] int8 in -127..127, scales [ceil(n / block)]
    fp32).

    x [n], fp32 or bf16, finite, perhaps empty, keeps its values. Blocks are runs of `block`
    elements; the last may be shorter. A block's scale is its largest magnitude / 127, and q is
    x / scale, rounded to the nearest integer, in fp32: so q * scale is at most half a scale
    away from x. A block of zeros has scale 0 and q 0. Nothing that is made has more than n
    elements, rounded up to whole blocks.
    Example: x [1, -2, 0, 0, 0.5], block 2 -> q [64, -127, 0, 0, 127], scales
    [2/127, 0, 0.5/127].
    """
    n = len(x)
    padded = x.new_zeros(-(-n // block) * block, dtype=torch.float32)
    padded[:n] = x
    rows = padded.view(-1, block)
    scales = rows.abs().amax(1) / 127
    safe = torch.where(scales > 0, scales, 1.0)  # 0 / 0 is no number
    q = (rows / safe.unsqueeze(1)).round().clamp(-127, 127)
    return q.to(torch.int8).view(-1)[:n], scales


def pack_int4(q: Tensor) -> Tensor:
    """Two numbers a byte: q [n] int8 in -8..7 -> [ceil(n / 2)] uint8, q keeps its values.

    Element 2i stands in the low four bits of byte i, element 2i + 1 in the high ones, as two's
    complement (-1 is 1111). After an odd n the high bits are 0. Example: [1, -1, 7] ->
    [0xF1, 0x07].
    """
    nibbles = q.view(torch.uint8) & 0xF
    packed = nibbles[::2].clone()
    packed[: len(q) // 2] |= nibbles[1::2] << 4
    return packed


def unpack_int4(packed: Tensor, n: int) -> Tensor:
    """The way back: packed [ceil(n / 2)] uint8, as of `pack_int4` -> [n] int8 in -8..7."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=1).view(-1)[:n].to(torch.int8)
    return (nibbles ^ 8) - 8  # 8 to 15 are -8 to -1


def quantized_reduce_scatter(x: Tensor, block: int, group: Group) -> Tensor:
    """A reduce-scatter on int8: x [N*s], fp32 or bf16 -> [s] fp32, this rank's chunk of the sum
    over ranks.

    Integers with different scales cannot be added, so nothing is reduced on the way. Each chunk
    is quantised by itself, as by `quantize_blocks` (s need be no multiple of `block`), this
    rank's own too. Two all-to-alls: N*s int8 and the fp32 scales. What arrives is multiplied by
    its scales and added in fp32, in rank order. x keeps its values.
    """
    parts = [quantize_blocks(chunk, block) for chunk in x.chunk(group.size)]
    q, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    got_q, got_scales = torch.empty_like(q), torch.empty_like(scales)
    group.all_to_all(got_q, q)
    group.all_to_all(got_scales, scales)
    total = torch.zeros(len(x) // group.size)
    for chunk, scale in zip(got_q.chunk(group.size), got_scales.chunk(group.size), strict=True):
        total += chunk.float() * scale.repeat_interleave(block)[: len(chunk)]
    return total


def pack_signs(x: Tensor) -> Tensor:  # given
    """x [n], n a multiple of 8 -> [n / 8] uint8: a bit for each element, 1 where it is 0 or
    more.
    """
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return ((x >= 0).view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_signs(bits: Tensor) -> Tensor:  # given
    """bits [m] uint8 -> [8 m] fp32 of +1 and -1."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((bits.unsqueeze(1) >> places) & 1).view(-1).float() * 2 - 1


def one_bit_mean(x: Tensor, worker: Tensor, server: Tensor, group: Group) -> Tensor:
    """The mean over ranks by one bit an element, twice, each time with an error of its own ->
    [n] fp32, equal bits.

    x [n] fp32, n a multiple of 8 N, keeps its values; worker [n] and server [n / N] fp32 are
    errors, changed in place.

    1. This rank's x + worker becomes signs times one number, its mean magnitude. What that
       misses is the new `worker`. Chunk i of the signs goes to rank i, the number to everybody.
    2. The server, which is every rank for its own chunk: the mean of what all ranks sent, plus
       `server`, becomes signs times its mean magnitude, and what that misses is the new
       `server`. Everybody gets these signs and numbers.
    Sent: an all-to-all and an all-gather of bits (`pack_signs`), n / 8 bytes each in all, and
    two all-gathers of one fp32 number. The sign of 0 is +. Sums are in fp32, in rank order.
    """
    n, ranks = len(x), group.size
    whole = x + worker
    scale = whole.abs().mean().view(1)
    bits = pack_signs(whole)
    worker.copy_(whole - unpack_signs(bits) * scale)
    arrived, scales = torch.empty_like(bits), scale.new_empty(ranks)
    group.all_to_all(arrived, bits)
    group.all_gather(scales, scale)
    mine = server.clone()
    for chunk, each in zip(arrived.chunk(ranks), scales, strict=True):
        mine += unpack_signs(chunk) * each / ranks
    scale, bits = mine.abs().mean().view(1), pack_signs(mine)
    server.copy_(mine - unpack_signs(bits) * scale)
    everyones, scales = bits.new_empty(n // 8), scale.new_empty(ranks)
    group.all_gather(everyones, bits)
    group.all_gather(scales, scale)
    return (unpack_signs(everyones).view(ranks, -1) * scales.unsqueeze(1)).view(-1)


def power_sgd(grad: Tensor, error: Tensor, q: Tensor, group: Group) -> Tensor:
    """PowerSGD's rank-r mean of a matrix: one step of power iteration, begun where the last one
    ended -> [a, b] fp32.

    grad [a, b] fp32, this rank's, keeps its values; error [a, b] fp32 and q [b, r] fp32 are
    changed in place; q is the same on all ranks and stays so; r is at most a. M = grad + error.
    P = the mean over ranks of M q, its columns made orthonormal (torch.linalg.qr). The new q is
    the mean over ranks of M' P, and the result is P q'. The new error is what this rank's own M
    has beyond the result. Two all-reduces, of a r and of b r elements: no more than that is
    ever sent.
    """
    whole = grad + error
    p = whole @ q
    group.all_reduce(p)  # orthonormal columns do not care for the divisor
    p = torch.linalg.qr(p)[0]
    new = whole.T @ p
    group.all_reduce(new)
    q.copy_(new / group.size)
    mean = p @ q.T
    error.copy_(whole - mean)
    return mean


def trust_ratios(weights: Sequence[Tensor], updates: Sequence[Tensor], group: Group) -> Tensor:
    """LAMB under ZeRO: for each layer |w| / |u|, where every rank has a part of each ->
    [layers] fp32.

    weights, updates: for each layer this rank's part of the weight and of Adam's update, of
    equal shapes, fp32 or bf16, perhaps empty: a layer may lie on one rank, or on all. The norms
    are those of the whole layer. Where one of them is 0, the ratio is 1. One all-reduce, of two
    fp32 numbers a layer. Squares are added in fp32.
    Example: a layer cut over 2 ranks, weights [3] and [4], updates [0] and [2] -> 2.5.
    """
    squares = torch.stack([t.float().square().sum() for t in (*weights, *updates)])
    group.all_reduce(squares)
    w, u = squares.sqrt().chunk(2)
    return torch.where((w > 0) & (u > 0), w / u, 1.0)


def two_level_all_reduce(x: Tensor, near: Group, far: Group) -> None:
    """x [n] becomes the sum over all ranks, in place, and only 1 / P of it crosses between
    nodes.

    near: the P ranks of this node. far: the ranks with this place in every node. n is any
    number, of any dtype. One reduce-scatter in the node, one all-reduce across of ceil(n / P)
    elements, one all-gather in the node.
    """
    size = -(-len(x) // near.size)
    whole = x.new_zeros(size * near.size)
    whole[: len(x)] = x
    mine = x.new_empty(size)
    near.reduce_scatter(mine, whole)
    far.all_reduce(mine)
    near.all_gather(whole, mine)
    x.copy_(whole[: len(x)])


def halving_all_reduce(x: Tensor, group: Group) -> None:
    """x [n] becomes the sum over ranks, in place, in 2 log2 N exchanges in place of a ring's 2
    (N - 1) messages.

    N is a power of two; n is any number, of any dtype. Recursive halving: in round i = 0, 1, ..
    exchange with rank XOR 2^i. Of the elements that both still have, the one with bit i = 0
    keeps the first half (rounded up) and sends the other; the one with bit 1 keeps the second.
    Each adds what arrives. The largest message goes to the nearest. Then recursive doubling,
    the rounds backwards: each sends what is complete and receives the other half. 2 n (N - 1) /
    N elements leave a rank, as in a ring, and all ranks have the same bits.
    """
    here, taken = x, []
    for i in range(group.size.bit_length() - 1):
        parts = list(here.tensor_split([(len(here) + 1) // 2]))
        keep = group.rank >> i & 1
        arriving = torch.empty_like(parts[keep])
        other = group.rank ^ 1 << i
        group.send_recv(parts[1 - keep], other, arriving, other)
        here = parts[keep].add_(arriving)
        taken.append((other, parts[keep], parts[1 - keep]))
    for other, mine, theirs in reversed(taken):
        group.send_recv(mine, other, theirs, other)


class SecondShard:
    """ZeRO++'s hpZ for one layer: forward gathers from all ranks, backward from the ranks of
    the own node.

    world: all N ranks; near: the P ranks of this node, which are neighbours in world: P divides
    N, and near.rank is world.rank % P. The layer has N*s elements, of which this rank has the
    primary shard [s].
    """

    def __init__(self, primary: Tensor, world: Group, near: Group) -> None:
        """primary [s], this rank's, of any dtype. Beside it at most one second shard is kept:
        N*s / P elements.
        """
        self.primary, self.world, self.near = primary, world, near
        self.second: Tensor | None = None

    def forward(self) -> Tensor:
        """-> [N*s], the whole layer, gathered over world.

        Part near.rank of it, in P equal parts, is kept from now on. The caller may free or
        overwrite the result: what is kept is memory of its own.
        """
        whole = self.primary.new_empty(self.world.size * len(self.primary))
        self.world.all_gather(whole, self.primary)
        self.second = whole.chunk(self.near.size)[self.near.rank].clone()
        return whole

    def backward(self) -> Tensor:
        """-> [N*s], the whole layer, gathered over near alone.

        RuntimeError without a second shard of these weights.
        """
        if self.second is None:
            raise RuntimeError("no second shard of these weights: call forward first")
        whole = self.second.new_empty(self.near.size * len(self.second))
        self.near.all_gather(whole, self.second)
        return whole

    def step(self, primary: Tensor) -> None:
        """The optimizer has made a new primary shard: the second one is old now, and its memory
        is freed.
        """
        self.primary, self.second = primary, None


def bus_bandwidth(op: str, nbytes: int, ranks: int, seconds: float) -> tuple[float, float]:
    """(algorithm bandwidth, bus bandwidth), bytes a second, as nccl-tests defines them.

    op: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast or send; ValueError for
    another.
    nbytes: of the tensor that one rank *hands in*: an all-gather's own chunk, but a
    reduce-scatter's whole buffer. Algorithm bandwidth is the size of the whole
    buffer / seconds: for an all-gather N * nbytes. Bus bandwidth is that times the bytes which
    each rank must send for each byte of it: 2 (N - 1) / N for an all-reduce, (N - 1) / N for
    the three that move each chunk once, 1 for broadcast and send. So it can be held against the
    link's rate.
    Example: all_reduce of 8e9 bytes on 8 ranks in 0.1 s -> (8e10, 1.4e11).
    """
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "broadcast": 1, "send": 1}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), share)
    if op not in factors:
        raise ValueError(f"{op!r} is none of {', '.join(factors)}")
    algorithm = nbytes * (ranks if op == "all_gather" else 1) / seconds
    return algorithm, algorithm * factors[op]


def best_buckets(
    nbytes: float,
    backward: float,
    alpha: float,
    beta: float,
    most: int,
) -> tuple[int, float]:
    """In how many equal buckets should gradients travel? -> (number, seconds that backward does
    not hide).

    Gradients of `nbytes` bytes come evenly over the `backward` seconds: bucket i of b is full
    at i / b of them. Buckets travel one after the other, each in alpha seconds + beta a byte.
    Exposed is the time from the end of backward until the last has arrived. The number is
    between 1 and `most`; of equally good ones the smallest.
    Example: 100 bytes, 1 s, alpha 0.1, beta 0.005: 1 bucket exposes 0.6 s, 2 expose 0.35 s, 5
    expose 0.2 s, the least.
    """

    def exposed(number: int) -> float:
        done = 0.0
        for i in range(1, number + 1):
            done = max(done, backward * i / number) + alpha + beta * nbytes / number
        return done - backward

    best = min(range(1, most + 1), key=exposed)
    return best, exposed(best)


def bytes_across(
    strategy: str, params: int, nodes: int, micro_batches: int, block: int
) -> dict[str, float]:
    """Bytes that leave a node for other nodes in a step, by {"forward", "backward",
    "gradients"}: gathers, reduction.

    Weights and gradients have 16 bits. What goes to other nodes goes there once: in a gather
    the node sends its 1 / nodes of the weights to each of the others, in a reduce-scatter it
    adds up inside and sends each other node's part of the sum. An all-reduce is a
    reduce-scatter and an all-gather.

    zero3: all three for every micro-batch, over all nodes.
    zero++: as zero3, but the forward gather is int8 (qwZ), backward gathers inside the node
      (hpZ), gradients are int4 (qgZ); with each block of `block` elements, 8 or 4 bits each,
      goes one fp32 scale.
    mics: each node has all weights, in shards. Gathers and the reduce-scatter of every
      micro-batch stay inside; once a step the node's gradients are all-reduced across, in 16
      bits.

    ValueError for another strategy. params is a multiple of nodes * block.
    Example: zero3, 800 parameters, 2 nodes, 1 micro-batch -> 800 bytes each.
    """
    once = params * (nodes - 1) / nodes  # elements
    each = once * micro_batches
    if strategy == "zero3":
        return {"forward": 2 * each, "backward": 2 * each, "gradients": 2 * each}
    if strategy == "zero++":
        return {
            "forward": each * (1 + 4 / block),
            "backward": 0.0,
            "gradients": each * (1 / 2 + 4 / block),
        }
    if strategy == "mics":
        return {"forward": 0.0, "backward": 0.0, "gradients": 2 * 2 * once}
    raise ValueError(f"{strategy!r} is none of zero3, zero++, mics")


def outer_step(
    params: Sequence[Tensor],
    start: Sequence[Tensor],
    momentum: Sequence[Tensor],
    lr: float,
    mu: float,
    group: Group,
) -> None:
    """DiLoCo: after H steps of each rank by itself, one step of all, by Nesterov's momentum.

    params: this rank's weights after its inner steps, fp32 or bf16. start: the weights from
    which all ranks began, and momentum: fp32, both equal on all ranks. All three are changed in
    place, and afterwards equal on all ranks. The outer gradient d is start minus the mean of
    the ranks' params, in fp32. momentum becomes mu momentum + d, start becomes start - lr
    (d + mu momentum), and params go on from there. One all-reduce of fp32 a tensor.
    Example: one rank, params [2], start [1], momentum [0], lr 0.5, mu 0.5: d = -1, momentum -1,
    start and params 1.75.
    """
    for p, begin, m in zip(params, start, momentum, strict=True):
        d = begin - p.float()
        group.all_reduce(d)
        d /= group.size
        m.mul_(mu).add_(d)
        begin.sub_(lr * (d + mu * m))
        p.copy_(begin)


HINTS = {
    "top_k": [
        "What is compressed is grad + error, not grad. What is not sent is the new error.",
        "whole.abs().argsort(descending=True, stable=True)[:k], then in ascending order.",
        "A value in bf16 is not the value in fp32: subtract what was really sent, as fp32.",
    ],
    "sparse_mean": [
        "Two ranks may send the same index. What must then happen to their values?",
        "Gather both, add rank after rank into zeros [n] in fp32, divide by group.size.",
    ],
    "quantize_blocks": [
        "Pad with zeros to whole blocks, view as [blocks, block]; zeros do not change a block's maximum.",
        "0 / 0 is NaN: divide a block of zeros by 1.",
        "round(), then int8: a cast alone cuts off.",
    ],
    "pack_int4": [
        "view(torch.uint8) & 0xF is the two's complement in four bits.",
        "nibbles[::2] are the low halves, nibbles[1::2] << 4 the high ones; the last may be missing.",
    ],
    "unpack_int4": [
        "packed & 0xF and packed >> 4, one after the other: stack them as columns, and flatten.",
        "8 to 15 stand for -8 to -1: subtract 16 there.",
    ],
    "quantized_reduce_scatter": [
        "The integer 127 of one rank is not that of another. So who adds, and when?",
        "Quantise chunk by chunk; an all-to-all of q and one of scales; then multiply and add, source after source.",
        "repeat_interleave(block)[: s] spreads a chunk's scales over its elements.",
    ],
    "one_bit_mean": [
        "The same four lines twice: add the error, compress, keep what was missed, send.",
        "Worker: all_to_all of bits, all_gather of the scale. Server: all_gather of bits and of the scale.",
        "The server compresses mean + server. Its error is that less what it sends, not less what the workers sent.",
    ],
    "power_sgd": [
        "(M1 + M2) q = M1 q + M2 q: the product is linear in M, so a product can be all-reduced in place of M.",
        "P from all-reduced M q by QR; then all-reduce M.T @ P, divide by N, and put it into q.",
        "The error is this rank's: its own M minus the common result.",
    ],
    "trust_ratios": [
        "A norm cannot be added over ranks. What can?",
        "All squares of all layers in one tensor, one all-reduce, then sqrt.",
    ],
    "two_level_all_reduce": [
        "Which collective inside the node leaves each rank with a P-th of the node's sum?",
        "reduce_scatter near, all_reduce far, all_gather near; pad to a multiple of P with zeros.",
    ],
    "halving_all_reduce": [
        "Keep a view of x that shrinks: tensor_split([(len + 1) // 2]), keep the part by bit i of the rank.",
        "Remember (other, mine, theirs) of each round; on the way back send mine and receive into theirs.",
    ],
    "SecondShard": [
        "What does a node need to rebuild the whole layer without any other node? P parts, one a rank.",
        "clone(): a chunk is a view, and keeps the whole layer alive.",
        "After the optimizer's step the second shard has old weights. Forget it.",
    ],
    "bus_bandwidth": [
        "First the size of the whole buffer, then the factor of the operation.",
        "2 (N - 1) / N, (N - 1) / N, or 1. Only the all-gather is handed a chunk of the buffer.",
    ],
    "best_buckets": [
        "Play it: a bucket starts when it is full and the one before has arrived.",
        "min(range(1, most + 1), key=exposed) takes the first of equal ones.",
    ],
    "bytes_across": [
        "Of params elements a node has 1 / nodes, for nodes - 1 others: (nodes - 1) / nodes of them leave it.",
        "A scale adds 4 / block bytes an element. MiCS does not pay for each micro-batch.",
    ],
    "outer_step": [
        "The outer gradient points from where the ranks arrived to where they began: start - mean.",
        "Nesterov as in torch: buf = mu buf + d, then step by d + mu buf.",
        "params.copy_(start) also for bf16; start itself stays fp32.",
    ],
}
