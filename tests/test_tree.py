"""A model's tree: every place, module and tensor, read in one walk."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from hookkit.inspection.tree import Tree, storage_of


def test_wrappers_are_in_no_name_and_all_are_listed() -> None:
    inner = nn.DataParallel(nn.Linear(2, 2))
    outer = nn.DataParallel(nn.Sequential(inner))

    tree = Tree(outer)

    assert tree.wrappers == [outer]
    assert [place.name for place in tree.places] == ["", "0"]
    assert [name for name, _ in tree.params] == ["0.weight", "0.bias"]
    assert inner in tree.modules


def test_a_parametrized_module_holds_what_its_parametrization_holds() -> None:
    tree = Tree(nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 3))))

    place = tree.places[-1]

    assert (place.name, place.parametrized) == ("0", ("weight",))
    assert list(place.params) == [
        *("bias", "parametrizations.weight.original0", "parametrizations.weight.original1")
    ]


def test_views_share_their_storage() -> None:
    x = torch.ones(4, 6)

    assert storage_of(x[1:]) == storage_of(x.T) == storage_of(x)
    assert storage_of(x)[1] == 4 * 6 * 4
    assert storage_of(torch.eye(3).to_sparse())[1] == 3 * (2 * 8 + 4)
