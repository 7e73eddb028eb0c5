"""A job that torchrun starts again goes on, in a user's own script and in ``shardwright train``.

Under one agent, and under two in network namespaces of their own: a worker is killed on one of them, or a
node leaves and joins again.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fences import fences

LIMIT_S = 150.0
# Its own: no init_process_group, so the package joins the ranks, or (with "own") as scripts for torch do.
SCRIPT = """
import os, sys, signal, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from shardwright import fully_shard
from shardwright.train.restart import this_rank_restarted

folder, how = Path(sys.argv[1]), sys.argv[2:]
if "own" in how:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = fully_shard(nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Linear(8, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, world = dist.get_rank(), dist.get_world_size()
told = torch.tensor(float(this_rank_restarted()))
dist.all_reduce(told, dist.ReduceOp.MAX)
said = bool(told)
steps = 400 if "long" in how else 6
for step in range(steps):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (folder / f"rank{rank}").write_text(f"{os.getpid()} {step} {world}")
    killed = folder / "killed"
    if "long" in how:
        time.sleep(0.05)
    elif rank == 1 and step == 2 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
print(f"trained {rank} of {world}, attempt {attempt}, a restart: {said}", flush=True)
"""
KILL = """
    if dist.get_rank() == {rank} and step == {step} and not os.path.exists("killed"):
        import signal, threading
        open("killed", "w").close()
        threading.Timer({later_s}, os.kill, (os.getpid(), signal.SIGKILL)).start()
"""
READMES = [fence for fence in fences("README.md") if "+from shardwright" in fence.text]
KILLS = """
import os, signal
from pathlib import Path
if os.environ.get("RANK") == "1":
    from shardwright.train import eager

    rate = eager.learning_rate

    def killed(config, step, steps):
        if step == 20 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rate(config, step, steps)

    eager.learning_rate = killed
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "", **more}


def torchrun(*arguments: str, interface: str = "lo", **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *arguments]
    env = environment(GLOO_SOCKET_IFNAME=interface, **options.pop("env", {}))
    return subprocess.Popen(
        [*options.pop("within", ()), *command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
        **options,
    )


@contextmanager
def ended(*agents: subprocess.Popen[str]):
    """Each of them, with its workers, has ended after the block."""
    try:
        yield
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                try:
                    agent.wait(20.0)
                except subprocess.TimeoutExpired:
                    agent.kill()


def output_of(agent: subprocess.Popen[str]) -> str:
    """What the agent and its workers have printed, once all have ended well."""
    with ended(agent):
        out, _ = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 0, out
    return out


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def test_a_killed_rank_is_started_again_and_the_next_attempt_trains(tmp_path, script):
    # The agent ends the others when it looks, so looking seldom leaves them time to say whom they lost.
    arguments = ("--standalone", "--nproc-per-node=2", "--monitor-interval=5", "--max-restarts=2")
    out = output_of(torchrun(*arguments, script, str(tmp_path)))
    for rank in range(2):
        assert f"trained {rank} of 2, attempt 1, a restart: True" in out, out
    assert out.count("rank 1 is lost") >= 1, out  # the first attempt named whom it lost


@pytest.mark.slow
def test_also_where_the_script_makes_the_process_group(tmp_path, script):
    arguments = ("--standalone", "--nproc-per-node=2", "--max-restarts=2", script, str(tmp_path), "own")
    out = output_of(torchrun(*arguments))
    assert out.count("attempt 1, a restart: True") == 2, out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 20))])
@pytest.mark.parametrize("change", READMES, ids=["from DDP", "from FSDP2"])
def test_the_readmes_scripts_go_on_after_a_rank_is_killed(change, seed, tmp_path):
    rank, step, later_s = random.Random(seed).choice(
        [(rank, step, later_s) for rank in range(2) for step in range(9) for later_s in (0.0, 0.02, 0.1)]
    )
    lines = [line[1:] for line in change.text.splitlines() if not line.startswith("-")]
    loop = lines.index("for step in range(start, steps):")
    lines[loop + 1 : loop + 1] = KILL.format(rank=rank, step=step, later_s=later_s).splitlines()
    (tmp_path / "train.py").write_text("\n".join(lines))
    out = output_of(torchrun("--nproc-per-node", "2", "--max-restarts", "3", "train.py", cwd=tmp_path))
    assert (tmp_path / "killed").exists()
    assert out.count("step 9: loss") == 1, out


@pytest.mark.slow
def test_shardwright_train_goes_on_after_a_killed_rank(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(6):
        lines = (f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(100))
        (tmp_path / "text" / f"{i}.py").write_text("\n".join(lines))
    (tmp_path / "sitecustomize.py").write_text(KILLS)
    recipe = [
        "[data]",
        f'path = "{tmp_path / "text"}"',
        "[model]\nnum_layers = 2\ndim = 16\nnum_heads = 2\nhidden_dim = 24",
        "[training]\nsteps = 40\nbatch_size = 2\nsequence_length = 16\nlog_every = 1",
        "[heldout]\nevery = 20\nnum_windows = 5\n[checkpoint]\nevery = 15\n[sample]\nnum_bytes = 20",
    ]
    (tmp_path / "tiny.toml").write_text("\n".join(recipe))
    words = "--standalone --nproc-per-node=2 --max-restarts=2 -m shardwright train tiny.toml --run.folder run"
    out = output_of(torchrun(*words.split(), cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}))
    assert (tmp_path / "killed").exists()
    assert "rank 1 is lost" in out, out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 40


# ---- two agents, each in a network namespace of its own


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"sw-restart-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@pytest.fixture
def nodes():
    """Two namespaces with a link between them: of each the words that run a command inside, its address."""
    if not can_make_namespaces():
        pytest.skip("needs root and network namespaces")
    with ExitStack() as stack:
        names = [f"sw-restart-{os.getpid()}-{node}" for node in "ab"]
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        link = f"ip -n {names[0]} link add name eth9 type veth peer name eth9 netns {names[1]}"
        subprocess.run(link.split(), check=True)
        for node, name in enumerate(names):
            address = f"10.78.0.{node + 1}/24"
            subprocess.run(["ip", "-n", name, "addr", "add", address, "dev", "eth9"], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "eth9", "up"], check=True)
        yield [(("ip", "netns", "exec", name), f"10.78.0.{node + 1}") for node, name in enumerate(names)]


def agent_on(
    node: tuple[tuple[str, ...], str], nnodes: str, *script: str, **env: str
) -> subprocess.Popen[str]:
    within, address = node
    arguments = [f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=3", f"--local-addr={address}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.78.0.1:29617", "--rdzv-id=restart"]
    # Both namespaces have the machine's name, which may resolve to neither: who holds the store is said.
    held_here = f"is_host={address == '10.78.0.1'}"
    quick = [f"--rdzv-conf={held_here},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]
    return torchrun(*arguments, *rendezvous, *quick, *script, interface="eth9", within=within, env=env)


@pytest.mark.slow
def test_two_agents_go_on_after_a_worker_of_one_was_killed(tmp_path, script, nodes):
    agents = [agent_on(node, "2", script, str(tmp_path)) for node in nodes]
    with ended(*agents):
        outs = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outs)
    assert (tmp_path / "killed").exists()
    # The agents count restarts each for themselves; the ranks agree all the same.
    assert all("of 2, attempt" in out and "a restart: True" in out for out in outs), "\n".join(outs)


@pytest.mark.slow
def test_a_node_that_leaves_and_joins_again_trains_on(tmp_path, script, nodes):
    def ranks(world: int) -> None:
        """Until that many ranks train, in steps beyond their first ones."""
        deadline = time.monotonic() + 60.0
        while True:
            told = [path.read_text().split() for path in tmp_path.glob("rank?")]
            living = [t for t in told if len(t) == 3 and Path("/proc", t[0]).exists() and int(t[1]) > 2]
            if len(living) == world and all(int(t[2]) == world for t in living):
                return
            assert time.monotonic() < deadline, (world, told)
            time.sleep(0.1)

    # Else an agent of torch 2.13 that stays never tells one that joins where the store is.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = agent_on(nodes[0], "1:2", script, str(tmp_path), "long", **env)
    second = agent_on(nodes[1], "1:2", script, str(tmp_path), "long", **env)
    third = None
    try:
        ranks(2)
        os.killpg(second.pid, signal.SIGKILL)  # the node is gone, with its agent
        while not (told := (tmp_path / "rank1").read_text().split()):  # it may be writing it just now
            time.sleep(0.01)
        if Path("/proc", told[0]).exists():
            os.kill(int(told[0]), signal.SIGKILL)
        ranks(1)
        third = agent_on(nodes[1], "1:2", script, str(tmp_path), "long", **env)
        ranks(2)
        with ended(first, third):
            outs = [agent.communicate(timeout=LIMIT_S)[0] for agent in (first, third)]
        assert [first.returncode, third.returncode] == [0, 0], "\n".join(outs)
    finally:
        with ended(first, second, *([third] if third else [])):
            pass
