"""A checkpointed function gives the plain run's gradients, bit for bit, in the habits people have; and keeps less."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torchs

from refimpl.activation.checkpoint import Checkpoint, CheckpointError, checkpoint
from refimpl.activation.policy import matmuls
from refimpl.measure.memory import MemoryMeter

Call = Callable[..., Any]


def plain(fn: Call, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 17), nn.Linear(17, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def block(self, x: Tensor, *, scale: Tensor | float = 1.0, p: float = 0.3) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), p) * scale


def one(m: Model, x: Tensor, call: Call) -> Tensor:
    return call(m.block, x)


def keywords(m: Model, x: Tensor, call: Call) -> Tensor:
    return call(m.block, x, scale=x.mean(1, keepdim=True), p=0.5)


def no_input_gradient(m: Model, x: Tensor, call: Call) -> Tensor:
    return call(m.block, x.detach()) + x


def several_outputs(m: Model, x: Tensor, call: Call) -> Tensor:
    a, rest, name = call(lambda y: (m.block(y), {"b": [y.sin(), y.detach()]}, "name"), x)
    assert name == "name"
    return a * rest["b"][0] + rest["b"][1]


def containers(m: Model, x: Tensor, call: Call) -> Tensor:
    def fn(parts: list[Tensor], options: dict[str, Any]) -> Tensor:
        return m.block(parts[0]) * parts[1] if options["on"] else parts[0]

    return call(fn, [x, x.cos()], {"on": True, "mask": None})


def integers_and_masks(m: Model, x: Tensor, call: Call) -> Tensor:
    rows = torch.tensor([2, 0, 1])
    return call(lambda y, i, mask: m.block(y)[i] * mask, x, rows, x.detach() > 0)


def nested(m: Model, x: Tensor, call: Call) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return call(m.block, call(m.block, y).sin())

    return call(lambda y: call(inner, m.block(y)) * y, x)


def one_after_another(m: Model, x: Tensor, call: Call) -> Tensor:
    for _ in range(3):
        x = call(m.block, x)
    return x


def frozen_inside(m: Model, x: Tensor, call: Call) -> Tensor:
    return call(lambda y: m.frozen(m.block(y)).tanh(), x)


def closure_over_a_tensor(m: Model, x: Tensor, call: Call) -> Tensor:
    hidden = x.exp()
    return call(lambda: m.block(hidden))


def branch_of_the_output_unused(m: Model, x: Tensor, call: Call) -> Tensor:
    used, _ = call(lambda y: (m.block(y), m.block(y.cos()).exp()), x)
    return used


def gradient_inside(m: Model, x: Tensor, call: Call) -> Tensor:
    def fn(y: Tensor) -> Tensor:
        z = m.block(y).tanh()
        (slope,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
        return z * slope

    return call(fn, x * 1)


def autocast_inside(m: Model, x: Tensor, call: Call) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = call(m.block, x)
    return y.float()


def random_around(m: Model, x: Tensor, call: Call) -> Tensor:
    return F.dropout(call(m.block, F.dropout(x, 0.2)), 0.2) * torch.rand(x.shape)


def without_gradients(m: Model, x: Tensor, call: Call) -> Tensor:
    with torch.no_grad():
        y = call(m.block, x)
    return call(m.block, x * y)


def input_changed_in_a_list(m: Model, x: Tensor, call: Call) -> Tensor:
    stack = [x]

    def fn(items: list[Tensor]) -> Tensor:
        items.append(m.block(items.pop()))
        return items[0].sigmoid()

    return call(fn, stack) + stack[0]


class DecoderLayer(nn.Module):
    """As Hugging Face's: keywords, a tuple of embeddings, a cache that is None, a tuple returned."""

    def __init__(self, m: Model) -> None:
        super().__init__()
        self.m = m

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None,
        use_cache: bool = False, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert position_embeddings is not None
        cos, sin = position_embeddings
        y = self.m.block(hidden_states * cos + hidden_states.flip(1) * sin)
        return (y.masked_fill(attention_mask, 0.0), kwargs["cache_position"]) if attention_mask is not None else (y,)


def hugging_face_layers(m: Model, x: Tensor, call: Call) -> Tensor:
    """`gradient_checkpointing_func(functools.partial(layer.__call__, **kwargs), hidden_states)`, once a layer."""
    position = torch.arange(6.0)
    for mask in (x.detach() > 1, None):
        kwargs = {"attention_mask": mask, "position_embeddings": (position.cos(), position.sin()), "cache_position": 3}
        x, *_ = call(partial(DecoderLayer(m).__call__, **kwargs), x)
    return x


HABITS = [
    hugging_face_layers,
    one, keywords, no_input_gradient, several_outputs, containers, integers_and_masks, nested, one_after_another,
    frozen_inside, closure_over_a_tensor, branch_of_the_output_unused, gradient_inside, autocast_inside, random_around,
    without_gradients, input_changed_in_a_list,
]  # fmt: skip
WAYS = {
    "default": Checkpoint(),
    "to the end": Checkpoint(early_stop=False),
    "matmuls kept": Checkpoint(policy=matmuls()),
}


def gradients(habit: Callable[[Model, Tensor, Call], Tensor], call: Call) -> list[Tensor | None]:
    torch.manual_seed(0)
    m, x = Model(), torch.randn(3, 6, requires_grad=True)
    out = habit(m, x, call)
    (out * torch.rand(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in m.parameters()), torch.rand(2)]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(
        u is v is None or (u is not None and v is not None and torch.equal(u, v)) for u, v in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("habit", HABITS)
def test_gradients_are_the_plain_runs(habit: Callable[[Model, Tensor, Call], Tensor], way: str) -> None:
    assert same(gradients(habit, WAYS[way]), gradients(habit, plain))


def test_without_random_state_dropout_differs() -> None:
    """So the test above could fail."""
    assert not same(gradients(one, Checkpoint(random=False)), gradients(one, plain))


@pytest.mark.parametrize("call", [plain, checkpoint])
def test_partial_repeated_and_second_order_backward(call: Call) -> None:
    torch.manual_seed(0)
    m, x = Model(), torch.randn(3, 6, requires_grad=True)

    def derivatives(call: Call) -> list[Tensor]:
        torch.manual_seed(1)
        y = call(m.block, x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        again = torch.autograd.grad(y.square().sum(), [x, m.up.weight], retain_graph=True)
        return [first, second, *again, *torch.autograd.grad(y.square().sum(), [m.down.weight])]

    assert all(map(torch.equal, derivatives(call), derivatives(plain)))


def test_two_accesses_of_one_saved_tensor() -> None:
    """`ctx.saved_tensors[0]`, then `[1]`: torch's checkpoint refuses it."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]

    def fn(x: Tensor) -> Tensor:
        return Product.apply(x.sin(), x.cos()).exp()  # type: ignore[no-any-return, no-untyped-call]

    x = torch.randn(5, requires_grad=True)
    fn(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(fn, x).sum().backward()
    assert expected is not None
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_an_argument_that_every_block_uses_twice() -> None:
    """As a decoder's layers use the encoder's output. Ours adds up in the plain run's order, re-entrant not."""

    def gradients(call: Call) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)]
        memory, x = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
        y = x
        for keys, values in layers:
            y = call(lambda y, memory, k=keys, v=values: (y + k(memory).sin() * v(memory)).tanh(), y, memory)
        y.sum().backward()
        assert memory.grad is not None
        return [memory.grad, *(layer.weight.grad for pair in layers for layer in pair if layer.weight.grad is not None)]

    expected, ours, theirs = (gradients(call) for call in (plain, checkpoint, partial(torchs, use_reentrant=True)))
    assert all(map(torch.equal, ours, expected))
    assert all(map(torch.equal, theirs[1:], expected[1:]))
    torch.testing.assert_close(theirs[0], expected[0])
    assert not torch.equal(theirs[0], expected[0])


def test_the_default_device_is_that_of_the_first_run() -> None:
    made: list[str] = []

    def fn(x: Tensor) -> Tensor:
        constant = torch.ones(3)
        made.append(constant.device.type)
        return (x * constant.to(x.device)).sin()

    with torch.device("meta"):
        y = checkpoint(fn, torch.randn(3, requires_grad=True)).sum()
    y.backward()
    y = checkpoint(fn, torch.randn(3, requires_grad=True)).sum()
    with torch.device("meta"):
        y.backward()
    assert made == ["meta", "meta", "cpu", "cpu"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # its class from torch 2.14 on
def test_forward_mode_goes_through() -> None:
    x, tangent = torch.randn(3), torch.randn(3)
    with forward_ad.dual_level():
        y = checkpoint(torch.sin, forward_ad.make_dual(x, tangent))
        assert torch.equal(forward_ad.unpack_dual(y).tangent, tangent * x.cos())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # its class from torch 2.14 on
def test_transforms_that_save_nothing_go_through() -> None:
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    double = partial(checkpoint, lambda a: a.sin() * 2)
    assert torch.equal(torch.func.vmap(double)(x), x.sin() * 2)
    assert torch.equal(torch.func.jvp(double, (x,), (tangent,))[1], tangent * x.cos() * 2)
    weight = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.func.vmap(partial(checkpoint, lambda a: (a * weight).sin()))(x).sum(), weight)
    (plain,) = torch.autograd.grad(torch.func.vmap(lambda a: (a * weight).sin())(x).sum(), weight)
    assert torch.equal(grad, plain)


def script(x: Tensor, w: Tensor) -> Tensor:
    y = torch.sigmoid(x @ w) * x
    return (y * torch.tanh(y + x)) @ w


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # its class from torch 2.14 on
def test_torchscript_inside() -> None:
    """It optimises itself after its first call, and saves other tensors then; and it forgets which exception it saw."""
    scripted = torch.jit.script(script)
    for _ in range(3):
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
        ours = torch.autograd.grad(checkpoint(lambda x, w: scripted(x, w), x, w).sum(), [x, w])
        assert same([*ours], [*torch.autograd.grad(script(x, w).sum(), [x, w])])


def test_a_saved_constant_is_the_object_itself() -> None:
    """With what somebody has hung on it, as torch's checkpoint gives it back."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, constant: Tensor) -> Tensor:
            ctx.save_for_backward(constant)
            return x * constant

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (saved,) = ctx.saved_tensors
            assert saved is constant
            return grad * saved, None

    constant, x = torch.randn(3), torch.randn(3, requires_grad=True)
    checkpoint(lambda x: Times.apply(x.sin(), constant), x).sum().backward()  # type: ignore[no-untyped-call]


def runs_of(fn: Call, call: Call, x: Tensor) -> list[str]:
    """The stages of fn that a backward runs again."""
    seen: list[str] = []
    y = call(lambda x: fn(x, seen.append), x)
    seen.clear()
    y.sum().backward()
    return seen


def test_early_stop() -> None:
    def fn(x: Tensor, note: Callable[[str], None]) -> Tensor:
        note("one")
        x = x.sin()
        note("two")
        x = x.cos()
        note("three")
        return x + 1  # saves nothing

    x = torch.randn(4, requires_grad=True)
    assert runs_of(fn, checkpoint, x) == ["one", "two"]
    assert runs_of(fn, Checkpoint(early_stop=False), x) == ["one", "two", "three"]


def test_early_stop_looks_at_what_is_still_needed() -> None:
    """An output that nothing used has let go of what it had saved: the run ends before it. torch's does not."""

    def fn(x: Tensor, note: Callable[[str], None]) -> Tensor:
        note("used")
        y = x.sin()
        note("unused")
        x.cos().exp()
        return y

    x = torch.randn(4, requires_grad=True)
    assert runs_of(fn, checkpoint, x) == ["used"]
    assert runs_of(fn, lambda f, x: torchs(f, x, use_reentrant=False), x) == ["used", "unused"]


def test_nesting_runs_each_level_once_more() -> None:
    """The innermost of three levels is run once a level in backward, and early stop spares what nobody waits for."""

    def fn(x: Tensor, note: Callable[[str], None]) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            note("inner")
            return y.sin().cos()

        def outer(y: Tensor) -> Tensor:
            note("outer")
            return checkpoint(inner, y.exp())

        return checkpoint(outer, x)

    x = torch.randn(4, requires_grad=True)
    assert runs_of(fn, plain, x) == ["outer", "inner"]


def test_what_is_kept() -> None:
    """After forward: one activation a checkpointed block, all of them without. In backward one block's come back."""
    depth = 6
    torch.manual_seed(0)
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU()) for _ in range(depth))
    )
    x = torch.randn(64, 32)
    unit = x.nbytes

    def kept(call: Call) -> tuple[int, int]:
        blocks.zero_grad(set_to_none=True)
        meter = MemoryMeter(lambda: {"parameters": blocks.parameters()})
        with meter:
            y = x
            for block in blocks:
                y = call(block, y)
            after = meter.now()["activations"]
            meter.reset_peak()
            y.sum().backward()
        return after // unit, meter.peak["activations"] // unit

    assert kept(plain) == (4 * depth, 4 * depth)
    after, peak = kept(checkpoint)
    assert after == depth  # each block's input but the first's, which is no activation, and the output
    assert peak <= depth + 4
    assert kept(Checkpoint(policy=matmuls()))[0] == 3 * depth  # two products, and the output


def test_a_checkpoint_dies_with_its_graph() -> None:
    """No circle keeps inputs alive until the garbage collector comes."""
    gc.disable()
    try:
        x = torch.randn(4, requires_grad=True)
        middle = x * 2
        alive = weakref.ref(middle.untyped_storage())
        y = checkpoint(lambda t: t.sin().cos(), middle)
        del middle
        assert alive() is not None
        y.sum().backward()
        assert alive() is None
        again: list[weakref.ref[UntypedStorage]] = []

        def saves_what_it_gives(t: Tensor) -> Tensor:
            out = t.exp()
            again.append(weakref.ref(out.untyped_storage()))
            return out.exp()

        checkpoint(saves_what_it_gives, x).sum().backward()
        assert [ref() for ref in again] == [None, None]
        dropped = x * 3
        alive = weakref.ref(dropped.untyped_storage())
        y = checkpoint(torch.sin, dropped)
        del dropped, y
        assert alive() is None
    finally:
        gc.enable()


def test_another_way_in_the_second_run_is_an_error() -> None:
    ways = iter([lambda x: x.sin().cos(), torch.sin])
    with pytest.raises(CheckpointError, match="saved 2 tensors when it ran first, 1 when it ran again"):
        checkpoint(lambda x: next(ways)(x), torch.randn(3, requires_grad=True)).sum().backward()
    sizes = iter([3, 2])
    with pytest.raises(CheckpointError, match=r"was float32 \(3,\) on cpu when it ran first, and is float32 \(2,\)"):
        checkpoint(lambda x: x[: next(sizes)].sin(), torch.randn(3, requires_grad=True)).sum().backward()


def test_an_argument_changed_in_place_is_an_error() -> None:
    x = torch.randn(3, requires_grad=True)
    middle = x * 1
    y = checkpoint(torch.sin, middle)
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_inside_is_the_functions_own() -> None:
    def fn(x: Tensor, fail: list[bool]) -> Tensor:
        y = x.sin()
        if broken:
            raise KeyError("mine")
        return y.cos()

    broken: list[bool] = []
    y = checkpoint(fn, torch.randn(3, requires_grad=True), [])
    broken.append(True)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_function_that_swallows_exceptions() -> None:
    """Early stop passes through `except Exception` of user code: it is raised again at the next tensor."""

    def fn(x: Tensor) -> Tensor:
        try:
            y = x.sin().cos()
        except ValueError:
            y = x
        return y

    x = torch.randn(3, requires_grad=True)
    checkpoint(fn, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(fn(x).sum(), x)[0])  # type: ignore[arg-type]


def test_around_sees_both_runs() -> None:
    runs: list[str] = []

    def around(run: str) -> nullcontext[None]:
        runs.append(run)
        return nullcontext()

    x = torch.randn(3, requires_grad=True)
    Checkpoint(around=around)(torch.sin, x).sum().backward()
    assert runs == ["forward", "backward"]
