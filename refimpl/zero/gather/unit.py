"""A unit: parameters that a module needs together, whole only while it does, and 1/N of them the rest of the time.

    state       memory of `full`    its parameters   `is_free`   `in_flight`   what ends it
    freed       none                Freed            True        False         start
    in flight   [P], being filled   Freed            False       True          wait (free waits first)
    available   [P]                 Managed          False       False         free, unless it is held

It is held while some `whole` block is open: what runs in there may run in another number on each rank, as `generate`
does, and gathers nothing.
Neighbours may share a unit (`ZeroConfig.unit_size`): 100 tiny modules are then a few gathers. It is freed when another
one is needed, not after each of them.
`p.zero_unit` is the unit that shards p; read it with `unit_of`. When the ranks have parted (see `RollCall`) a gather
under way never ends: `free` leaves it alone, and its memory, into which a peer may still write, to the library.

The full buffer keeps its identity and gives its memory back: `untyped_storage().resize_(0)`. So everything autograd
saved during forward, also views such as weight.t(), is right again once the buffer is refilled for backward. Memory
that a `GatheredParameters` block has shown, or of which a module returns a view (weight[:n], of positions), is left to
whoever kept a view of it, a user or a graph.
A freed parameter keeps its shape (`Freed` in parameter.py): computing with it gathers it, or is an error that names it.
FSDP1 frees the same way (torch/distributed/utils.py, `_free_storage`); DeepSpeed swaps `param.data` for an empty
tensor (deepspeed/runtime/zero/partition_parameters.py), which views kept by autograd do not see.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from refimpl.checkpoint.errors import together
from refimpl.comm.group import Group
from refimpl.comm.work import Work
from refimpl.offload.blocks import OffloadError
from refimpl.offload.homes import Disk, Host, away
from refimpl.offload.shelf import HostShelf, Shelf
from refimpl.zero.flat import Bucket
from refimpl.zero.gather.ways import Flat, Way
from refimpl.zero.parameter import DATA, Freed, Shown, place, stage_of


class Unit(Bucket):
    """Parameters sharded together. `mine` [S] always exists; `full` [P] has memory between `start` and `free`.

    While it has none its parameters are `Freed`; who computes with one asks `on_use`, which may gather the unit.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        group: Group,
        group_index: int = 0,
        name: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """`params` whole on this rank. Rank 0's values are taken, cut, and freed. `name`: the module, for messages."""
        for p in params:
            if (before := unit_of(p)) is not None:
                before.let_go(p)
            p.zero_unit = self  # type: ignore[attr-defined]
        self.shown = Shown()
        super().__init__(params, group, group_index, name, dtype)
        self.mine = group.empty(self.shard_numel, self.dtype, self.device).copy_(self.shard(self.full))  # [S]
        # [S]: of what no optimizer has nobody asks for it, and it would be 4 bytes an element, and not follow a load.
        self.unrounded = None if self.unrounded is None or group_index < 0 else self.shard(self.unrounded).clone()
        self.changes = 0  # of the weights, since a graph may have been recorded with the old ones
        self.versions = self.written()  # of what was gathered: who writes to it raises them
        self.on_use: Callable[[Unit, str], None] | None = None
        self.fails: Callable[[Exception], Exception] = lambda error: error  # what to raise where a disk gives no shard
        self.begin: Callable[[str], None] = lambda _: None  # called before this rank gathers of its own accord
        self.among: set[Unit] = set()  # the units that have memory now, of which this is one while it has
        self.unit_at: dict[int, Unit] = {}  # units by the storage of `full`, this one among them
        self.state_dicts: Any = None  # before there is a stage: the hooks that bring it whole into a state_dict
        self.is_joined = False  # whether several modules need it, one after the other
        self.is_placeholder = False  # while a state_dict is made of the names; over too when it is gathered next
        self.held = 0  # `whole` blocks that are open
        self.is_shown = False  # whether others may have a view of `full`: of a `GatheredParameters` block, as an output
        self._nothings = {p: away(own) for p, own in self.views.items()}
        self._work: Work | None = None
        self.way: Way = Flat(group)  # how it is gathered to be computed with
        self.exactly: Way = self.way  # ... to be looked at, and changed
        self._is_exact = True
        self._allocated_on = group.streams.current()
        self.is_free = False
        self.free()

    def shelve(self, home: Host, most: int, among: Group) -> None:
        """From now on the shard rests there; on a disk in runs of `most` elements. On a CPU it is at the host.

        OffloadError on every rank of `among` if the disk of one has no room; a collective if it is a disk.
        """
        if isinstance(home, Disk):
            self.rest_on(together(among, lambda: Shelf(home, self.mine, most), OffloadError))
        elif self.device.type != "cpu":
            self.rest_on(HostShelf(home, self.mine))

    def rest_on(self, shelf: Shelf) -> None:
        """From now on the shard rests there; `mine` only shows its shape."""
        self.shelf, self.mine = shelf, away(self.mine)

    def come_back(self) -> None:
        """The shard is in memory again, with what it lost on the way."""
        self.mine, self.shelf = self.group.empty(self.mine.numel(), self.dtype, self.device).copy_(self.now()), None

    def now(self) -> Tensor:
        """This rank's shard [S]; a copy, where it rests on a disk."""
        return self.mine if self.shelf is None else self.shelf.read(self.mine.new_empty(self.mine.shape))

    def room(self, dtype: torch.dtype) -> Tensor:
        """Memory that can be given back."""
        return torch.empty(self.padded, dtype=dtype, device=self.device)

    def adopt(self, root: int) -> None:
        """Take over what rank `root` has in `full`, on every rank: after a change from outside."""
        self.group.broadcast(self.full, root, tag="start")
        self.keep()

    def gather(self, most: int) -> list[Work]:
        """Nothing after an update: a unit is gathered when a module needs it."""
        self.changed()
        return []

    def changed(self) -> None:
        self.changes += 1
        self.way.stale()

    @torch.no_grad()
    def keep(self) -> None:
        """This rank's shard of `full`, which was written on every rank alike."""
        if self.shelf is None:
            self.mine.copy_(self.shard(self.full))
        else:
            self.shelf.write(0, self.shard(self.full))
            self.shelf.was_written = True
        self.versions = self.written()
        self.changed()

    def prefetch(self) -> None:
        """It will be needed soon: begin to gather; or to read from its disk, and to gather when asked again."""
        if self.shelf is None or self.shelf.is_begun:
            self.start()
        else:
            self.shelf.begin()

    def start(self, exact: bool = False) -> None:
        """Begin to gather: mine [S] -> full [P]. Nothing if it is there or on its way.

        `exact`: what the ranks own, also where `way` rounds.
        """
        if exact and not self.is_free and not self._is_exact:
            self.wait()
            self._bring(self.exactly)
        if self.is_free:
            if stage := self.params[0].stage:  # type: ignore[attr-defined]  # it is `Freed`
                stage.parked.refuse("lp_params")  # also where a module inside the model runs by itself
            self.full.untyped_storage().resize_(self.padded * self.full.element_size())
            self._allocated_on = self.group.streams.current()
            self._bring(self.exactly if exact else self.way)
            self.is_free = False
            self.among.add(self)

    def _bring(self, way: Way) -> None:
        mine = self.mine
        if self.shelf is not None:
            try:
                with way.ahead():  # beside what computes: on its stream the next kernels would wait for the link
                    mine = self.shelf.read(self.shard(self.full))
            except OffloadError as error:
                raise self.fails(error) from error
        self._work, self._is_exact = way.gather(self.full, mine), way.is_exact
        self.is_placeholder = False

    def wait(self) -> None:
        """Return when the parameters may be used."""
        if self.is_free:
            self.start()
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.attach()

    def attach(self) -> None:
        super().attach()
        self.versions = self.written()

    def written(self) -> list[int]:
        """How often each parameter was written in place, and all of them through `data`."""
        return [*[p._version for p in self.params], self.shown.writes()]

    @torch.no_grad()
    def take_in(self) -> None:
        """What `p.data = new` has put in a parameter's place, into the parameter's own."""
        for p, own in self.views.items():
            new = DATA.__get__(p)
            if new.data_ptr() != own.data_ptr():
                DATA.__set__(p, own)
                p.data.copy_(new)

    def become(self, mine: Tensor) -> None:
        """The one parameter, freed, is of another dtype from now on, of which this rank's shard is `mine` [S]."""
        self.dtype, self.mine = mine.dtype, self.group.empty(mine.numel(), mine.dtype, self.device).copy_(mine)
        if self.shelf is not None:
            self.rest_on(self.shelf.like(self.mine))
        self.full = self.room(self.dtype)
        self.views = {p: self.piece(self.full, p) for p in self.views}
        self.full.untyped_storage().resize_(0)
        self._nothings = {p: away(own) for p, own in self.views.items()}
        place(self._nothings, Freed)

    def let_go(self, p: nn.Parameter) -> None:
        """From now on p is another's: its memory stays where that puts it."""
        del self.views[p], self._nothings[p]

    @property
    def is_whole(self) -> bool:
        """Whether its parameters may be used."""
        return not self.is_free and self._work is None

    @property
    def in_flight(self) -> bool:
        return self._work is not None

    def free(self) -> None:
        """Give the memory of `full` back; if it `is_shown`, to whoever has a view of it: other is taken next time."""
        if self.is_free:
            if self.shelf is not None:
                self.shelf.drop()
            return
        if self.held:
            return
        if self._work is not None and self.group.patience.lost is not None:
            self._work.leave()
            self._work, self.is_free = None, True
            self.among.discard(self)
            return
        self.wait()
        written = self.versions != self.written()
        place(self._nothings, Freed)
        self.group.streams.followed_by(self._allocated_on)  # whose next tensor may get this memory
        if self.is_shown:
            self._leave()
        self.full.untyped_storage().resize_(0)
        self.is_free = True
        self.among.discard(self)
        if written:
            raise RuntimeError(
                f"a parameter of {self.name} was written while it was gathered, which is lost: write inside "
                "`with GatheredParameters(parameters, modifier_rank=0):`, not in forward (Embedding(max_norm=...) does)"
            )

    def _leave(self) -> None:
        self.is_shown = False
        self.unit_at.pop(self.full.untyped_storage()._cdata, None)
        self.full.set_(self.room(self.dtype))  # type: ignore[call-overload]
        self.views = {p: self.piece(self.full, p) for p in self.views}
        self.unit_at[self.full.untyped_storage()._cdata] = self

    def asked(self, what: str) -> bool:
        """`what` is to be done with what is freed: let `on_use` gather it; whether it may be done now."""
        if self.is_placeholder and what in ("detach", "data", "clone"):  # all that a state_dict asks of it
            return True
        if self.on_use is not None:
            self.on_use(self, what)
        return not self.is_free

    def wanted(self, p: nn.Parameter, what: str) -> None:
        """`what` computes with p, which is freed: if it may not, say what to do."""
        if not self.asked(what):
            stage = stage_of(p)
            name = stage.name_of(p) if stage else f"of {self.name}"
            where = "outside its module's forward" if stage else "before `initialize`, and after destroy(),"
            raise RuntimeError(
                f"parameter {name}: {what} needs its values, and {where} this rank has 1/N of them. Inside `with "
                "GatheredParameters(parameters, modifier_rank=0):` they are whole and changes kept; "
                "stage.full_parameter(name) reads one, stage.full_state_dict() all for rank 0 (each on every rank)"
            )

    def copy_of(self, p: nn.Parameter, what: str = "") -> Tensor:
        """p whole, in memory of its own. A collective; `what` of this rank's own accord needs it, if it says so."""
        if what:
            self.begin(what)
        with whole([p]):
            return self.piece(self.full, p).clone()


def unit_of(p: nn.Parameter) -> Unit | None:
    """The unit that shards p, if any."""
    return getattr(p, "zero_unit", None)


class whole:
    """Parameters that may be sharded, whole for the time of a `with` block. A collective; what is written is lost."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.units = list({id(u): u for p in params if (u := unit_of(p)) is not None}.values())
        self._free_after: list[Unit] = []

    def __enter__(self) -> list[Unit]:
        self._free_after = [u for u in self.units if u.is_free]
        for unit in self.units:
            unit.start(exact=True)
        for unit in self.units:
            unit.wait()
            unit.held += 1
        return self.units

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        for unit in self.units:
            unit.held -= 1
        for unit in self._free_after:
            unit.free()
