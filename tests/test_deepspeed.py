"""A script written for DeepSpeed runs with one line changed: its import."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
assert model.linear1.weight.isnan().all()  # in shards
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
    script, file = tmp_path / "train.py", tmp_path / "ds_config.json"
    script.write_text(SCRIPT)
    file.write_text(json.dumps(CONFIG))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    arguments = ["--deepspeed", "--deepspeed_config", str(file), "--save_dir", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = 5 * 64 // 16
    said = re.findall(r"rank \d of \d: \d+ steps", done.stdout)  # two ranks may share a line
    assert sorted(said) == [f"rank {r} of {ranks}: {steps} steps" for r in range(ranks)]


def test_the_arguments_of_a_deepspeed_script() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")
    assert parser.parse_args([]).deepspeed_config is None


def test_a_process_without_a_launcher_is_rank_0_of_1() -> None:
    deepspeed.init_distributed()
    deepspeed.comm.barrier()
    assert not deepspeed.comm.is_initialized()
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()) == (0, 1, 0)
    accelerator = deepspeed.get_accelerator()
    assert (accelerator.device_name(), accelerator.communication_backend_name()) == ("cpu", "gloo")


def test_zero_init_takes_the_dtype_from_the_configuration() -> None:
    for config, dtype in (({"bf16": {"enabled": True}}, torch.bfloat16), ({"bf16": {"enabled": False}}, torch.float32)):
        with deepspeed.zero.Init(config_dict_or_path=config):
            layer = torch.nn.Linear(4, 4)
        with deepspeed.zero.GatheredParameters(layer.weight):
            assert layer.weight.dtype == dtype
            assert layer.weight.isfinite().all()


def test_the_optimizers_of_ops() -> None:
    weights = [torch.nn.Parameter(torch.ones(64))]
    adam = deepspeed.ops.adam
    assert type(adam.FusedAdam(weights, lr=0.1)) is torch.optim.AdamW
    assert type(adam.FusedAdam(weights, adam_w_mode=False)) is torch.optim.Adam
    cpu = adam.DeepSpeedCPUAdam(weights, lr=0.1, adamw_mode=False, weight_decay=0.5)
    assert (type(cpu), cpu.defaults["weight_decay"], cpu.defaults["fused"]) == (torch.optim.Adam, 0.5, True)


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
