"""FLOPs of a model, module by module: `flops_profiler` of DeepSpeed's JSON, and `get_model_profile` of a model alone.

Counted is what products of matrices, convolutions and attention do, as torch's FlopCounterMode sees them below
autograd: two for a multiplication and its addition, whatever Python calls the product. What works element by element
counts nothing: it is memory traffic. What a Triton kernel does is not seen.
DeepSpeed's, which puts functions of its own in the place of torch's: deepspeed/profiling/flops_profiler/profiler.py.
"""

import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from refimpl.measure.clock import now
from refimpl.measure.running import ALL, Running, paths

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

FORWARD = "one forward pass"


def counter(model: nn.Module) -> "FlopCounterMode":
    """Torch's, by the modules of `model`, with a CPU's attention: of a CPU's it knows only what is made of products."""
    # Imports triton, which looks once whether it is to interpret kernels: whoever wants that says so before.
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> Any:
        return sdpa_flop_count(q, k, v)  # type: ignore[no-untyped-call]

    def backward(grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> Any:
        return sdpa_backward_flop_count(grad, q, k, v)  # type: ignore[no-untyped-call]

    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    made = FlopCounterMode(display=False, custom_mapping=attention)
    made.mod_tracker = Running(model)  # type: ignore[assignment]
    return made


class FlopsProfiler:
    """What `model` does between `start_profile` and `stop_profile`; printed until `end_profile`.

    recompute_fwd_factor: how much of the forward pass backward computes again, as checkpoints do; 1 is all.
    """

    def __init__(self, model: nn.Module, ds_engine: object = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.recompute_fwd_factor = model, recompute_fwd_factor
        self.started = False
        self.by_module: dict[str, int] = {}
        self.seconds, self._begin = 0.0, 0.0
        self._device = next(model.parameters(), torch.empty(0)).device
        self._counter: FlopCounterMode | None = None
        self._ignored: tuple[type[nn.Module], ...] = ()

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Count from zero, but for modules of these classes."""
        self.stop_profile()
        self._ignored = tuple(ignore_list or ())
        self._counter = counter(self.model)
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._begin = now(self._device)
        self.started = True

    def stop_profile(self) -> None:
        """What comes now does not count."""
        if self._counter is None:
            return
        self.seconds = now(self._device) - self._begin
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        counts = self._counter.get_flop_counts()
        self.by_module = {name: sum(by_op.values()) for name, by_op in counts.items()}
        self._counter = None

    def end_profile(self) -> None:
        """Forget what was counted."""
        self.stop_profile()
        self.by_module, self.seconds, self.started = {}, 0.0, False

    @property
    def flops(self) -> int:
        """Of all that was counted."""
        ignored = [name for name, module in self.modules().items() if isinstance(module, self._ignored)]
        outermost = [name for name in ignored if not any(name.startswith(f"{other}.") for other in ignored)]
        return self.by_module.get(ALL, 0) - sum(self.by_module.get(name, 0) for name in outermost)

    @property
    def macs(self) -> int:
        """Multiplications, each with its addition: half the FLOPs."""
        return self.flops // 2

    @property
    def params(self) -> int:
        """Of the model, each once."""
        return sum(p.numel() for p in self.model.parameters())

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """`flops`, or that with a unit."""
        return f"{shortened(self.flops)}FLOPS" if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """`macs`, or that with a unit."""
        return f"{shortened(self.macs)}MACs" if as_string else self.macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """`params`, or that with a unit."""
        return shortened(self.params).replace("G", "B").strip() if as_string else self.params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds between start and stop, counting included: do not take them for the model's speed."""
        return f"{shortened(self.seconds)}s" if as_string else self.seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
        what: str = FORWARD,
    ) -> None:
        """Print the table, or write it to a file. Nothing before `start_profile`.

        detailed: every module down to `module_depth` (-1: all), else the `top_modules` largest of each depth.
        """
        if not self.started:
            return
        text = self.table(
            f"FLOPs at step {profile_step}, {what}", self.rows(module_depth, None if detailed else top_modules)
        )
        text += f"parameters {self.get_total_params(True)}, {self.get_total_macs(True)}, {shortened(self.flops)}FLOPs"
        if what == FORWARD:
            factor = 3 + self.recompute_fwd_factor
            text += f"; with backward {factor:g} times as many, {shortened(factor * self.flops)}FLOPs"
        if not output_file:
            print(text)
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def table(self, title: str, rows: Sequence[str]) -> str:
        """A line a module."""
        names, total = self.modules(), self.flops
        table = Table(box=None, pad_edge=False)
        for column in ("module", "class", "parameters", "FLOPs", "share"):
            table.add_column(column, justify="left" if column in ("module", "class") else "right", no_wrap=True)
        for name in rows:
            module, flops = names[name], self.by_module[name]
            parameters = f"{sum(p.numel() for p in module.parameters()):,}"
            share = f"{flops / total:.1%}" if total else ""
            table.add_row(name, type(module).__name__, parameters, f"{flops:,}", share)
        out = io.StringIO()
        Console(file=out, width=200).print(table)
        return "".join(f"{line.rstrip()}\n" for line in [title, *out.getvalue().splitlines()])

    def rows(self, depth: int, top: int | None) -> list[str]:
        """The modules to show, in the model's order."""
        deep = {name: name.count(".") for name in self.by_module if name != ALL}
        shown = [name for name in deep if depth < 0 or deep[name] <= depth]
        if top is not None:
            met, largest = Counter[int](), []
            for name in sorted(shown, key=lambda name: -self.by_module[name]):
                met[deep[name]] += 1
                if met[deep[name]] <= top:
                    largest.append(name)
            shown = largest
        order = {name: i for i, name in enumerate(self.modules())}
        return sorted(shown, key=order.__getitem__)

    def modules(self) -> Mapping[str, nn.Module]:
        """By what the counter calls them."""
        return paths(self.model)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """(FLOPs, multiplications with addition, parameters) of `model(*args, **kwargs)`, in evaluation mode from then on.

    input_shape: of one tensor of the parameters' dtype, in place of args. mode: "generate" calls the method of that
    name. ValueError for no inputs at all, or another mode.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode {mode!r}: 'forward' or 'generate'")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ValueError("get_model_profile: give input_shape, args or kwargs")
    model.eval()
    call: Callable[..., Any] = model if mode == "forward" else model.generate  # type: ignore[assignment]
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **(kwargs or {}))
    finally:
        profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


def shortened(number: float) -> str:
    """ "1.5 G": a number and its unit, to two places."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1, "")):
        if number >= size:
            return f"{round(number / size, 2):g} {unit}"
    return f"{round(number * 1e3, 2):g} m" if number else "0 "
