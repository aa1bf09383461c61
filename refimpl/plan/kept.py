"""What autograd keeps of blocks for backward, in bytes on a rank, and what of it goes through the GPU's memory.

What a block keeps is what its layers hand on to each other: inputs of norms and of matrices, queries, keys, values,
what an activation takes and gives (`transformer.py`). It is written and read in forward, once more if forward runs
twice, read again in backward, and its gradient is written and read: 5 or 7 times its bytes, which no product hides.
"""

from refimpl.plan.mesh import Mesh
from refimpl.plan.shape import Shape, most
from refimpl.plan.stages import kinds, layers_of, mixtures_of


def activations(shape: Shape, mesh: Mesh, stage: int = 0) -> int:
    """What autograd keeps for backward on a stage at its fullest, of as many micro-batches as 1F1B has alive there;
    tokens' numbers aside.

    With `recompute` each block keeps its input, and one block, or the head, is there whole at a time. Temporaries come
    on top, as while the loss is computed 8 bytes a logit.
    """
    alive = min(mesh.pp - stage, mesh.micro_batches)
    layers, mixtures = layers_of(shape, mesh, stage), mixtures_of(shape, mesh, stage)
    dense, mixed = kept_of_blocks(shape, mesh)
    last = kept_of_head(shape, mesh) if stage == mesh.pp - 1 else 0
    if not mesh.recompute:
        return alive * ((layers - mixtures) * dense + mixtures * mixed) + last
    border = mesh.tokens(shape) * shape.width * mesh.itemsize // mesh.between
    block = max(dense if layers > mixtures else 0, mixed if mixtures else 0)
    return alive * layers * border + max(block - border, last)


def moved(shape: Shape, mesh: Mesh) -> int:
    """Bytes of a step that blocks write to memory and read between large products, on the stage with most of them."""
    dense, mixed = kept_of_blocks(shape, mesh)
    times = 2 * (2 if mesh.recompute else 1) + 3
    stages = ((layers_of(shape, mesh, s), mixtures_of(shape, mesh, s)) for s in kinds(shape, mesh.pp, mesh.tp))
    return mesh.micro_batches * times * max((n - mixtures) * dense + mixtures * mixed for n, mixtures in stages)


def kept_of_blocks(shape: Shape, mesh: Mesh) -> tuple[int, int]:
    """Of a micro-batch in a block with an MLP, and in one with a mixture."""
    attention = kept_of_attention(shape, mesh)
    mixture = kept_of_mixture(shape, mesh) if shape.experts else 0
    return attention + kept_of_mlp(shape, mesh), attention + mixture


def kept_of_attention(shape: Shape, mesh: Mesh) -> int:
    """Inputs of both norms and of qkv; q, k, v, what attention gives, what is narrow; statistics in fp32; scores."""
    w, tokens = shape.width, mesh.tokens(shape)
    whole = w + shape.keys(mesh.tp) + shape.values(mesh.tp) + (shape.latent.kept if shape.latent else 0)
    whole += shape.queries(mesh.tp) + shape.answers(mesh.tp)
    elements = 2 * w * tokens // mesh.between + whole * tokens
    of_heads = (4 + mesh.scores * shape.context) * tokens * shape.heads_of(mesh.tp)[0]
    return elements * mesh.itemsize + 2 * statistics(shape, mesh) + of_heads


def kept_of_mlp(shape: Shape, mesh: Mesh, hidden: int = 0) -> int:
    """Its input, and what its matrices make."""
    tokens = mesh.tokens(shape)
    return (shape.width + inside(shape) * most(hidden or shape.hidden, mesh.tp)) * tokens * mesh.itemsize


def inside(shape: Shape) -> int:
    """Elements a token and hidden feature: before and after the activation; if gated both factors and the product."""
    return 2 if shape.matrices == 2 else 4


def kept_of_mixture(shape: Shape, mesh: Mesh) -> int:
    """The gate's input, below fp32 once more in fp32, its probabilities and weights; logits for its losses, which
    nothing that is computed again has; of each row the expert's input, what its matrices make, its answer and weight.
    """
    e, w = shape.experts, shape.width
    assert e is not None
    tokens = mesh.tokens(shape) // mesh.between
    rows = mesh.tokens(shape) * e.k // mesh.before_experts
    found = (tokens * w + rows * (2 * w + inside(shape) * e.hidden)) * mesh.itemsize
    losses = 0 if mesh.recompute else tokens * (e.count + 1) + e.count
    found += 4 * (tokens * (e.count + e.k + 2 + (mesh.itemsize < 4) * w) + losses + rows)
    if e.shared:
        found += kept_of_mlp(shape, mesh, e.shared) - (mesh.between == 1) * tokens * w * mesh.itemsize
    return found


def kept_of_head(shape: Shape, mesh: Mesh) -> int:
    """Inputs of the last norm and of the head, and the probabilities in fp32."""
    w, tokens = shape.width, mesh.tokens(shape)
    elements = w * tokens // mesh.between + w * tokens
    return elements * mesh.itemsize + statistics(shape, mesh) + 4 * tokens * shape.words(mesh.tp)


def statistics(shape: Shape, mesh: Mesh) -> int:
    """Of a norm: mean and deviation of each token, in fp32; without a mean where norms have no bias."""
    return 4 * (2 if shape.biases == "all" else 1) * mesh.tokens(shape) // mesh.between
