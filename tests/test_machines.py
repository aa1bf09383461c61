"""Two machines for real, as far as one kernel goes: each with its own network card, processes and name, and a cable.

Ranks of two network namespaces share no memory and see no process of each other. What the card has sent is the kernel's
count, not ours. The ranks are started as docs/kubernetes.yaml has it: a machine stands for a pod, whose name and whose
peers' names it has, and whose index is put in the command.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import run

ROOT = Path(__file__).parents[1]
HOSTS = "192.0.2.1", "192.0.2.2"  # a network that is nobody's: RFC 5737
pytestmark = pytest.mark.xdist_group("machines")
NAMES = Path("/etc/netns")  # what stands there for a namespace is /etc's in it: see ip-netns(8)

TRAIN = r"""
import hashlib, json, os, re, subprocess, sys, torch, refimpl
from pathlib import Path
from refimpl import DDP, Group, Zero1, Zero2, Zero3
from refimpl.model.gpt import GPT, GPTConfig

def on_the_wire():
    # What TCP has carried, once: each packet begins with 66 bytes of Ethernet, IP and TCP. How many there are, how many
    # acknowledgements, which have no more, how much is sent again because two cores let one packet overtake another,
    # and how often who waits asks the store, is a matter of the machine's load.
    if not sys.argv[1:]:
        return 0
    card = Path("/sys/class/net/eth0/statistics")
    sent = {what: int((card / f"tx_{what}").read_text()) for what in ("bytes", "packets")}
    other = 0
    for line in subprocess.run(["ss", "-tinOH"], check=True, capture_output=True, text=True).stdout.splitlines():
        (here, mine), (there, its) = re.findall(r"([\d.]+)\]?:(\d+)", line)[:2]
        if here != there:  # else it never comes to the card
            what = "sent" if os.environ.get("MASTER_PORT") in (mine, its) else "retrans"
            other += sum(map(int, re.findall(rf"bytes_{what}:(\d+)", line)))
    return sent["bytes"] - 66 * sent["packets"] - other

def train(kind):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=128, context=16))
    stage = kind(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    tokens = torch.arange(32).view(2, 16) + stage.group.rank
    stage.group.barrier()  # of what came with the model nothing is left in a socket's buffer
    stage.group.ledger.reset()
    before = on_the_wire()
    for _ in range(2):
        model(tokens, tokens.roll(1)).backward()
        stage.optimizer.step()
    stage.group.barrier()
    sent, wired = sum(stage.group.ledger.sent_bytes().values()), on_the_wire() - before
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(value.numpy().tobytes())
    return type(stage.group.transport).__name__, sent, wired, digest.hexdigest()

def both():
    return {kind.__name__: train(kind) for kind in (DDP, Zero1, Zero2, Zero3)}
"""


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    """The manifest's objects, by their kind."""
    yaml = pytest.importorskip("yaml")
    return {made["kind"]: made for made in yaml.safe_load_all((ROOT / "docs" / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def cable(kinds: dict[str, Any]) -> Iterator[list[list[str]]]:
    """What starts a command on each of two machines, which find each other by the names that pods would have."""
    job, domain = kinds["Job"]["metadata"]["name"], kinds["Job"]["spec"]["template"]["spec"]["subdomain"]
    names = [f"refimpl-{os.getpid()}-{side}" for side in "ab"]
    if os.geteuid() or not all(shutil.which(tool) for tool in ("ip", "ss", "unshare")):
        pytest.skip("needs root, iproute2 and util-linux, to make two machines of one")
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for name, address in zip(names, HOSTS, strict=True):
            for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip(f"-n {name} {words}")
            (NAMES / name).mkdir(parents=True)
            known = [f"{host} {job}-{index}.{domain} {job}-{index}" for index, host in enumerate(HOSTS)]
            (NAMES / name / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        own = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
        called = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        yield [["ip", "netns", "exec", name, *own, called, f"{job}-{i}"] for i, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(NAMES / name, ignore_errors=True)


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system makes no second machine: ip {words}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def ranks(
    kinds: dict[str, Any], cable: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> list[subprocess.CompletedProcess[str]]:
    """What a rank on each machine said: it trains by every stage, and then rank 1 leaves while rank 0 waits for it."""
    script = tmp_path_factory.mktemp("pods") / "train.py"
    script.write_text(
        TRAIN + "refimpl.join('cpu', timeout=60)\nprint(json.dumps(both()))\n"
        "if Group.world().rank: raise ValueError('mine')\nGroup.world().barrier()\n"
    )
    (container,) = kinds["Job"]["spec"]["template"]["spec"]["containers"]
    said = {one["name"]: one["value"] for one in container["env"]}
    started = [
        subprocess.Popen(
            [*start, *as_pod(container["command"], index, script), "wire"],
            env={**os.environ, **said, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},  # as torchrun for several
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index, start in enumerate(cable)
    ]  # fmt: skip
    try:
        outputs = [pod.communicate(timeout=120) for pod in started]
    finally:
        for pod in started:
            pod.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *out) for p, out in zip(started, outputs, strict=True)]


def as_pod(command: list[str], index: int, script: Path) -> list[str]:
    """The manifest's command with the pod's index, as a kubelet puts it there, and one rank, as there is no GPU."""
    torchrun, *options, _ = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command]
    assert torchrun == "torchrun"
    one_rank = [re.sub(r"^--nproc-per-node=\d+$", "--nproc-per-node=1", option) for option in options]
    return [sys.executable, "-m", "torch.distributed.run", *one_rank, str(script)]


def test_the_manifest_agrees_with_itself(kinds: dict[str, Any]) -> None:
    service, job = kinds["Service"], kinds["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(word.removeprefix("--").split("=") for word in container["command"][1:-1])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert options["master-addr"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": int(options["nproc-per-node"])}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_every_stage_sends_its_bytes_over_the_cable_and_ends_with_the_bits_of_one_machine(
    ranks: list[subprocess.CompletedProcess[str]],
) -> None:
    def here() -> dict[str, tuple[str, int, int, str]]:
        scope: dict[str, object] = {}
        exec(TRAIN, scope)
        return scope["both"]()  # type: ignore[operator, no-any-return]

    assert all(rank.stdout for rank in ranks), ranks[0].stderr + ranks[1].stderr
    for rank, alone in zip(ranks, run(here), strict=True):
        there = json.loads(rank.stdout)
        for stage, (transport, sent, wired, bits) in there.items():
            assert transport == "Composed"
            assert (alone[stage][0], alone[stage][1], alone[stage][3]) == ("Shared", sent, bits)
            assert sent < wired < 1.01 * sent, (stage, sent, wired)  # and what gloo says


def test_a_rank_of_another_machine_that_leaves_is_told(ranks: list[subprocess.CompletedProcess[str]]) -> None:
    left, raised = ranks
    assert (left.returncode, raised.returncode) == (1, 1)
    assert "ValueError: mine" in raised.stderr
    assert "RankLost: rank 0 waits in vain in barrier" in left.stderr
