"""Walking, mapping, naming and describing every structure a module gives or takes."""

import collections
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from hookkit._core.pytree import (
    Inputs,
    describe,
    tree_get,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_set,
)

A, B = torch.arange(6.0).view(2, 3), torch.ones(4)
Pair = collections.namedtuple("Pair", ["h", "c"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    n: int = 3
    made: Tensor = field(init=False, default=B)

    def __post_init__(self) -> None:
        assert self.x.ndim


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Tensor


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput: keys are attributes too."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(kwargs)
        self.__dict__.update(kwargs)


class MyList(list):  # type: ignore[type-arg]
    pass


class MyTuple(tuple):
    __slots__ = ()


class Box(tuple):  # type: ignore[type-arg]
    def __new__(cls, low: Any, high: Any) -> "Box":
        return super().__new__(cls, (low, high))


STRUCTURES: dict[str, tuple[Any, list[str], str]] = {
    "tensor": (A, [""], "2×3"),
    "scalar": (torch.tensor(1.0), [""], "scalar"),
    "tuple": ((A, (B, None)), ["[0]", "[1][0]"], "(2×3, (4, None))"),
    "one": ((A,), ["[0]"], "(2×3,)"),
    "list": ([A, 3], ["[0]"], "[2×3, 3]"),
    "dict": ({"a": A, 7: [B]}, ["['a']", "[7][0]"], "{'a': 2×3, 7: [4]}"),
    "namedtuple": (Pair(A, (B,)), ["[0]", "[1][0]"], "Pair(2×3, (4,))"),
    "return_types": (A.max(1), ["[0]", "[1]"], "max(2, 2)"),
    "dataclass": (Frozen(A), [".x", ".made"], "Frozen(x=2×3, n=3, made=4)"),
    "slots": (Slotted(A), [".x"], "Slotted(x=2×3)"),
    "ordered": (collections.OrderedDict(a=A), ["['a']"], "OrderedDict(a=2×3)"),
    "default": (collections.defaultdict(list, a=[A]), ["['a'][0]"], "defaultdict(a=[2×3])"),
    "model output": (Output(y=A, z=(B,)), ["['y']", "['z'][0]"], "Output(y=2×3, z=(4,))"),
    "list subclass": (MyList([A]), ["[0]"], "MyList(2×3)"),
    "tuple subclass": (MyTuple([A]), ["[0]"], "MyTuple(2×3)"),
    "own new": (Box(A, B), ["[0]", "[1]"], "Box(2×3, 4)"),
    "fixed mapping": (types.MappingProxyType({"a": 1}), [], "mappingproxy"),
    "inputs": (Inputs((A,), {"mask": B}), ["[0]", "['mask']"], "(2×3, mask=4)"),
    "none": (None, [], "None"),
    "text": ("text", [], "'text'"),
    "empty": ({"a": (), "b": []}, [], "{'a': (), 'b': []}"),
    "object": (object(), [], "object"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_walked_mapped_and_described(name: str) -> None:
    x, paths, text = STRUCTURES[name]

    twice = tree_map(lambda t: t * 2, x)

    assert [p for p, _ in tree_leaves_with_path(x)] == paths
    assert describe(x) == text
    assert type(twice) is type(x)
    assert [p for p, _ in tree_leaves_with_path(twice)] == paths
    for path, t in tree_leaves_with_path(x):
        assert tree_get(x, path) is t
        assert torch.equal(tree_get(twice, path), t * 2)
        assert tree_get(tree_set(x, path, None), path) is None
    assert all(a is b for a, (_, b) in zip(tree_leaves(x), tree_leaves_with_path(x), strict=True))
    assert tree_map(lambda t: t, x) is x


def test_attributes_of_a_model_output_follow_its_keys() -> None:
    out = tree_map(lambda t: t + 1, Output(y=A))

    assert out.y is out["y"]


def test_a_packed_sequence_is_its_data_and_stays_one() -> None:
    x = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)

    y = tree_map(lambda t: t * 2, x)

    assert isinstance(y, PackedSequence)
    assert tree_leaves(x) == [x.data]
    assert describe(x) == "PackedSequence(data=5)"
    assert pad_packed_sequence(y)[0].sum() == 10


def test_hugging_face_outputs_keep_their_type() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = outputs.BaseModelOutput(last_hidden_state=A, hidden_states=(A, B))

    y = tree_map(lambda t: t + 1, x)

    assert type(y) is type(x)
    assert y.last_hidden_state is y["last_hidden_state"] is y[0]
    assert [p for p, _ in tree_leaves_with_path(x)][1:] == [
        "['hidden_states'][0]",
        "['hidden_states'][1]",
    ]


def test_inputs_are_read_by_position_and_by_name() -> None:
    x = Inputs((A, 3), {"mask": B})

    assert x[0] is A
    assert x[-1] == 3
    assert x["mask"] is B
    assert x.kwargs == {"mask": B}
    assert len(x) == 2
    with pytest.raises(KeyError):
        x["other"]


@pytest.mark.parametrize(
    "key", ["it's", '"', "'\"", "a\nb", "\\", "x]", "a.b", "", " x ", ".a", "é", 0, -1]
)
def test_a_key_of_any_text_is_read_and_replaced_by_its_own_path(key: Any) -> None:
    x = {"0": A, key: A, "-1": A}
    path = tree_leaves_with_path(x)[1][0]

    assert tree_set(x, path, 9) == {"0": A, key: 9, "-1": A}
    assert tree_get(x, path) is A


def test_an_attribute_of_a_tuple_or_mapping_is_replaced_by_its_name() -> None:
    assert tree_set(Pair(A, A), ".c", 3) == Pair(A, 3)
    assert tree_set(Output(y=A, z=A), ".z", 3).y is A
    assert tree_set(torch.ones(2, 3).max(0), ".indices", 3)[1] == 3


def test_pick_and_put_take_other_spellings_of_a_path() -> None:
    assert tree_set(Pair(A, B), "[1]", 3) == Pair(A, 3)
    assert tree_get(Pair(A, B), "[-1]") is B
    assert tree_set((1, 2), "[-1]", 3) == (1, 3)
    assert tree_set(Output(y=A), '["y"]', 3).y == 3
    assert tree_set(Inputs((1, 2), {"k": 3}), "[-1]", 9) == Inputs((1, 9), {"k": 3})


@pytest.mark.parametrize("path", ["0", "a.b", "[x]", "[0", "..a"])
def test_a_path_that_cannot_be_read_is_an_error(path: str) -> None:
    with pytest.raises(ValueError, match="cannot read the path"):
        tree_get((A,), path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_describe_of_nested_tensors() -> None:
    t = torch.nested.nested_tensor([A, A[:1]])

    assert describe(t) == "nested 2×…"


def test_a_tensor_has_no_parts() -> None:
    """`[0]` would be the first sample of a layer that returns a tensor and no tuple."""
    for path in ("[0]", "[0][1]"):
        with pytest.raises(LookupError, match="no parts"):
            tree_get(torch.ones(2, 3), path)
    with pytest.raises(LookupError, match="no parts"):
        tree_set((torch.ones(2),), "[0][1]", 0)
