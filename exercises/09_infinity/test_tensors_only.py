"""Grades chapter 09's unpickler: files that it must read, and files that ask for more, in every way that pickle has."""

import io
import pickle
import sys
import tempfile
import traceback
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from refimpl.grading.compare import Wrong, equal, require
from refimpl.grading.grade import on_ranks
from refimpl.grading.rank import Answer, case
from refimpl.grading.traffic import WatchedGroup

TRAP = "trap_of_the_grader"  # a module whose import is noticed
CLOSE = (  # what lists of allowed names have held: some are harmless, some call whatever a file hands them
    ("builtins", "set"), ("builtins", "complex"), ("collections", "defaultdict"), ("collections", "Size"),
    ("torch", "device"), ("torch", "Tensor"), ("torch", "size"), ("torch._utils", "_rebuild_tensor"),
    ("torch.storage", "_load_from_bytes"), ("torch", "FloatStorage"), ("torch", "UntypedStorage"),
    ("torch._tensor", "_rebuild_from_type_v2"), ("torch.nn.parameter", "Parameter"),
)  # fmt: skip


def loaded(answer: Answer, data: bytes) -> Any:
    """As torch.load reads it, with the answer's unpickler."""
    door = SimpleNamespace(Unpickler=answer.TensorsOnly, UnpicklingError=pickle.UnpicklingError, __name__="door")
    return torch.load(io.BytesIO(data), weights_only=False, pickle_module=door)


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def text(string: str) -> bytes:
    return b"\x8c" + bytes([len(string)]) + string.encode()


def asks_for(module: str, name: str, argument: str, protocol: int) -> bytes:
    """A pickle that calls module.name(argument): by GLOBAL, as protocol 2 writes it, or by STACK_GLOBAL."""
    found = b"c" + f"{module}\n{name}\n".encode() if protocol < 4 else text(module) + text(name) + b"\x93"
    return b"\x80" + bytes([protocol]) + found + text(argument) + b"\x85R."


def nested(module: str, name: str, argument: str) -> bytes:
    """The same deep inside: {"epoch": [module.name(argument)]}, memoised, behind innocent entries."""
    inner = text(module) + text(name) + b"\x93" + text(argument) + b"\x85R"
    return b"\x80\x04}" + text("epoch") + b"]" + b"K\x01a" + inner + b"as."


@on_ranks(1)
def test_TensorsOnly(answer: Answer, group: WatchedGroup) -> None:
    case("what a checkpoint holds")
    judge_read(answer)
    with tempfile.TemporaryDirectory(prefix="grading-") as place:
        (Path(place) / f"{TRAP}.py").write_text("OrderedDict = _rebuild_tensor_v2 = Size = list\n")
        sys.path.insert(0, place)
        try:
            judge_refused(answer, Path(place) / "ran")
        finally:
            sys.path.remove(place)
            sys.modules.pop(TRAP, None)


def judge_read(answer: Answer) -> None:
    model = nn.Linear(3, 2)
    value = {
        "module": model.state_dict(),
        "step": 7,
        "parts": [torch.arange(4), (torch.ones(2, dtype=torch.bfloat16), None, 0.5, "name")],
        "parameter": nn.Parameter(torch.zeros(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "shape": torch.Size([2, 3]),
    }
    for protocol in (2, 4):
        try:
            found = loaded(answer, saved(value, pickle_protocol=protocol))
        except pickle.UnpicklingError as error:
            raise Wrong("a file of tensors and plain containers is refused", str(error)) from None
        require(type(found["module"]) is OrderedDict, f"an OrderedDict is read as a {type(found['module']).__name__}")
        for name, tensor in model.state_dict().items():
            equal(found["module"][name], tensor, name)
        equal(found["parts"][0], torch.arange(4), "a tensor of integers")
        equal(found["parts"][1][0], torch.ones(2, dtype=torch.bfloat16), "a tensor of bf16")
        for name in ("parameter", "frozen"):
            kind, needs = type(found[name]), getattr(found[name], "requires_grad", None)
            require(kind is nn.Parameter, f"a parameter is read as a {kind.__name__}: torch's own function rebuilds it")
            require(needs == (name == "parameter"), f"a parameter that was {name} has requires_grad = {needs}")
        kind = type(found["shape"])
        require(kind is torch.Size, f"a torch.Size is read as a {kind.__name__}")
        require(found["shape"] == torch.Size([2, 3]) and found["step"] == 7, "a number or a torch.Size is another")


def judge_refused(answer: Answer, ran: Path) -> None:
    """Each of these would do something harmless that is seen: make the folder `ran`, or import the trap."""
    make = f"import os; os.mkdir({str(ran)!r})"
    files = {
        "os.mkdir": [asks_for("os", "mkdir", str(ran), protocol) for protocol in (2, 4)],
        "posix.mkdir": [asks_for("posix", "mkdir", str(ran), 4)],
        "builtins.exec": [asks_for("builtins", "exec", make, 4), nested("builtins", "exec", make)],
        "builtins.eval": [asks_for("builtins", "eval", f"__import__('os').mkdir({str(ran)!r})", 4)],
        "builtins.getattr": [asks_for("builtins", "getattr", "name", 4)],
        "torch.os.mkdir": [asks_for("torch", "os.mkdir", str(ran), 4), nested("torch", "os.mkdir", str(ran))],
        "collections._sys.intern": [asks_for("collections", "_sys.intern", "name", 4)],
        "torch._utils._import_dotted_name": [asks_for("torch._utils", "_import_dotted_name", "os.system", 2)],
        "torch._utils.torch.hub.load": [asks_for("torch._utils", "torch.hub.load", "name", 4)],
        "torch.load": [asks_for("torch", "load", "nowhere.pt", 4)],
        "builtins.OrderedDict": [asks_for("builtins", "OrderedDict", "name", 4)],
        **{
            f"{TRAP}.{name}": [asks_for(TRAP, name, "name", 4)]
            for name in ("OrderedDict", "Size", "_rebuild_tensor_v2")
        },
        f"{TRAP}.anything": [asks_for(TRAP, "anything", "name", 2), nested(TRAP, "anything", "name")],
        "mycollections.OrderedDict": [asks_for("mycollections", "OrderedDict", "name", 4)],
        "collections.OrderedDict.fromkeys": [asks_for("collections", "OrderedDict.fromkeys", "name", 4)],
        **{f"{module}.{name}": [asks_for(module, name, "name", 4)] for module, name in CLOSE},
    }
    for name, payloads in files.items():
        for payload in payloads:
            case(f"a file that asks for {name}")
            said = refusal(answer, payload)
            if ran.exists():
                ran.rmdir()
                raise Wrong(f"the file asked for {name}, and it ran: a folder was made by loading it")
            require(
                TRAP not in sys.modules,
                f"{name} was refused after its module had been imported: what a module does then has run",
            )
            handed = f"{name} was handed to the file, which could call it with whatever it likes: four names may be"
            require(said is not None, handed)
            require(
                name in str(said), f"the refusal does not say which name was asked for, {name}", f"  it says: {said}"
            )


def refusal(answer: Answer, payload: bytes) -> str | None:
    """What the unpickler said when it refused the file; None if it did not."""
    try:
        answer.TensorsOnly(io.BytesIO(payload)).load()
    except pickle.UnpicklingError as error:
        return str(error)
    except NotImplementedError:
        raise
    except Exception as error:
        inside = not isinstance(error, ImportError) and any(
            f.name == "find_class" for f in traceback.extract_tb(error.__traceback__)
        )
        kind = f"{type(error).__name__} is raised, expected a pickle.UnpicklingError: callers catch that"
        require(not inside, kind)
        return None  # what was called did not like its argument: it was called
    return None
