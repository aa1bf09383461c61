"""Experts: parameters that only some of the data-parallel ranks have, beside the dense ones that all have.

Of N data-parallel ranks, E share the experts of a layer (expert parallelism), so N/E have the same ones:

    parameter   reduced, sharded and gathered over   its gradient is the mean over
    dense       all N ranks                          N ranks' tokens
    expert      the N/E ranks that have it           N ranks' tokens: they came to it from all

So an expert's bucket is a bucket of another group, of the same stage, at every stage: ZeRO shards it N/E ways, and the
same number of bytes is kept as of a dense parameter where all experts are counted. The sum over N/E ranks is divided by
N, whatever E is. The norm, and whether all is finite, are of all ranks' parameters, each counted once.
Rajbhandari et al. 2022, arXiv:2201.05596, section 4.1 (system design). DeepSpeed: deepspeed/moe/utils.py and
`_reduce_expert_gradients` in deepspeed/runtime/engine.py, which refuses its own MoE layers in ZeRO-3.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from refimpl.comm.group import Group


def apart(model: nn.Module, experts: Mapping[nn.Parameter, Group]) -> Iterator[tuple[str, nn.Module, Group]]:
    """The largest modules that have experts' parameters and no other: path, module, the ranks that have the same ones.

    ZeRO-3 gathers each whole: which of its experts a rank uses is up to its tokens, and all ranks that have them must
    gather alike.
    """
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules() if experts else ():
        params = list(module.parameters())
        if params and all(p in experts for p in params) and not path.startswith(inside):
            inside += (f"{path}.".removeprefix("."),)
            yield path, module, experts[params[0]]
