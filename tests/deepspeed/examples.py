"""Scripts of the shape of DeepSpeedExamples' cifar, gan, HelloDeepSpeed and pipeline (its base path), in few lines.

Like the originals they say `import deepspeed`, read LOCAL_RANK, and know nothing of refimpl.
"""

CIFAR = """
import argparse, os, torch, deepspeed
from torch import nn
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--dtype", default="fp32")
parser.add_argument("--stage", type=int, default=0)
args = deepspeed.add_config_arguments(parser).parse_args()
config = {
    "train_batch_size": 16, "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    "gradient_clipping": 1.0, "prescale_gradients": False,
    "bf16": {"enabled": args.dtype == "bf16"},
    "fp16": {"enabled": args.dtype == "fp16", "fp16_master_weights_and_grads": False, "loss_scale": 0,
             "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 8},
    "zero_optimization": {"stage": args.stage, "allgather_partitions": True, "reduce_scatter": True,
                          "overlap_comm": True, "contiguous_gradients": True},
}
deepspeed.init_distributed()
get_accelerator().set_device(int(os.environ.get("LOCAL_RANK")))
if torch.distributed.get_rank() != 0:
    torch.distributed.barrier()
torch.manual_seed(0)
y = torch.randint(4, (64,))
data = torch.utils.data.TensorDataset(torch.rand(64, 3, 8, 8) + y.view(-1, 1, 1, 1), y)
if torch.distributed.get_rank() == 0:
    torch.distributed.barrier()
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4))
engine, optimizer, loader, __ = deepspeed.initialize(
    args=args, model=net, model_parameters=filter(lambda p: p.requires_grad, net.parameters()),
    training_data=data, config=config)
device = get_accelerator().device_name(engine.local_rank)
dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None
losses = []
for epoch in range(6):
    for inputs, labels in loader:
        inputs, labels = inputs.to(device).to(dtype), labels.to(device)
        loss = nn.CrossEntropyLoss()(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
engine.eval()
with torch.no_grad():
    outputs = engine(data.tensors[0].to(device).to(dtype))
assert outputs.shape == (64, 4)
assert losses[-1] < 0.8 * losses[0], losses
print(f"cifar {engine.global_steps}\\n", end="", flush=True)
"""

GAN = """
import argparse, torch, deepspeed
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
opt_c = torch.optim.Adam(critic.parameters(), lr=0.002, betas=(0.5, 0.999))
opt_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
engine_c, opt_c, _, _ = deepspeed.initialize(
    args=args, model=critic, model_parameters=critic.parameters(), optimizer=opt_c)
engine_g, opt_g, _, _ = deepspeed.initialize(
    args=args, model=generator, model_parameters=generator.parameters(), optimizer=opt_g)
criterion = nn.BCELoss()
for step in range(20):
    critic.zero_grad()
    real, label = torch.randn(8, 8) + 2, torch.ones(8)
    engine_c.backward(criterion(critic(real).flatten(), label))
    fake = generator(torch.randn(8, 4))
    loss_c = criterion(critic(fake.detach()).flatten(), label.fill_(0))
    engine_c.backward(loss_c)
    engine_c.step()
    generator.zero_grad()
    loss_g = criterion(critic(fake).flatten(), label.fill_(1))
    engine_g.backward(loss_g)
    engine_g.step()
losses = f"{loss_c.item():.4f} {loss_g.item():.4f}"
print(f"gan {engine_c.global_steps} {engine_g.global_steps} {losses}\\n", end="", flush=True)
"""

HELLO = """
import os, pathlib, sys, torch, deepspeed
from torch import nn
from deepspeed.accelerator import get_accelerator

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    def forward(self, src_tokens, tgt_tokens):
        scores = self.head(self.layer(self.embed(src_tokens)))
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), tgt_tokens.flatten())

def batches():
    while True:
        tokens = torch.randint(32, (4, 8))
        yield {"src_tokens": tokens, "tgt_tokens": (tokens + 1) % 32}

folder, local_rank = pathlib.Path(sys.argv[1]), int(os.environ.get("LOCAL_RANK", "-1"))
assert get_accelerator().is_available()
torch.manual_seed(42)
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
          "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
model = Model()
model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
start = 1
if len(sys.argv) > 2:
    _, client_state = model.load_checkpoint(load_dir=folder)
    start = client_state["checkpoint_step"] + 1
model.train()
losses = []
for step, batch in enumerate(batches(), start=start):
    if step >= start + 30:
        break
    loss = model(**batch)
    model.backward(loss)
    model.step()
    losses.append(loss.item())
model.save_checkpoint(save_dir=folder, client_state={"checkpoint_step": step - 1})
assert losses[-1] < (0.9 * losses[0] if start == 1 else 3.0), losses
print(f"hello {start} {model.global_steps} {sum(p.numel() for p in model.parameters())}\\n", end="", flush=True)
"""

PIPELINE_BASE = """
import argparse, os, torch, torch.distributed as dist, deepspeed
from torch import nn
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
parser.add_argument("--backend", default="nccl")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(dist_backend=args.backend)
args.local_rank = int(os.environ["LOCAL_RANK"])
torch.manual_seed(0)
deepspeed.runtime.utils.set_random_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 4))
if args.pipeline_parallel_size:
    net = PipelineModule(layers=list(net), loss_fn=nn.CrossEntropyLoss(), num_stages=args.pipeline_parallel_size)
y = torch.randint(4, (32,))
data = torch.utils.data.TensorDataset(torch.rand(32, 3, 8, 8) + y.view(-1, 1, 1, 1), y)
engine, _, dataloader, __ = deepspeed.initialize(
    args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=data)
data_iter, losses = iter(RepeatingLoader(dataloader)), []
for micro_step in range(12 * engine.gradient_accumulation_steps()):
    inputs, labels = next(data_iter)
    loss = nn.CrossEntropyLoss()(engine(inputs.to(engine.device)), labels.to(engine.device))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), losses
print(f"pipeline {dist.get_rank()} {engine.global_steps}\\n", end="", flush=True)
"""
