"""What is no tensor comes back exactly, type by type; what could not is refused at the save, by its key."""

import inspect
import json
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from datetime import timedelta, timezone
from enum import Flag, IntEnum
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from refimpl.checkpoint.errors import CheckpointError
from refimpl.checkpoint.tree import FACTORIES, decode, encode
from refimpl.zero.norm import GradNorm

zones = st.none() | st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
moments = st.one_of(st.datetimes(timezones=zones), st.dates(), st.times(timezones=zones), st.timedeltas())
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), moments,
    st.complex_numbers(allow_nan=False), st.builds(Path, st.text("ab/.")),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.booleans(), st.none())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
        st.sets(st.integers()),
        st.frozensets(st.text()),
        st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5)),
        st.builds(defaultdict, st.sampled_from([None, *FACTORIES.values()]), st.dictionaries(keys, inner)),
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "x", tensors))
    return decode(json.loads(text), tensors.__getitem__)


def leaf(item: Any) -> torch.Tensor:
    """The tensor, or the one in a dictionary."""
    return next(iter(item.values())) if isinstance(item, dict) else item


def exactly(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down (True is not 1, and a tuple no list)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(exactly(k, m) and exactly(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(exactly(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(trees)
def test_any_tree_comes_back_exactly(value: Any) -> None:
    assert exactly(there_and_back(value), value)


class Place(NamedTuple):
    rank: int
    at: Any


class Slot(Place):
    """With methods of its own, say."""

    __slots__ = ()


class Scores(UserDict[str, Any]):
    """Its classes have `__slots__`, and nothing in them."""


def test_what_json_has_no_word_for() -> None:
    value = {
        "inf": [float("inf"), -float("inf")],
        "milestones": Counter({30: 1, 80: 2}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "torch": torch.__version__,
        "steps": range(2, 8, 3),
        "simple": SimpleNamespace(lr=0.1, of=SimpleNamespace()),
        "scores": Scores({"best": 0.5}),
        "named": Place(1, (None, Slot(2, []))),
        "$tensor": "a key like our own",
        0: {"$tuple": 1},
    }
    assert exactly(there_and_back(value), value)
    nan = there_and_back((float("nan"),))[0]
    assert nan != nan


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3)[:, ::-1], np.array(2.5, np.float16), np.zeros((0, 2), np.uint8), np.array([True])],
)
def test_numpys_arrays(array: Any) -> None:
    back = there_and_back([array])[0]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()


def test_numpys_numbers_its_random_state_and_arguments() -> None:
    """What scripts put into a client_state: a best loss, the state of a generator, the arguments they were given."""
    kind, keys, *rest = np.random.RandomState(3).get_state()
    value = Namespace(
        best=np.float32(0.1), step=np.int64(3), done=np.bool_(True), random=(kind, *rest), args=Namespace()
    )
    assert exactly(vars(there_and_back(value)), vars(value))
    again = np.random.RandomState(0)
    again.set_state(there_and_back((kind, keys, *rest)))
    assert again.rand() == np.random.RandomState(3).rand()


@pytest.mark.parametrize("norm", [0.1, inf])
def test_the_gradients_norm_comes_back_as_a_plain_number(norm: float) -> None:
    """CosyVoice's trainer and wenet's keep it in every client_state."""
    back = there_and_back({"grad_norm": GradNorm(norm)})["grad_norm"]
    assert (type(back), back) == (float, norm)


class Model:
    class Kind(IntEnum):
        ENCODER = 1

    class Layers(Flag):
        FIRST = 1
        LAST = 2


def test_enums_come_back_by_their_class_and_name() -> None:
    """Megatron's arguments hold some."""
    value = Namespace(kind=Model.Kind.ENCODER, how=[inspect.Parameter.VAR_KEYWORD])
    assert list(encode(value, "x", {})) == ["$namespace"], "and no class by its name"
    back = there_and_back(value)
    assert (type(back.kind), back.kind) == (Model.Kind, Model.Kind.ENCODER)
    assert back.how[0] is inspect.Parameter.VAR_KEYWORD
    with pytest.raises(CheckpointError, match=r"x\.which: holds .*Model\.Layers"):
        encode({"which": Model.Layers.FIRST | Model.Layers.LAST}, "x", {})


class History:
    """As mmengine's, which it puts into every client_state: its own ways with pickle are for its functions."""

    def __init__(self, *log: float) -> None:
        self.log, self.best = np.array(log), {"at": (1, None)}

    def __setstate__(self, state: object) -> None:
        raise AssertionError("called for a file's sake")


class Acting(History):
    def __del__(self) -> None: ...


class Keeping(History):
    """As an optimizer, or a schedule."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_an_object_comes_back_by_its_attributes_and_nothing_is_called() -> None:
    value = History(1.5, 2.5)
    back = there_and_back({"loss": value})["loss"]
    assert (type(back), back.log.tolist(), back.best) == (History, [1.5, 2.5], {"at": (1, None)})
    value.best = print
    with pytest.raises(CheckpointError, match=r"x\.0\..*best: holds builtins\.builtin_function"):
        encode([value], "x", {})
    for place in (["colorsys2", "A"], ["os", "path"], [__name__, "Acting"], ["pathlib", "Path"], ["sys", "exit"]):
        with pytest.raises(CheckpointError, match=f"an object of {'.'.join(place)}, which this program does not have"):
            decode({"$object": [*place, {}]}, {}.__getitem__)


class Settings(dict[str, Any]):
    """As yacs' CfgNode: its items are its attributes, and it has attributes of its own besides."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        object.__setattr__(self, "frozen", True)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("called for a file's sake")

    __setitem__ = __setattr__


class ItsOwn(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


def test_a_dictionary_of_a_class_of_its_own_comes_back_with_its_attributes_and_nothing_is_called() -> None:
    """InternImage and whoever else descends from Swin save their configuration so."""
    back = there_and_back({"config": Settings(lr=0.1, of=Settings(size=(3, None)), empty=Settings())})["config"]
    assert (type(back), type(back.of), type(back.empty)) == (Settings,) * 3
    assert (back, back.frozen, back.of.frozen) == ({"lr": 0.1, "of": {"size": (3, None)}, "empty": {}}, True, True)
    own = there_and_back(ItsOwn(lr=0.1, of=ItsOwn(size=3)))
    own.of.size = 4
    assert (type(own), own) == (ItsOwn, {"lr": 0.1, "of": {"size": 4}})
    with pytest.raises(CheckpointError, match=r"x\..*hook: holds builtins\.builtin_function"):
        encode(Settings(hook=print), "x", {})
    nowhere = type("Nowhere", (dict,), {"__getattr__": dict.__getitem__})()  # not even asked for a state_dict
    with pytest.raises(CheckpointError, match=r"x: holds .*Nowhere;.*\.tolist\(\)"):
        encode(nowhere, "x", {})
    with pytest.raises(CheckpointError, match=f"a {__name__}.Settings, which this program does not have"):
        decode({"$named": [__name__, "Settings"]}, {}.__getitem__)
    for kind in ("Settings", "History"):  # the one said to be without items, the other with
        content = [__name__, kind, {}, *([{}] if kind == "History" else [])]
        with pytest.raises(CheckpointError, match=f"an object of {__name__}.{kind}, which this program does not have"):
            decode({"$mapping": content}, {}.__getitem__)


@pytest.mark.parametrize("place", [["colorsys2", "K", "A"], ["os", "path", "A"], [__name__, "Model.Kind", "DECODER"]])
def test_an_enum_that_the_reader_has_not_is_named_and_nothing_is_imported(place: list[str]) -> None:
    with pytest.raises(CheckpointError, match=f"holds {'.'.join(place)}, which this program does not have"):
        decode({"$enum": place}, {}.__getitem__)
    assert place[0] != "colorsys2" or "colorsys2" not in sys.modules


def test_tensors_go_beside_it_by_their_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.arange(3), (torch.tensor(1.5, dtype=torch.float64),)], 7: torch.ones(2, requires_grad=True)}
    made = encode(value, "client_state", tensors)
    assert set(tensors) == {"client_state.a.0", "client_state.a.1.0", "client_state.7"}
    back = decode(json.loads(json.dumps(made)), tensors.__getitem__)
    assert back["a"][1][0].dtype == torch.float64
    assert torch.equal(back["a"][0], torch.arange(3))
    assert torch.equal(back[7], torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a.b'": torch.full((1,), 2.0)},
        {1: torch.zeros(1), "1": torch.ones(1), (1,): {"": torch.full((1,), 2.0)}, "(1,).": torch.full((1,), 3.0)},
    ],
)
def test_two_tensors_whose_paths_read_alike_stay_two(value: Any) -> None:
    there = list(value.values())
    assert [leaf(item).item() for item in there_and_back(value).values()] == [leaf(item).item() for item in there]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (UUID(int=1), "UUID"),
        (defaultdict(lambda: 0), "collections.defaultdict"),
        (np.array(["text"]), r"numpy.ndarray.*\.tolist\(\)"),
        (np.array([print]), "numpy.ndarray"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.str_("text"), "numpy.str_"),
        (print, "builtin_function"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "on meta"),
        (type("Odd", (dict,), {})(), "Odd"),
        (torch.nn.Linear(1, 1), r"Linear;.*keep its state_dict\(\)"),
        (Keeping(), r"Keeping;.*keep its state_dict\(\)"),
    ],
)
def test_anything_else_is_refused_by_its_key(value: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=rf"client_state\.best\.1: holds .*{what}"):
        encode({"best": [0, value]}, "client_state", {})


def test_what_holds_itself_or_is_too_deep_is_refused() -> None:
    itself: dict[str, Any] = {}
    itself["again"] = itself
    history = History()
    history.best["again"] = history
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (itself, deep, history):
        with pytest.raises(CheckpointError, match=r"client_state\..*\.\.\.: holds more than 200 levels, or itself"):
            encode(value, "client_state", {})
