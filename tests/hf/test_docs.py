"""What docs/huggingface.md, docs/finetuning.md and what follows these shows runs (tests/fences.py)."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
pytest.importorskip("lightning_fabric", reason="docs/huggingface.md shows it (make test-hf)")
pytest.importorskip("peft", reason="docs/huggingface.md shows it (make test-hf)")

from tests.fences import copy_repository, excuse_for, fences, follow, run_command
from tests.ranks.pool import free_port, run_ranks
from tests.ranks.test_docs import run_file

EXCUSED = [
    (r"^make setup-hf$", "this environment"),
    (r"^vllm |llama\.cpp/", "another tool, which the page says was not run"),
]
PAGES = ("finetuning.md", "serving.md")
# Commands that take minutes, and what runs instead: less text, fewer steps.
SHORTER = [
    (r"^make finetune$", "make finetune CORPUS=notes.txt"),
    (r"(bench/(tokenise|finetune|dequantise)\.py)( --steps 10)?$", r"\1 --toy"),
    (r"(bench/llama\.py .*)$", r"\1 --toy"),
    (r"(--run\.folder runs/billion)$", r"\1 --training.epochs 1 --training.sequence_length 128"),
    (r"(train finetune-lora)$", r"\1 --data.path notes.txt"),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository with a small trained model, which is a Llama of models/ too, and text."""
    copied = copy_repository(tmp_path_factory.mktemp("docs"))
    tiny = "--training.steps 2 --model.num_layers 1 --model.dim 64 --model.num_heads 2 --model.hidden_dim 96"
    run_command(f"shardwright train quickstart {tiny}", copied)
    run_command("mkdir models && shardwright export runs/quickstart models/llama", copied)
    config = copied / "models" / "llama" / "config.json"  # as real models, it has positions for the recipes
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    (copied / "notes.txt").write_text("What is worth keeping is worth writing down. " * 200)
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (copied / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 60)
    return copied


def test_the_files_of_the_document_run_one_after_another(repository):
    for fence in fences("huggingface.md"):
        if fence.is_file:
            path = repository / f"line{fence.line}.py"
            path.write_text(fence.text)
            if "install()" in fence.text:  # in a process that hasn't imported transformers before
                wrote = run_command(f"torchrun --standalone --nproc-per-node 2 {path.name}", repository)
                assert "imported names of torch.distributed.fsdp before" not in wrote
            else:
                run_ranks(2, run_file, str(path), free_port(), limit_s=120.0)
    made = {path.name for path in (repository / "models").iterdir()}
    assert {"tuned", "adapter", "trained", "peft", "native"} <= made


def test_the_commands_of_fine_tuning_run_one_after_another(repository):
    found = [c for page in PAGES for fence in fences(page) for c in fence.commands]
    for command in found:
        if excuse_for(command, EXCUSED):
            continue
        for pattern, instead in SHORTER:
            command = re.sub(pattern, instead, command)
        run_command(command, repository, limit_s=300)


def test_the_tutorial_runs_word_for_word_in_an_empty_folder_with_a_wheel(tmp_path):
    follow("tutorial-qlora.md", tmp_path)
    empty = tmp_path / "empty"
    assert {path.name for path in (empty / "models").iterdir()} == {"llama", "mine", "mine-adapter"}
