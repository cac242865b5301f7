"""Tensors in nested structures."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from shardwise.core.tree import (
    MOST_PARTS,
    Replacement,
    casting,
    hidden_tensors,
    map_tensors,
    opaque_types,
    tensors_requiring_grad,
)

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    other: int = 3

    def __post_init__(self) -> None:
        assert self.other == 3


def test_containers_keep_their_type_and_what_does_not_change_keeps_its_identity() -> None:
    x, y = torch.ones(2), torch.ones(2, dtype=torch.long)
    nested = {"a": [x, (y, None)], "b": Pair(x, "text"), "c": Frozen({"d": x}), "e": [y]}
    doubled = map_tensors(nested, lambda t: t * 2 if t.is_floating_point() else t)
    assert torch.equal(doubled["a"][0], x * 2)
    assert doubled["a"][1] is nested["a"][1]  # type: ignore[index]
    assert isinstance(doubled["b"], Pair)
    assert doubled["b"].right == "text"
    assert isinstance(doubled["c"], Frozen)
    assert torch.equal(doubled["c"].value["d"], x * 2)
    assert doubled["e"] is nested["e"]
    assert map_tensors(nested, lambda t: t) is nested


def test_dict_subclasses_keep_type_and_order() -> None:
    value = OrderedDict(b=torch.ones(1), a=torch.ones(1))
    result = map_tensors(value, lambda t: t + 1)
    assert type(result) is OrderedDict
    assert list(result) == ["b", "a"]
    assert value["b"].item() == 1


class Registered:
    def __init__(self, value: Any, mark: str):
        self.value, self.mark = value, mark


torch.utils._pytree.register_pytree_node(  # what tensordict and others do
    Registered, lambda it: ([it.value], it.mark), lambda parts, mark: Registered(*parts, mark)
)


def test_what_trees_of_torch_know_is_looked_into() -> None:
    x = torch.ones(2, requires_grad=True)
    value = deque([Registered({"x": x}, "kept"), None], maxlen=2)
    assert tensors_requiring_grad(value) == [x]
    assert opaque_types(value) == []
    assert map_tensors(value, lambda t: t) is value
    result = map_tensors(value, lambda t: t * 2)
    assert result.maxlen == 2
    assert torch.equal(result[0].value["x"], x * 2)
    assert result[0].mark == "kept"


class OneSlot:
    __slots__ = "value"

    def __init__(self, value: Any):
        self.value = value


def test_tensors_in_attributes_of_plain_objects_are_found() -> None:
    shown, hidden, other = torch.ones(1), torch.ones(2), torch.ones(3)
    box = SimpleNamespace(first=OneSlot([hidden]), again=hidden, number=1, text=None)
    box.itself = {"box": box}
    found = hidden_tensors((shown, {"box": box}, Private(OneSlot((other,)))))
    assert {*map(id, found or ())} == {id(shown), id(hidden), id(other)}


class Private:
    """Its slot has another name than the class gives it, and reading attributes runs code."""

    __slots__ = ("__value", "empty")

    def __init__(self, value: Any):
        self.__value = value

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


@pytest.mark.parametrize("item", [lambda: None, torch.nn.Linear(2, 2), functools.partial(int), torch, iter([]), {1}])
def test_what_may_hold_more_tensors_than_are_seen(item: Any) -> None:
    assert hidden_tensors([torch.ones(1), SimpleNamespace(item=item)]) is None


def test_no_more_values_are_looked_at_than_outputs_have() -> None:
    tensors = [torch.ones(1) for _ in range(MOST_PARTS - 1)]
    assert len(hidden_tensors(OneSlot(tensors)) or ()) == len(tensors)
    assert hidden_tensors(OneSlot([*tensors, None])) is None


def test_distributions_are_objects_whose_tensors_are_found() -> None:
    normal = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)
    assert {*map(id, hidden_tensors(normal) or ())} == {id(normal.base_dist.loc), id(normal.base_dist.scale)}
    # Transforms compute, and may be modules.
    assert hidden_tensors(torch.distributions.LogNormal(torch.zeros(2), torch.ones(2))) is None


def test_only_tensors_that_require_grad_are_found_in_order() -> None:
    a, b, c = torch.ones(1, requires_grad=True), torch.ones(1), torch.ones(1, requires_grad=True)
    assert tensors_requiring_grad({"x": [a, b], "y": (c, None, 3)}) == [a, c]
    assert tensors_requiring_grad("text") == []


def test_cast_leaves_integers() -> None:
    x, y = torch.ones(1), torch.ones(1, dtype=torch.long)
    cast = map_tensors(([x], {"k": y}), casting(torch.bfloat16))
    assert cast[0][0].dtype is torch.bfloat16
    assert cast[1]["k"] is y


class _Fields(NamedTuple):
    value: Any
    other: int


class OwnConstructor(_Fields):
    """A named tuple that is made in another way than torch's trees make them."""

    def __new__(cls, value: Any) -> OwnConstructor:
        return super().__new__(cls, value, 3)


class MarkedList(list[Any]):
    mark = ""


class MarkedTuple(tuple[Any, ...]):
    mark = ""


@dataclasses.dataclass
class Node:
    value: Any
    parent: Any = None
    late: Any = dataclasses.field(init=False)
    """Nothing yet."""


def test_containers_are_not_made_by_their_constructors() -> None:
    x = torch.ones(2)
    values = OwnConstructor(x), MarkedList([x]), MarkedTuple([x])
    values[1].mark = values[2].mark = "kept"
    named, marked, fixed = map_tensors(values, lambda t: t * 2)
    assert torch.equal(named.value, x * 2)
    assert named.other == 3
    assert (type(named), type(marked), type(fixed)) == (OwnConstructor, MarkedList, MarkedTuple)
    assert marked.mark == fixed.mark == "kept"


def test_a_container_that_is_met_again_is_replaced_by_the_same() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    shared = [x, y]
    first, second, (third, fourth) = map_tensors((x, shared, [shared, x]), lambda t: t + 1)
    assert second is third
    assert len({id(first), id(second[0]), id(fourth)}) == 3  # as FSDP2's modules get them
    node = Node(x)
    node.parent = [node]  # contains itself
    assert torch.equal(map_tensors(node, lambda t: t * 2).value, x * 2)
    assert tensors_requiring_grad(node) == []


class Bag:
    """Its constructor gets what torch's trees know, which makes its parts in a container of their own."""

    def __init__(self, values: dict[str, Any]):
        self.values, self.note = dict(values), ""


torch.utils._pytree.register_pytree_node(Bag, lambda bag: ([dict(bag.values)], None), lambda parts, _: Bag(*parts))


def test_changes_of_what_trees_of_torch_know_are_given_back() -> None:
    """A tensordict got nothing of what modules wrote into it, as their kind does."""
    x, y = torch.ones(2), torch.zeros(2)
    bag = Bag({"x": x})
    bag.note, values = "kept", bag.values
    replacement = Replacement(lambda t: t * 2)
    copied = replacement.of((bag,))[0]
    replacement.give_back()
    assert bag.values is values
    copied.values["y"] = y
    replacement.give_back()
    assert {name: id(value) for name, value in bag.values.items()} == {"x": id(x), "y": id(y)}
    assert bag.note == "kept"
    copied.note = "new"
    replacement.give_back()
    assert bag.note == "new"


def test_what_changes_in_copies_is_given_back() -> None:
    x, y, z = torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)
    given = {"list": [x, y], "dict": {"x": x, "gone": 1}, "node": Node(x), "tuple": ([x],), "same": [x]}
    own = dict(given)
    replacement = Replacement(lambda t: t * 2)
    copied = replacement.of(given)
    replacement.give_back()
    assert all(given[name] is own[name] for name in own)
    assert given["list"][0] is x  # type: ignore[index]
    copied["list"].insert(0, z)
    copied["dict"]["late"] = copied["list"][1]
    del copied["dict"]["gone"]
    copied["node"].value, copied["node"].late = None, copied["list"]
    copied["tuple"][0].clear()
    replacement.give_back()
    assert all(given[name] is own[name] for name in own)
    assert [*map(id, given["list"])] == [*map(id, (z, x, y))]  # type: ignore[call-overload]
    assert {**given["dict"]}.keys() == {"x", "late"}  # type: ignore[dict-item]
    assert given["dict"]["late"] is given["dict"]["x"] is x  # type: ignore[index]
    assert given["node"].value is None  # type: ignore[attr-defined]
    assert given["node"].late is given["list"]  # type: ignore[attr-defined]
    assert given["tuple"] == ([],)
    assert given["same"][0] is x  # type: ignore[index]


@dataclasses.dataclass(slots=True)
class InSlots:
    value: Any


@dataclasses.dataclass
class BesideSlots(InSlots):
    other: Any = None


def test_fields_in_slots_beside_others_are_given_back() -> None:
    given, late = BesideSlots(torch.ones(2)), torch.zeros(2)
    replacement = Replacement(lambda t: t * 2)
    copied = replacement.of(given)
    copied.value, copied.other = late, late
    replacement.give_back()
    assert given.value is given.other is late


class MarkedDict(OrderedDict[str, Any]):
    mark = ""


def test_only_what_changes_in_copies_is_given_back() -> None:
    """What code that knows the container itself put there meanwhile stays: it was removed in silence."""
    x, late, later = torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)
    given = {"list": [x], "dict": {"x": x}, "node": Node(x)}
    replacement = Replacement(lambda t: t * 2)
    copied = replacement.of(given)
    given["list"].append(late)  # type: ignore[attr-defined]
    given["dict"]["late"] = late  # type: ignore[index]
    given["node"].late = late  # type: ignore[attr-defined]
    replacement.give_back()
    copied["list"].append(later)
    copied["dict"]["later"], copied["node"].parent = later, later
    replacement.give_back()
    assert [*map(id, given["list"])] == [*map(id, (x, late, later))]  # type: ignore[call-overload]
    assert given["dict"] == {"x": x, "late": late, "later": later}
    assert vars(given["node"]) == {"value": x, "late": late, "parent": later}


def test_deques_attributes_and_the_order_of_items_are_given_back() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    given = deque([x, y], maxlen=2), MarkedList([x]), MarkedDict(x=x, y=y)
    replacement = Replacement(lambda t: t * 2)
    queue, marked, ordered = replacement.of(given)
    queue.append(3)
    marked.mark = ordered.mark = "new"
    ordered.move_to_end("x")
    replacement.give_back()
    assert [*map(id, given[0])] == [id(y), id(3)]
    assert given[1].mark == given[2].mark == "new"
    assert [*map(id, given[2].values())] == [id(y), id(x)]
    assert [*given[2]] == ["y", "x"]
