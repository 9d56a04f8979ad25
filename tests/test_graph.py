"""The autograd graph behind a tensor is walked once, by `graph_nodes`."""

import torch

from hookkit._core.graph import first_input, graph_nodes, op_name


def test_graph_nodes_gives_each_node_once() -> None:
    w = torch.ones(3, requires_grad=True)
    shared = w * 2

    nodes = [node for node, _ in graph_nodes((shared.sin(), {"b": shared.cos() + shared}))]

    assert len(nodes) == len(set(nodes))
    names = sorted(map(op_name, nodes))
    assert names == ["AccumulateGrad", "Add", "Cos", "Mul", "Sin"]


def test_first_input_is_none_where_no_gradient_is_needed() -> None:
    w = torch.ones(3, requires_grad=True)

    assert op_name(first_input((w.relu() - 1).grad_fn)) == "Relu"
    assert first_input((torch.ones(3) * w).grad_fn) is None
