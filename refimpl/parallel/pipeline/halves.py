"""Backward in two halves: first the gradients of a stage's inputs, which the stage before waits for, then its weights'.

The graph of a stage, from its outputs down:

    out -> matmul -> gelu -> matmul -> x        nodes on the way to an input: the trunk
             |                 |
             w2                w1               what hangs off it leads to weights alone

The input half runs the trunk; autograd computes of each node only what is asked for, so of a matmul the product with
the weight, and not the one with its input. On the way the gradient that comes to each node with a weight is kept. The
weight half begins again at those nodes and runs what hangs off them. Together they compute what one backward does, in
the same order for each weight, so the gradients are the same bits.

Memory: between the halves the graph stays, and one gradient more for each node with a weight. What a custom
autograd.Function or a checkpoint computes for both is computed twice.
A weight that hangs off several nodes is done in one go with all of them, and those it passes are held to the gradient
that was kept: otherwise it would count what comes from above twice.
Qi et al. 2024, arXiv:2401.10241. torch: torch/distributed/pipelining/_backward.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]  # for each output of a node
Graph = dict[Node, list[Node]]  # node -> those it leads to


class Halves:
    """One stage and micro-batch. Call `input_half` once, then `weight_half` once."""

    def __init__(self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """roots: of the outputs, with a gradient each. inputs: leaves that require one."""
        self.roots, self.grads, self.inputs = list(roots), list(grads), list(inputs)
        self.kept: dict[Node, Grads] = {}
        self.trunk: set[Node] = set()
        self.groups: list[tuple[set[Node], set[Node]]] = []
        if inputs:  # a first stage has none: all of its backward is the weights'
            graph = from_the_leaves_up(root.node for root in roots)
            self.trunk = on_the_way(graph, {get_gradient_edge(x).node for x in inputs})
            self.groups = groups_by_weight(hanging(graph, self.trunk, {root.node for root in roots}))

    def input_half(self) -> list[Tensor | None]:
        """The inputs' gradients; None for one that no output depends on. Weights' gradients are left as they are."""
        above = [(root, grad) for root, grad in zip(self.roots, self.grads, strict=True) if root.node in self.trunk]
        if not above:
            return [None] * len(self.inputs)
        roots, grads = zip(*above, strict=True)
        with ExitStack() as hooks:
            for node in self._begins():
                hooks.callback(node.register_prehook(partial(self._keep, node)).remove)
            return list(torch.autograd.grad(roots, self.inputs, grads, retain_graph=True, allow_unused=True))

    def weight_half(self) -> None:
        """Add the weights' gradients to their `.grad`. The graph goes with this object."""
        if not self.inputs and self.roots:
            torch.autograd.backward(self.roots, self.grads)
        loose = [(root, grad) for root, grad in zip(self.roots, self.grads, strict=True) if root.node not in self.trunk]
        for nodes, weights in self.groups:
            begins = [(root, grad) for root, grad in loose if root.node in nodes]
            begins += [
                (GradientEdge(node, i), grad)
                for node in nodes
                for i, grad in enumerate(self.kept.get(node, ()))
                if grad is not None
            ]
            if not begins:
                continue
            edges, grads = zip(*begins, strict=True)
            leaves = [node.variable for node in weights]  # type: ignore[attr-defined]
            with ExitStack() as hooks:
                for node in nodes & self.kept.keys():
                    hooks.callback(node.register_prehook(partial(self._hold, node)).remove)
                torch.autograd.backward(edges, grads, inputs=leaves, retain_graph=True)

    def _begins(self) -> Iterator[Node]:
        return (node for nodes, _ in self.groups for node in nodes if node in self.trunk)

    def _keep(self, node: Node, grads: Grads) -> None:
        self.kept[node] = grads

    def _hold(self, node: Node, _: Grads) -> Grads:
        return self.kept[node]


def from_the_leaves_up(roots: Iterable[Node]) -> Graph:
    """All nodes of the graph, each after those it leads to."""
    graph: Graph = {}
    led: Graph = {}  # of the nodes seen so far; asking a node for them is what costs
    waiting = list(roots)
    while waiting:
        node = waiting[-1]
        if node not in led:
            led[node] = [child for child, _ in node.next_functions if child is not None]
            waiting += [child for child in led[node] if child not in led]
        else:
            graph[waiting.pop()] = led[node]
    return graph


def on_the_way(graph: Graph, ends: set[Node]) -> set[Node]:
    """Those from which an end can be reached."""
    found: set[Node] = set()
    for node, children in graph.items():
        if node in ends or not found.isdisjoint(children):
            found.add(node)
    return found


def hanging(graph: Graph, trunk: set[Node], roots: set[Node]) -> Iterator[tuple[Node, set[Node]]]:
    """(node, weights) where weights hang off the trunk at a node, or below a root that is not on it."""
    below: dict[Node, set[Node]] = {}  # of a node beside the trunk: the weights it leads to
    for node, children in graph.items():
        beside = [below[child] for child in children if child not in trunk]
        weights = beside[0] if len(beside) == 1 else set[Node]().union(*beside)
        if node not in trunk:
            below[node] = weights = {node} if not children and hasattr(node, "variable") else weights
        if weights and (node in trunk or node in roots):
            yield node, weights


def groups_by_weight(found: Iterable[tuple[Node, set[Node]]]) -> list[tuple[set[Node], set[Node]]]:
    """Nodes that share a weight come together, with all their weights."""
    groups: list[tuple[set[Node], set[Node]]] = []
    for node, weights in found:
        shared = [group for group in groups if not group[1].isdisjoint(weights)]
        groups = [group for group in groups if group not in shared]
        groups.append(({node}.union(*(g[0] for g in shared)), weights.union(*(g[1] for g in shared))))
    return groups
