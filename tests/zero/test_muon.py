"""Muon in every stage: a matrix that is cut across ranks is made orthogonal as a whole, so the bits of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import STAGES, Job, Net, differing, muon, oracle, train
from worlds import run

import refimpl
from refimpl.comm.group import Group
from refimpl.optim.loss_scale import DynamicLossScaler
from refimpl.optim.muon import Muon, made
from refimpl.zero.optimizer.whole_matrices import WholeMatrices

every_stage = pytest.mark.parametrize("stage", list(STAGES))


JOB = Job(optimizer=muon)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@every_stage
def test_the_bits_of_one_process(stage: str, ranks: int) -> None:
    """Tied, frozen, unused and odd-sized parameters; matrices that lie across up to four ranks."""
    assert differing(run(train, stage, JOB, ranks=ranks)[0].weights, oracle(ranks, JOB)) == []


def test_parts_made_orthogonal_by_themselves_give_other_weights() -> None:
    """Else the test above would not tell whether matrices are brought together."""

    def rows(self: WholeMatrices, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        return [made(u.view(1, -1)) for u in updates]

    def parts() -> Any:
        WholeMatrices.__call__, before = rows, WholeMatrices.__call__  # type: ignore[method-assign]
        try:
            return train("zero1", JOB).weights
        finally:
            WholeMatrices.__call__ = before  # type: ignore[method-assign]

    assert differing(run(parts, ranks=2)[0], oracle(2, JOB)) != []


def test_all_stages_agree_bit_for_bit_in_fp16_with_an_overflow_and_clipping() -> None:
    job = Job(
        optimizer=muon, dtype=torch.float16, clip=0.05, poison=(2, 1), scaler=lambda: DynamicLossScaler(256.0)
    )  # fmt: skip
    outcomes = [run(train, stage, job, ranks=3)[0] for stage in STAGES]
    for out in outcomes:
        assert out.done == [True, True, False, True, True]
        assert differing(out.weights, outcomes[0].weights or {}) == []


@every_stage
def test_a_group_added_later_becomes_two(stage: str) -> None:
    """Each with the parameters of its kind and its own options; in ZeRO-3 what is gathered as one cannot be in both."""

    def grown(bias: bool) -> list[tuple[bool, float, list[int]]]:
        model = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 5, bias=bias), nn.LayerNorm(5))
        optimizer = Muon(model[0].parameters())
        built = STAGES[stage](model, optimizer)
        optimizer.add_param_group({"params": list(model[1:].parameters()), "lr": 0.5})
        built.backward(model(torch.ones(2, 7)).square().sum())
        built.step()
        return [
            (g["use_muon"], g["lr"], sorted(p.ndim for p, index in built.group_of.items() if index == i))
            for i, g in enumerate(optimizer.param_groups)
        ]

    before: list[Any] = [(True, 0.02, [2]), (False, 3e-4, [])]
    assert run(grown, False)[0] == [*before, (True, 0.5, [2]), (False, 0.5, [1, 1])]
    if stage == "zero3":
        with pytest.raises(Exception, match=r"ZeRO-3 gathers and updates 1\.\w+ together with 1\.\w+"):
            run(grown, True)
    else:
        assert run(grown, True)[0] == [*before, (True, 0.5, [2]), (False, 0.5, [1, 1, 1])]


@every_stage
def test_its_message_is_two_bytes_an_element_of_a_matrix(stage: str) -> None:
    def sent() -> tuple[int, int]:
        group = Group.world()
        torch.manual_seed(0)
        model = Net()
        built = STAGES[stage](model, muon(model), group)  # type: ignore[call-arg]
        built.backward(model(torch.ones(2, 7, dtype=torch.int64)))
        group.ledger.reset()
        built.step()
        shards = [b.shard_numel for b in built.update.owned if b.group_index == 0]
        return group.ledger.sent_bytes("tag").get("matrices", 0), 2 * (group.size - 1) * sum(shards)

    counted, formula = run(sent, ranks=3)[0]
    assert formula > 0
    assert counted == (0 if stage == "ddp" else formula)


CONFIG = {
    "train_batch_size": 12,
    "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 1e-2, "momentum": 0.9, "ns_method": "gram"}},
    "gradient_clipping": 0.5,
}


def by_json(stage: int, path: Path, goes_on: bool, section: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    zero = section | {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700}
    engine = refimpl.initialize(model=Net(), config=CONFIG | {"zero_optimization": zero})[0]
    kinds = {g["use_muon"]: g["lr"] for g in engine.basic_optimizer.param_groups}
    assert kinds == {True: 1e-2, False: 1e-3}
    assert not engine.module.embed.weight.use_muon
    if goes_on:
        engine.load_checkpoint(path, f"stage{stage}")
    for step in range(2, 4) if goes_on else range(4):
        if step == 2 and not goes_on:
            engine.save_checkpoint(path, f"stage{stage}")
        for micro in (
            torch.arange(12)
            .view(-1, 12 // engine.group.size)[engine.group.rank]
            .split(engine.train_micro_batch_size_per_gpu())
        ):
            generator = torch.Generator().manual_seed(100 * step + int(micro[0]))
            engine.backward(engine(torch.randint(29, (len(micro), 7), generator=generator)))
            engine.step()
    return {k: v.clone() for k, v in engine.module_state_dict().items()}


def test_what_is_tied_is_no_hidden_matrix_by_any_of_its_names() -> None:
    """As GPT-2's `wte`, which comes before `lm_head`."""
    model = nn.ModuleDict({"wte": nn.Embedding(8, 8), "mlp": nn.Linear(8, 8), "lm_head": nn.Linear(8, 8, bias=False)})
    model["lm_head"].weight = model["wte"].weight
    section = {"type": "Muon", "params": {"lr": 1e-3}}
    engine = refimpl.initialize(model=model, config={"train_batch_size": 1, "optimizer": section})[0]
    assert {name: p.use_muon for name, p in engine.module.named_parameters()} == {
        "wte.weight": False, "mlp.weight": True, "mlp.bias": False,
    }  # fmt: skip


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "section"),
    [(0, {}), (1, {}), (3, {}), (2, {"offload_optimizer": CPU}), (3, {"offload_optimizer": CPU, "offload_param": CPU})],
)
def test_by_a_file_and_from_a_checkpoint(stage: int, section: dict[str, Any], tmp_path: Path) -> None:
    """Its momentum of matrices and AdamW's of the rest; DDP's bits, before and behind a checkpoint."""
    ddp = run(by_json, 0, tmp_path, False, {}, ranks=3)[0]
    ours = run(by_json, stage, tmp_path, False, section, ranks=3)[0]
    assert differing(ours, ddp) == []
    assert differing(run(by_json, stage, tmp_path, True, section, ranks=3)[0], ours) == []
    if section:
        assert differing(run(by_json, stage, tmp_path, True, {}, ranks=3)[0], ours) == [], "or where nothing is there"
