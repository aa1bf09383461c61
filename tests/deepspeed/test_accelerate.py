"""Hugging Face's accelerate and transformers on two ranks, with refimpl under the name deepspeed (extra `hf`)."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from foreign import run_script

missing = [name for name in ("accelerate", "transformers") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}: pip install 'zero-from-scratch[hf]'")

LLAMA = """
import os, sys, torch
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, PartialState

stage, folder = int(sys.argv[1]), sys.argv[2]
shape = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
tokens = torch.stack([(torch.arange(17) + i) % 64 for i in range(64)])
torch.manual_seed(0)
"""

ACCELERATOR = """
plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0,
                         zero3_save_16bit_model=True)
accelerator = Accelerator(mixed_precision="no", deepspeed_plugin=plugin,
                          kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
model = LlamaForCausalLM(shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(tokens, batch_size=4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
assert type(model).__module__ == "refimpl.engine.engine" and accelerator.num_processes == 2
losses = []

def epoch():
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())

epoch()
accelerator.save_state(folder)
epoch()
accelerator.load_state(folder)
epoch()
assert losses[8:16] == losses[16:], losses  # from where it was saved, once more
assert min(losses) < losses[0] - 0.5 and model.global_steps == 8, losses
state = accelerator.get_state_dict(model)
assert state is None or all(weight.isfinite().all() for weight in state.values())
assert accelerator.unwrap_model(model).config.hidden_size == model.config.get("nothing", 32)
print(f"losses {accelerator.process_index} {losses}\\n", end="", flush=True)
accelerator.end_training()
"""

TRAINER = """
PartialState(backend="gloo")  # on a CPU accelerate asks for it
auto = {name: "auto" for name in (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")}
config = {**auto, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}},
    "scheduler": {"type": "WarmupDecayLR", "params": {name: "auto" for name in (
        "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")}},
    "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True}}
if os.environ["RANK"] == "0":
    LlamaForCausalLM(shape).save_pretrained(folder + "/tiny")
torch.distributed.barrier()
arguments = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
    learning_rate=1e-2, report_to=[], deepspeed=config, save_strategy="epoch", logging_steps=1, disable_tqdm=True,
    lr_scheduler_type="linear", warmup_steps=2, accelerator_config={"use_configured_state": True})
model = AutoModelForCausalLM.from_pretrained(folder + "/tiny")
assert hasattr(model.lm_head.weight, "ds_id") == (stage == 3)  # built in shards
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
trainer.train(resume_from_checkpoint=sys.argv[3] if len(sys.argv) > 3 else None)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert trainer.evaluate()["eval_loss"] < losses[0] - 0.5
trainer.save_model(folder + "/final")
torch.distributed.barrier()
made = trainer.model_wrapped.generate(input_ids=tokens[:1, :4], max_new_tokens=3, do_sample=False)
assert made.shape == (1, 7)
saved = AutoModelForCausalLM.from_pretrained(folder + "/final").state_dict() if stage < 3 else {}
assert all(weight.isfinite().all() for weight in saved.values())
print(f"losses {losses}\\n", end="", flush=True)
"""


def test_accelerate(tmp_path: Path) -> None:
    said = []
    for stage in range(4):
        arguments = (str(stage), str(tmp_path / f"stage{stage}"))
        out = run_script(LLAMA + ACCELERATOR, tmp_path, *arguments, ranks=2, alias=True)
        lines = sorted(line for line in out.splitlines() if line.startswith("losses"))
        said.append([json.loads(line[len("losses 0 ") :]) for line in lines])
    assert len(said[0]) == 2
    assert said[0] == said[1]
    assert said[2] == said[3]
    for early, late in zip(said[0], said[2], strict=True):  # these reduce each micro-batch: added in another order
        assert early == pytest.approx(late, rel=1e-6)


def test_the_trainer(tmp_path: Path) -> None:
    said = []
    for stage in (2, 3):
        folder = tmp_path / f"stage{stage}"
        for go_on in ((), (str(folder / "checkpoint-8"),)):  # all the way, and from the middle in another process
            out = run_script(LLAMA + TRAINER, tmp_path, str(stage), str(folder), *go_on, ranks=2, alias=True)
            said.append([line for line in out.splitlines() if line.startswith("losses")])
    assert len(said[0]) == 2
    assert said[0] == said[1] == said[2] == said[3]
