"""A script written for DeepSpeed runs with one line changed: its import."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import run_on_ranks, run_script

import refimpl.deepspeed as deepspeed

# Follows https://www.deepspeed.ai/getting-started/: arguments, initialisation, the three-line loop, checkpoints.
SCRIPT = """
import argparse

import torch

import refimpl.deepspeed as deepspeed


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = torch.nn.Linear(32, 64)
        self.linear2 = torch.nn.Linear(64, 8)

    def forward(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.linear2(self.linear1(x).relu()), y)


parser = argparse.ArgumentParser(description="My training script.")
parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
parser.add_argument("--save_dir")
parser = deepspeed.add_config_arguments(parser)
cmd_args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=cmd_args.deepspeed_config):
    model = Model()
dataset = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(8, (64,)))
model_engine, optimizer, data_loader, _ = deepspeed.initialize(
    args=cmd_args, model=model, model_parameters=model.parameters(), training_data=dataset
)

losses = []
for epoch in range(5):
    total = 0.0
    for step, batch in enumerate(data_loader):
        loss = model_engine(batch)
        model_engine.backward(loss)
        model_engine.step()
        total += loss.item()
    losses.append(total)
model_engine.save_checkpoint(cmd_args.save_dir, client_state={"epoch": epoch})
_, client_sd = model_engine.load_checkpoint(cmd_args.save_dir)
assert client_sd["epoch"] == 4
assert model.linear1.weight.ds_status.name == "NOT_AVAILABLE"  # in shards
with deepspeed.zero.GatheredParameters([model.linear1.weight]):
    assert model.linear1.weight.shape == (64, 32)
deepspeed.comm.barrier()
assert losses[-1] < losses[0], losses
rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
print(f"rank {rank} of {size}: {model_engine.global_steps} steps", flush=True)
"""

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2}},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 0,
    },
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_getting_started_script_runs_unchanged(ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIG))
    arguments = ["--deepspeed", "--deepspeed_config", str(file), "--save_dir", str(tmp_path / "out")]
    run = run_script if ranks == 1 else run_on_ranks
    said = run(SCRIPT, tmp_path, *arguments)
    steps = 5 * 64 // 16
    found = re.findall(r"rank \d of \d: \d+ steps", said)  # two ranks may share a line
    assert sorted(found) == [f"rank {r} of {ranks}: {steps} steps" for r in range(ranks)]


def test_the_arguments_of_a_deepspeed_script() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")
    assert parser.parse_args([]).deepspeed_config is None


def test_importing_refimpl_loads_nothing_heavy() -> None:
    code = (
        "import sys, refimpl; assert 'torch' not in sys.modules; "
        "import refimpl.launch; assert not {'pydantic', 'pandas', 'safetensors'} & set(sys.modules); "
        "assert refimpl.DDP.__name__ == 'DDP' and 'initialize' in dir(refimpl); "
        "[getattr(refimpl, name) for name in refimpl.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    import refimpl

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        refimpl.nonsense  # noqa: B018
