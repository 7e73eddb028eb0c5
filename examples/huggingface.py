"""A language model of Hugging Face is fine-tuned on a text: in full, or with adapters on a base in 4 bits.

    .venv-hf/bin/torchrun --nproc-per-node 2 examples/huggingface.py
    torchrun --nproc-per-node 4 examples/huggingface.py --model FOLDER --data FILE --lr 1e-5 --bf16
    torchrun --nproc-per-node 4 examples/huggingface.py --model FOLDER --data FILE --lr 1e-4 --bf16 --qlora

FOLDER is what `hf download NAME --local-dir FOLDER` leaves; without one, a small Llama of random weights and
a tokenizer are made. The tuned model, or the adapters, are written to --out, for transformers or for peft.
"""

import argparse
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import distributed as dist
from torch.nn import functional as F

from shardwright import MixedPrecisionPolicy, clip_grad_norm_, hf
from shardwright.lora import Lora, save_adapter

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What gets adapters: the names that Llama, Mistral and Qwen have for their matrices."""


def make_model(folder: Path, text: str) -> None:
    """A Llama of two small layers with random weights, and a tokenizer for this text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=512, special_tokens=["<end>"], show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@torch.no_grad()
def held_out(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """The mean loss over rows [n, length], of which each rank takes as many. Every rank calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = rows[: len(rows) // world * world][rank::world]
    model.eval()
    total = sum(model(input_ids=batch, labels=batch).loss * len(batch) for batch in rows.split(4))
    model.train()
    mean = total / (len(rows) * world)
    dist.all_reduce(mean)
    return mean.item()


def draw(losses: list[float], around: tuple[float, float], said: str, out: Path) -> None:
    """The losses, those of held-out text before and after, and what the model writes."""
    from matplotlib import pyplot  # noqa: PLC0415 (only on the rank that draws)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(losses, color="#1f77b4", linewidth=1, label="training")
    left.plot([0, len(losses)], around, "o", color="#c0392b", label="held out, before and after")
    left.set(xlabel="step", ylabel="loss, nats per token")
    left.legend(frameon=False)
    lines = [line[:60] for line in said.replace("$", r"\$").splitlines()[:14]]
    right.set_title("what the tuned model writes", fontsize=10)
    right.text(0, 1, "\n".join(lines), family="monospace", fontsize=8, va="top", transform=right.transAxes)
    right.axis("off")
    figure.savefig(out / "picture.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model; default: a small one is made")
    parser.add_argument("--data", type=Path, default=F.__file__, help="a text; default: a file of torch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch on each rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--qlora", action="store_true", help="the base in 4 bits, and adapters of rank 16")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--out", type=Path, default="runs/huggingface", help="folder for what is written")
    options = parser.parse_args()
    if (options.out / "model").exists():
        parser.error(f"{options.out}/model exists; remove it, or give another folder as --out")

    dist.init_process_group()
    rank = dist.get_rank()
    text, folder = options.data.read_text(), options.model or options.out / "base"
    if rank == 0 and not options.model:
        make_model(folder, text)
    dist.barrier()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 else MixedPrecisionPolicy()
    adapters = {"quantise": "nf4", "lora": Lora(LAYERS, rank=16)} if options.qlora else {}
    model = hf.load(folder, mp_policy=policy, **adapters)  # every rank reads its slices of the files
    if options.model:  # less memory for activations, which are computed again in the backward
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    device = next(model.parameters()).device  # an accelerator, where there is one
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.lr)

    tokens = torch.tensor(tokenizer(text)["input_ids"], device=device)
    windows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    held, seen = windows[: max(8, len(windows) // 20)], windows[max(8, len(windows) // 20) :]
    before = held_out(model, held)
    torch.manual_seed(1 + rank)  # each rank draws rows of its own
    losses = []
    for step in range(options.steps):
        batch = seen[torch.randint(len(seen), (options.rows,), device=device)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    around = before, held_out(model, held)
    prompt = tokenizer("def ", return_tensors="pt").to(device)
    model.eval()
    said = model.generate(**prompt, max_new_tokens=100, do_sample=True, synced_gpus=True)  # every rank
    if options.qlora:
        save_adapter(options.out / "model", model, base=str(folder))
    else:
        hf.save_pretrained(model, options.out / "model", tokenizer_from=folder)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"held out: {around[0]:.3f} before, {around[1]:.3f} after")
        draw(losses, around, tokenizer.decode(said[0], skip_special_tokens=True), options.out)


if __name__ == "__main__":
    main()
