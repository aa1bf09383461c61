"""`deepspeed.checkpointing`: every option and key does what it says, in every stage, with the plain run's bits."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worlds import run

import refimpl.deepspeed as deepspeed
from refimpl.activation.arena import ArenaFull, Contiguous
from refimpl.activation.home import TAG, Host, Partitioned, gathered_bytes
from refimpl.comm.group import Group
from refimpl.deepspeed.runtime.activation_checkpointing import checkpointing
from refimpl.deepspeed.runtime.activation_checkpointing.rng import CudaRNGStatesTracker
from refimpl.engine.activations import boundary
from refimpl.engine.configuration.keys import ConfigWarning
from refimpl.model.gpt import GPT, GPTConfig

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
SECTION = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 3,
    "synchronize_checkpoint_boundary": True,
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    """What `configure` has said is the process's."""
    checkpointing._configured = checkpointing._Configured()


class Layers(nn.Module):
    """Three blocks of odd width with dropout, each checkpointed as DeepSpeed's scripts do it; a mask as well."""

    def __init__(self, checkpointed: bool, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * width, width))
            for _ in range(3)
        )
        self.checkpointed = checkpointed

    def block(self, layer: nn.Module, x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        return x + layer(x) * mask * scale, None

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        for layer in self.layers:
            if self.checkpointed:
                x, _ = deepspeed.checkpointing.checkpoint(self.block, layer, x, mask, scale=0.5)
            else:
                x, _ = self.block(layer, x, mask, scale=0.5)
        return x.square().mean()


class Neighbours:
    """An mpu: ranks in groups of `size`, which get the same samples and compute the same."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size()
        groups = [list(range(first, min(first + size, world))) for first in range(0, world, size)]
        made = [dist.new_group(ranks) for ranks in groups]
        self.group, self.replicas = made[dist.get_rank() // size], world // size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return self.replicas


def trained(stage: int, checkpointed: bool, section: dict[str, Any] | None, size: int) -> dict[str, Tensor]:
    """Weights after three steps; `size` neighbours get the same samples."""
    if section is not None and size > 1:
        mpu, micro = Neighbours(size), 2
        sizes = {"train_batch_size": micro * mpu.replicas, "train_micro_batch_size_per_gpu": micro}
        deepspeed.checkpointing.configure(mpu, sizes | {"activation_checkpointing": section})
    torch.manual_seed(0)
    config = CONFIG | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    if section is not None and size == 1:
        config |= {"activation_checkpointing": section}
    engine, *_ = deepspeed.initialize(model=Layers(checkpointed), config=config)
    torch.manual_seed(5)  # neighbours drop the same
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + engine.group.rank // size)
        engine.backward(engine(torch.randn(2, 7, generator=generator)))
        engine.step()
    assert checkpointing.is_configured() == (section is not None)
    if isinstance(home := checkpointing._configured.how.home, Partitioned):
        assert home.then.arenas  # type: ignore[union-attr]
        deepspeed.checkpointing.reset()
        assert not home.then.arenas  # type: ignore[union-attr]
    return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 3), (2, 1)])
def test_the_section_in_every_stage(stage: int, ranks: int, size: int) -> None:
    section = SECTION if size > 1 else {**SECTION, "partition_activations": False}
    plain, mine = (run(trained, stage, on, section if on else None, size, ranks=ranks) for on in (False, True))
    for a, b in zip(plain, mine, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def gathered() -> tuple[int, int]:
    """Bytes that a partitioned forward and backward sends, and by formula."""
    deepspeed.checkpointing.configure(Neighbours(dist.get_world_size()), partition_activations=True)
    home = checkpointing._configured.how.home
    assert isinstance(home, Partitioned)
    torch.manual_seed(0)
    x = torch.randn(2, 7, requires_grad=True)
    Layers(checkpointed=True)(x).backward()
    return home.group.ledger.sent_bytes("tag")[TAG], 3 * gathered_bytes(x, home.group.size) + 16 * (home.group.size - 1)


def test_partitioned_bytes() -> None:
    for sent, formula in run(gathered, ranks=3):
        assert sent == formula  # the last term compares the first input over the group


def beside_tensor_ranks(before: str) -> tuple[list[int], int]:
    """The ranks that share an activation, and what this one's dropout in a cut layer is seeded with; without an mpu."""
    assert not checkpointing.is_configured(), "another call's"
    settings = {
        "train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2},
        "activation_checkpointing": {"partition_activations": True},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # nobody to share with yet
        if before == "engine":
            deepspeed.initialize(model=nn.Linear(2, 2), config=settings | {"tensor_parallel": {"autotp_size": 1}})
        if before == "configure":
            deepspeed.checkpointing.configure(partition_activations=True)
    deepspeed.initialize(model=GPT(GPTConfig(vocab=8, layers=1, width=8, heads=2, context=4)), config=settings)
    home = checkpointing._configured.how.home
    assert isinstance(home, Partitioned)
    checkpointing.model_parallel_cuda_manual_seed(5)
    with checkpointing.get_cuda_rng_tracker().fork():
        return home.group.ranks, int(torch.randint(10**9, ()))


@pytest.mark.parametrize("before", ["nothing", "engine", "configure"])
def test_the_last_engines_tensor_ranks_are_the_neighbours(before: str) -> None:
    results = run(beside_tensor_ranks, before, ranks=4)
    assert [ranks for ranks, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    (first, second), others = [seed for _, seed in results[:2]], [seed for _, seed in results[2:]]
    assert [first, second] == others
    assert first != second


def homes(**options: Any) -> Any:
    deepspeed.checkpointing.configure(None, **options)
    return checkpointing._configured.how.home


def test_what_each_option_becomes() -> None:
    assert homes() is None
    assert isinstance(homes(checkpoint_in_cpu=True), Host)
    arena = homes(contiguous_checkpointing=True, num_checkpoints=2, checkpoint_in_cpu=True)
    assert isinstance(arena, Contiguous)
    assert (arena.number, arena.device) == (2, torch.device("cpu"))
    with pytest.warns(ConfigWarning, match="no other rank computes the same activations"):
        both = homes(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
    assert isinstance(both.then, Contiguous)
    with pytest.raises(AssertionError, match="number of layers"):
        deepspeed.checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)


def test_an_argument_wins_over_the_file() -> None:
    file = CONFIG | {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}
    deepspeed.checkpointing.configure(None, deepspeed_config=file, profile=False)
    assert (checkpointing.CPU_CHECKPOINT, checkpointing.PROFILE_TIME) == (True, False)
    assert checkpointing.num_layers is None
    deepspeed.checkpointing.set_num_layers(7)
    for wrong in (lambda: deepspeed.checkpointing.set_num_layers(-1), lambda: homes(num_checkpoints=-1)):
        with pytest.raises(ValueError, match=r"activation_checkpointing\.number_checkpoints: .* or equal to 1; got -1"):
            wrong()
    assert (checkpointing.CPU_CHECKPOINT, checkpointing.num_layers) == (True, 7)


def test_an_arena_without_a_size_is_told_and_trains() -> None:
    """Files for Hugging Face's scripts leave number_checkpoints out; DeepSpeed's engine reads neither key."""
    config = CONFIG | {"activation_checkpointing": {"contiguous_memory_optimization": True, "cpu_checkpointing": True}}
    with pytest.warns(ConfigWarning, match=r"needs activation_checkpointing\.number_checkpoints"):
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    assert isinstance(checkpointing._configured.how.home, Host)
    deepspeed.checkpointing.configure(None, deepspeed_config=config, num_checkpoints=3)  # as Megatron's scripts do
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    assert checkpointing._configured.how.home.number == 3
    with pytest.warns(ConfigWarning, match=r"needs activation_checkpointing\.number_checkpoints"):
        assert isinstance(engine.activation_checkpoint.home, Host)


def test_what_has_no_effect_is_told_once_at_the_scripts_line() -> None:
    """However many engines: a generator and its discriminator, or a later one without the section."""
    config = CONFIG | {"activation_checkpointing": {"contiguous_memory_optimization": True}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for settings in (config, config, CONFIG):
            deepspeed.initialize(model=nn.Linear(2, 2), config=settings)
        homes(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
    assert [str(w.message).split()[0] for w in told] == [
        "activation_checkpointing.contiguous_memory_optimization", "activation_checkpointing.partition_activations",
    ]  # fmt: skip
    assert {w.filename for w in told} == {__file__}


def test_number_checkpoints_is_a_limit_and_reset_gives_the_memory_back() -> None:
    home = homes(contiguous_checkpointing=True, num_checkpoints=2)
    with pytest.raises(ArenaFull, match="number_checkpoints is 2"):
        Layers(checkpointed=True)(torch.ones(2, 7))
    assert home.arenas
    deepspeed.checkpointing.reset()
    assert not home.arenas


def test_profile_tells_both_runs(capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed.checkpointing.configure(None, profile=True)
    deepspeed.checkpointing.checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "activation checkpoint | forward",
        "activation checkpoint | backward",
    ]


def test_a_cpu_beside_a_gpu_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait for it would give this process a context there, of half a gigabyte."""
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    for initialized, waits in ((False, 0), (True, 2)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda initialized=initialized: initialized)
        with boundary("forward", waits=True, tells=False):
            pass
        assert len(waited) == waits


def test_an_engine_has_its_own() -> None:
    config = CONFIG | {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 1}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 3), config=config)
    assert isinstance(engine.activation_checkpoint.home, Contiguous)
    engine.activation_checkpoint(engine, torch.ones(2, 3)).sum().backward()


def test_generators_by_name_are_set_back() -> None:
    """Megatron's dropout inside model-parallel regions."""
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()

    def fn(x: Tensor) -> Tensor:
        with tracker.fork():
            x = nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(x, 0.5).exp()

    x = torch.ones(64, requires_grad=True)
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    fn(x).sum().backward()
    plain, x.grad = x.grad, None
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    deepspeed.checkpointing.checkpoint(fn, x).sum().backward()
    assert plain is not None
    assert x.grad is not None
    assert torch.equal(plain, x.grad)
    with pytest.raises(ValueError, match="already exists"):
        tracker.add("model-parallel-rng", 1)
    with pytest.raises(KeyError, match="was not added"), tracker.fork("another"):
        pass


def test_the_generator_is_added_and_set_by_megatrons_names() -> None:
    """GPT-NeoX takes these names while it is imported, SwissArmyTransformer adds its generator by them."""
    tracker, name = checkpointing._CUDA_RNG_STATE_TRACKER, checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME
    assert tracker is checkpointing.get_cuda_rng_tracker()
    tracker.add(name, 1)
    with tracker.fork():  # of the name that it has when none is said
        drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    checkpointing._set_cuda_rng_state(tracker.get_states()[name])
    following = torch.rand(3)
    with tracker.fork():
        assert torch.equal(following, torch.rand(3))


def test_a_fork_within_a_fork_goes_on_where_its_stream_was() -> None:
    """Also in its own: each name has one stream, however the blocks lie in each other."""
    nested, plain = CudaRNGStatesTracker(), CudaRNGStatesTracker()
    for tracker in (nested, plain):
        tracker.add("a", 1)
        tracker.add("b", 2)
    torch.manual_seed(3)
    common = torch.get_rng_state()
    with nested.fork("a"):
        a, b = [torch.rand(3)], []
        with nested.fork("b"):
            b.append(torch.rand(3))
            with nested.fork("a"):
                a.append(torch.rand(3))
            b.append(torch.rand(3))
        with nested.fork("a"):
            a.append(torch.rand(3))
        a.append(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), common)
    for name, drawn in (("a", a), ("b", b)):
        with plain.fork(name):
            assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(3) for _ in drawn]))
        assert torch.equal(nested.get_states()[name], plain.get_states()[name])


def test_a_detached_variable_is_a_leaf_that_needs_a_gradient_where_it_did() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    leaf, whole, other = checkpointing.detach_variable((x, torch.arange(2), "other"), device="cpu")
    leaf.sum().backward()
    assert leaf.grad.equal(torch.ones(2))
    assert leaf.equal(x)
    assert not whole.requires_grad
    assert other == "other"


def test_an_input_is_there_after_the_call() -> None:
    """DeepSpeed empties what it has partitioned or sent to the CPU, and refuses to see it again."""
    homes(contiguous_checkpointing=True, num_checkpoints=2)
    hidden, shared = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    for call in (deepspeed.checkpointing.checkpoint, lambda fn, *args: fn(*args)):
        y = call(torch.mul, call(torch.mul, hidden, shared), shared)
        y.sum().backward()
    assert torch.equal(hidden.grad, torch.full((3,), 8.0))  # type: ignore[arg-type]
    assert torch.equal(shared.grad, torch.full((3,), 8.0))  # type: ignore[arg-type]


def test_alone_there_is_no_group() -> None:
    assert Partitioned(Group(None)).put(torch.ones(3)) is None
