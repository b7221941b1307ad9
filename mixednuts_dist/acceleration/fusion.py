"""A frozen copy's network with convolutions that compute what follows them, and chains of such.

What can be traced is rewritten: sums and ReLUs are taken into the convolutions before them, and convolutions with
nothing else between them become one function of autograd.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .convolution import Convolution, Step, chained, is_plain


class Chain(nn.Module):
    """Convolutions one after the other; `steps` count the inputs as the first values."""

    def __init__(self, steps: list[Step], outputs: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(step.layer for step in steps)  # only so that they are found
        self.steps, self.outputs = steps, outputs

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = chained(self.steps, self.outputs, inputs)
        return found[0] if len(found) == 1 else tuple(found)


def fused(network: nn.Module, rounded: torch.dtype) -> nn.Module:
    """The network with its plain convolutions replaced, and what follows them taken in where it can be traced."""
    for name, layer in list(network.named_modules()):
        if name and is_plain(layer):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, Convolution(layer, rounded))
    return _with_post_ops(network) if any(isinstance(layer, Convolution) for layer in network.modules()) else network


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Convolution) or super().is_leaf_module(m, module_qualified_name)


def _with_post_ops(module: nn.Module) -> nn.Module:
    """Traced as a whole or, where that cannot be, child by child."""
    try:
        graph = _Tracer().trace(module)
    except Exception:  # tracing runs foreign code
        for name, child in module.named_children():
            if next(child.children(), None) is not None:  # traced alone, a layer would lose its class
                setattr(module, name, _with_post_ops(child))
        return module
    for node in list(graph.nodes):
        if _is_convolution(node, module):
            _take_in(node, module)
    _chain(graph, module)
    graph.lint()
    return fx.GraphModule(module, graph)


def _take_in(node: fx.Node, root: nn.Module) -> None:
    """Into the convolution `node` the sum that alone uses its output, and the ReLU that alone uses that."""
    last, other = node, None
    total = _only_user(node)
    if total is not None and _is(total, root, _SUMS) and len(total.args) == 2 and not total.kwargs:
        others = [each for each in total.args if each is not node]
        in_place = total.target in _IN_PLACE and total.args[0] is not node  # changes what others may see
        if len(others) == 1 and isinstance(others[0], fx.Node) and not in_place:
            last, other = total, others[0]
    rectified = _only_user(last)
    relu = rectified is not None and _is(rectified, root, _RELUS)
    if rectified is not None and relu:
        last = rectified
    if last is node:
        return
    with node.graph.inserting_before(last):
        new = node.graph.call_module(str(node.target), (node.args[0], other), {"relu": relu})
    last.replace_all_uses_with(new)
    for done in (last, total, node):
        if done is not None and not done.users and done in done.graph.nodes:
            done.graph.erase_node(done)


def _chain(graph: fx.Graph, root: nn.Module) -> None:
    """Convolutions with no other operation between them become one `Chain`."""
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if _is_convolution(node, root):
            run.append(node)
        elif node.op != "get_attr":
            if len(run) > 1:
                _put_chain(run, graph, root)
            run = []


def _put_chain(run: list[fx.Node], graph: fx.Graph, root: nn.Module) -> None:
    """One node in the place of the last of these."""
    inputs = list(dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in run))
    outputs = [node for node in run if any(reader not in run for reader in node.users)]
    index: dict[Any, int] = {node: i for i, node in enumerate([*inputs, *run])}
    last_reader = {each: node for node in run for each in node.all_input_nodes if each in run and each not in outputs}
    steps = []
    for node in run:
        x, other = (*node.args, None)[:2]
        layer = root.get_submodule(str(node.target))
        assert isinstance(layer, Convolution)
        dropped = tuple(index[each] for each, reader in last_reader.items() if reader is node)
        steps.append(Step(layer, index[x], index.get(other), bool(node.kwargs.get("relu")), dropped))
    name = f"chain_from_{run[0].name}"
    setattr(root, name, Chain(steps, [index[node] for node in outputs]))
    with graph.inserting_after(run[-1]):
        chain = graph.call_module(name, tuple(inputs))
    for i, node in enumerate(outputs):
        found = chain
        if len(outputs) > 1:
            with graph.inserting_after(chain):
                found = graph.call_function(operator.getitem, (chain, i))
        node.replace_all_uses_with(found, delete_user_cb=lambda user: user not in run)
    for node in reversed(run):
        graph.erase_node(node)


def _is_convolution(node: fx.Node, root: nn.Module) -> bool:
    return node.op == "call_module" and isinstance(root.get_submodule(str(node.target)), Convolution)


_IN_PLACE = (operator.iadd, "add_")  # tracing takes `a += b` for `a + b`
_SUMS = (operator.add, torch.add, "add", *_IN_PLACE)
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", nn.ReLU)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is(node: fx.Node, root: nn.Module, what: tuple[Any, ...]) -> bool:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in what
    return node.target in what
