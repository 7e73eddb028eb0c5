"""Reinforcement learning with the sampler in a process of its own: GRPO on a small Llama, on the CPU.

    .venv-hf/bin/torchrun --nproc-per-node 2 examples/best_of_n.py

Each step the sampler loads the newest weights, which it gets as what has changed, and writes --group answers
to one prompt; what counts is how many of an answer's tokens are even. The trainer ranks make good answers
more likely: each one's advantage is its reward less the group's mean, over the standard deviation.
"""

import argparse
import json
import subprocess
import sys

import torch
import transformers
from torch import distributed as dist

import shardwright

LENGTH = 16


def build() -> transformers.LlamaForCausalLM:
    """The same model in every process; real ones are loaded by ``shardwright.hf.load``."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=None,
        )
    )


def sample(address: str, group: int) -> None:
    """The sampler: for each line of its input, a version to have, it writes answers as a line of JSON."""
    model = build().eval()
    prompt = torch.zeros(group, 1, dtype=torch.int64)
    with shardwright.receive(address) as receiver:
        for line in sys.stdin:
            receiver.wait(int(line))
            version = receiver.load_into(model)
            torch.manual_seed(version)
            answers = model.generate(prompt, do_sample=True, max_new_tokens=LENGTH, min_new_tokens=LENGTH)
            print(json.dumps(answers.tolist()), flush=True)


def train(options: argparse.Namespace) -> None:
    """One of the trainer ranks; rank 0 also talks to the sampler."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shardwright.fully_shard(build(), groups="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    with shardwright.publish(model, "tcp://127.0.0.1:0") as publisher:
        sampler = None
        if rank == 0:
            words = [sys.executable, __file__, "--sample", publisher.address, "--group", str(options.group)]
            sampler = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(options.steps):
            version = publisher.send()
            answers = torch.empty(options.group, 1 + LENGTH, dtype=torch.int64)
            if sampler is not None and sampler.stdin and sampler.stdout:
                print(version, file=sampler.stdin, flush=True)
                answers.copy_(torch.tensor(json.loads(sampler.stdout.readline())))
            dist.broadcast(answers, 0)
            rewards = (answers[:, 1:] % 2 == 0).float().mean(1)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            own = slice(rank, None, world)
            chances = model(input_ids=answers[own]).logits[:, :-1].log_softmax(-1)
            chosen = chances.gather(-1, answers[own, 1:, None]).squeeze(-1)
            (-(advantages[own, None] * chosen).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"version {version}: {rewards.mean():.2f} of the tokens are even", flush=True)
        if sampler is not None and sampler.stdin:
            sampler.stdin.close()
            sampler.wait()
    dist.destroy_process_group()


def main() -> None:
    """Sample or train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--group", type=int, default=16, help="answers to a prompt")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample(options.sample, options.group)
    else:
        train(options)


if __name__ == "__main__":
    main()
