"""trl's trainers on shards: docs/trl.md runs as it stands, and trains as trl does in one process."""

import json

import pytest

pytest.importorskip("trl", reason="needs trl, in an environment of its own: make clients")

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

from shardwright import hf
from tests.clients.cases import SIZES
from tests.fences import fences
from tests.ranks.pool import as_torchrun, free_port, run_ranks
from tests.ranks.test_docs import run_file

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SUMS = [(f"{i} + {i}?", f"It is {2 * i}.", f"{i}, I think.") for i in range(32)]


def write(folder, tied):
    """A small Llama whose tokens are bytes."""
    torch.manual_seed(7)
    sizes = {**SIZES, "vocab_size": 300, "tie_word_embeddings": tied}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    pieces = ["<pad>", "<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return folder


def rows(kind):
    if kind == "sft":
        return [{"prompt": asked, "completion": right} for asked, right, _ in SUMS]
    return [{"prompt": asked, "chosen": right, "rejected": wrong} for asked, right, wrong in SUMS]


def trained(rank, world, folder, out, kind, adapters, port):
    """Figures of each step, of trl's own trainer in one process and of ours on several ranks."""
    if world > 1:
        as_torchrun(
            rank, world, port
        )  # one of its own: the store of the run before still listens at its port
    whole, config = (trl.SFTTrainer, trl.SFTConfig) if kind == "sft" else (trl.DPOTrainer, trl.DPOConfig)

    class Trainer(*((hf.ShardedTrainer,) if world > 1 else ()), whole):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args = config(
        str(out), per_device_train_batch_size=4 // world, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-2, max_grad_norm=0.5, bf16=False, use_cpu=True, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if adapters else None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = datasets.Dataset.from_list(rows(kind))
    trainer = Trainer(made, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    trainer.train()
    wanted = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "rewards/margins")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return [row[name] for row in logged for name in wanted if name in row]


RUNS = (("sft", False), ("sft", True), ("dpo", False), ("dpo", True))


def all_kinds(rank, world, folder, out, ports):
    return [
        trained(rank, world, folder, out / f"{kind}{world}", kind, lora, port)
        for (kind, lora), port in zip(RUNS, ports, strict=True)
    ]


def test_sft_and_dpo_train_as_trl_does_in_one_process_with_a_head_tied_to_the_embedding(tmp_path):
    folder = write(tmp_path / "llama", tied=True)
    limits = {"limit_s": 240.0, "timeout_s": 120.0}
    ports = [free_port() for _ in RUNS]
    (expected,) = run_ranks(1, all_kinds, folder, tmp_path, ports, **limits)
    for found in run_ranks(2, all_kinds, folder, tmp_path, ports, **limits):
        for ours, theirs in zip(found, expected, strict=True):
            assert len(theirs) in (15, 18)
            assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)


def test_the_files_of_the_page_run_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "llama", tied=False)
    said = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b, _ in SUMS]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps({'messages': row})}\n" for row in said))
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows("dpo")))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for fence in fences("trl.md"):
        assert fence.is_file
        path = tmp_path / f"line{fence.line}.py"
        path.write_text(fence.text)
        run_ranks(2, run_file, str(path), free_port(), limit_s=240.0)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/sft")
    assert (tmp_path / "runs/sft/checkpoint-4/shardwright").is_dir()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/sft")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "runs/dpo")
    assert any(param.any() for name, param in read.named_parameters() if "lora_B" in name)
