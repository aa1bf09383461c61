"""DeepSpeed's sequence parallelism by name. DeepSpeed: deepspeed/sequence."""

from refimpl.deepspeed.sequence.cross_entropy import (
    VocabParallelCausalLMLoss as VocabParallelCausalLMLoss,
)
from refimpl.deepspeed.sequence.cross_entropy import (
    VocabParallelCrossEntropyLoss as VocabParallelCrossEntropyLoss,
)
from refimpl.deepspeed.sequence.cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from refimpl.deepspeed.sequence.cross_entropy import (
    vocab_sequence_parallel_cross_entropy as vocab_sequence_parallel_cross_entropy,
)
