"""Decoding with a cache on a few ranks of this host: tokens/s of the quickstart's model as a Llama, greedily.

.venv-hf/bin/python bench/decode.py            every system; --toy for seconds, whose figures mean nothing

Each system has new processes, one thread each; all ranks decode one prompt of 16 bytes. "-keep" is sharded
with ``reshard_after_forward=False`` on each block. The time is that of the tokens after the first eight.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard as torch_fully_shard  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from bench.toy import add_toy  # noqa: E402
from shardwright import fully_shard  # noqa: E402
from shardwright.recipe.config import ModelConfig  # noqa: E402
from shardwright.train.llama import llama_config  # noqa: E402

SYSTEMS = {"shardwright": fully_shard, "fsdp2": torch_fully_shard}
WARM_UP = 8


def main() -> None:
    """Measures each system in turn and prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", default="shardwright,shardwright-keep,fsdp2,fsdp2-keep")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    add_toy(parser, tokens=2)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(_decode(options)))
        return
    print("| system | tokens/s | all-gathers a token |\n|---|---:|---:|")
    for system in options.systems.split(","):
        tokens_per_s, gathers = _measure(options, system)
        print(f"| {system} | {tokens_per_s:.0f} | {gathers:g} |", flush=True)


def _measure(options: argparse.Namespace, system: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--world={options.world}", f"--tokens={options.tokens}", f"--systems={system}"]
        command = [sys.executable, __file__, *words, f"--store={folder}/store"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, f"--rank={rank}"], env=env, stdout=subprocess.PIPE, text=True)
            for rank in range(options.world)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"bench: {system}: a rank ended with an error (above)")
    return json.loads(outputs[0].splitlines()[-1])


@torch.no_grad()
def _decode(options: argparse.Namespace) -> list[float]:
    """Tokens/s and all-gathers a token."""
    torch.set_num_threads(1)
    store, limit = dist.FileStore(options.store, options.world), timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world, timeout=limit)
    torch.manual_seed(0)
    quickstart = ModelConfig(num_layers=4, dim=320, num_heads=5, hidden_dim=896)
    model = LlamaForCausalLM(LlamaConfig(**llama_config(quickstart, 1024))).eval()
    name, _, keep = options.systems.partition("-")
    for layer in model.model.layers:
        SYSTEMS[name](layer, reshard_after_forward=not keep)
    SYSTEMS[name](model)
    found = model(torch.arange(16)[None], use_cache=True)
    start = 0.0
    for number in range(WARM_UP + options.tokens):
        if number == WARM_UP:
            dist.barrier()
            start = time.perf_counter()
        token = found.logits[:, -1:].argmax(-1)
        found = model(token, past_key_values=found.past_key_values, use_cache=True)
    took_s = time.perf_counter() - start
    with CommDebugMode() as mode:
        model(token, past_key_values=found.past_key_values, use_cache=True)
    return [options.tokens / took_s, mode.get_comm_counts()[torch.ops.c10d._allgather_base_]]


if __name__ == "__main__":
    main()
