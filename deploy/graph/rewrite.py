"""The contract of rewrites: which nodes, why not here, and what stands instead.

A `RewriteRule` has the three parts of a rule of onnxscript's rewriter:

=======  =========================================================================================
pattern  the nodes that the rule is about: a predicate on the node alone, mostly `is_op("Pad")`
check    why such a node stays as it is, in words ("its mask is read"); "" if it is rewritten
rewrite  the nodes in its place, in execution order; it may change the node and return it too
=======  =========================================================================================

Check and rewrite also get a *scope*: what the rule knows besides the node, such as an index of the
graph, constants, shapes, or options. New constants are nodes, or are added to the scope's graph.

Every case that a rule leaves alone is one guard clause of its check. If only the rewrite can find
such a case, for instance because a value is needed that is not constant, it raises `CannotRewrite`
with the reason, before it changes anything.

`apply_rule` leaves these nodes as they are. `deploy.graph.opset_forms` ends with an error instead:
a node without a form in the requested opset cannot stay.

Source: onnxscript, `rewriter/_rewrite_rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from deploy.graph.edit import replace_nodes
from deploy.graph.index import ONNX_DOMAINS, Nodes

if TYPE_CHECKING:
    import onnx

Scope = TypeVar("Scope")


class CannotRewrite(Exception):
    """A node cannot be rewritten; the message says why."""


def is_op(*op_types: str) -> Callable[[onnx.NodeProto], bool]:
    """Return the pattern of ONNX's own operators of these types."""
    return lambda node: node.op_type in op_types and node.domain in ONNX_DOMAINS


def keep_node(node: onnx.NodeProto, _: Any) -> Nodes:
    """Return the node itself: the rewrite of a rule that only checks."""
    return [node]


def check_nothing(_: onnx.NodeProto, __: Any) -> str:
    """Return "": the check of a rule that rewrites every node of its pattern."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRule(Generic[Scope]):
    """One rewrite.

    Attributes:
        pattern: node -> whether the rule is about it.
        check: (node, scope) -> why the node stays as it is; "" if it is rewritten.
        rewrite: (node, scope) -> the nodes in its place, in execution order.
    """

    pattern: Callable[[onnx.NodeProto], bool]
    check: Callable[[onnx.NodeProto, Scope], str] = check_nothing
    rewrite: Callable[[onnx.NodeProto, Scope], Nodes] = keep_node

    def replace(self, node: onnx.NodeProto, scope: Scope) -> Nodes:
        """Return the nodes in place of a node of the pattern.

        Raises:
            CannotRewrite: the check fails, or the rewrite finds a case that it leaves alone.
        """
        reason = self.check(node, scope)
        if reason:
            raise CannotRewrite(reason)
        return self.rewrite(node, scope)


def apply_rule(graph: onnx.GraphProto, rule: RewriteRule[Scope], scope: Scope) -> int:
    """Rewrite the nodes of a graph, not of its subgraphs, in place; return their number."""
    nodes: Nodes = []
    count = 0
    for node in graph.node:
        if not rule.pattern(node):
            nodes.append(node)
            continue
        try:
            nodes += rule.replace(node, scope)
            count += 1
        except CannotRewrite:
            nodes.append(node)
    if count:
        replace_nodes(graph, nodes)
    return count
