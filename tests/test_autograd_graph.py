"""The autograd graph behind a tensor is walked once, by `graph_nodes`."""

import torch
from torch import Tensor, nn

from hookkit.autograd_graph import first_input, graph_nodes, op_name


def test_graph_nodes_gives_each_node_once() -> None:
    w = torch.ones(3, requires_grad=True)
    shared = w * 2

    nodes = [node for node, _ in graph_nodes((shared.sin(), {"b": shared.cos() + shared}))]

    assert len(nodes) == len(set(nodes))
    names = sorted(map(op_name, nodes))
    assert names == ["AccumulateGrad", "Add", "Cos", "Mul", "Sin"]


def test_graph_nodes_gives_the_nodes_whose_results_a_node_takes() -> None:
    w = torch.ones(3, requires_grad=True)
    out = w.exp() + torch.ones(3)

    found = {op_name(node): [op_name(i) for i in inputs] for node, inputs in graph_nodes(out)}

    assert found == {"Add": ["Exp"], "Exp": ["AccumulateGrad"], "AccumulateGrad": []}


def test_graph_nodes_reaches_every_parameter() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))

    held = [
        node.variable for node, _ in graph_nodes(net(torch.ones(4, 2))) if not node.next_functions
    ]

    assert {id(p) for p in held} == {id(p) for p in net.parameters()}


def test_tensors_without_a_graph_have_no_nodes() -> None:
    leaf: Tensor = torch.ones(2, requires_grad=True)

    assert list(graph_nodes([torch.ones(2), leaf, None])) == []


def test_first_input_is_none_where_no_gradient_is_needed() -> None:
    w = torch.ones(3, requires_grad=True)

    assert op_name(first_input((w.relu() - 1).grad_fn)) == "Relu"
    assert first_input((torch.ones(3) * w).grad_fn) is None
