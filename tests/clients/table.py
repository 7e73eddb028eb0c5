"""Writes the table of docs/compatibility.md: runs what ``ROWS`` names, in this environment (make clients).

python -m tests.clients.table           # run everything, write the table
python -m tests.clients.table --short   # what needs this environment; fail where the table is untrue
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/compatibility.md"
HEAD = "|---|---|---|---|\n"
FILE = "tests/clients/test_clients.py"
CLIENT = f"{FILE}::test_a_client_trains_with_our_names_as_with_torchs_own"
ALONE = f"{FILE}::test_a_save_by_one_rank_alone_writes_nothing_and_names_who_is_missing"
RESUMED = f"{FILE}::test_sharded_trainer_resumes_what_transformers_has_sharded"
REFUSED = f"{FILE}::test_plain_parameters_with_spmd_types_are_refused_with_torchtitans_remedy"
TRAINED = "training, accumulation, clipping"
NATIVE = "a Llama: training, saving and loading whole and by shards, resuming, Trainer"
ROWS = (
    (
        "Accelerate's FSDP2 plugin, after `install()`",
        "accelerate",
        f"a Llama: {TRAINED}, `save_state`, `load_state`, `get_state_dict`",
        f"{CLIENT}[accelerate]",
    ),
    (
        "`Trainer(fsdp=...)`, after `install()`",
        "transformers",
        f"a Llama: {TRAINED}, `save_model`",
        f"{CLIENT}[transformers]",
    ),
    *(
        (f"transformers' `distributed_config`, {how}, after `install()`", "transformers", NATIVE, where)
        for how, where in (
            ("FSDP 2", f"{CLIENT}[transformers-fsdp] {ALONE}"),
            ("HSDP 2 x 2 in bf16", f"{CLIENT}[transformers-hsdp]"),
            ("FSDP 2 x TP 2", f"{CLIENT}[transformers-tp] {RESUMED}"),
        )
    ),
    ("`SFTTrainer(fsdp=...)`, after `install()`", "trl", f"a Llama on text: {TRAINED}", f"{CLIENT}[trl]"),
    (
        "`ModelParallelStrategy`, after `install()`",
        "lightning-fabric",
        f"{TRAINED}, `save`, `load`",
        f"{CLIENT}[lightning-fabric]",
    ),
    (
        "torchtitan's llama3, after `install()`",
        "torchtitan",
        "its debug model, by its `parallelize_llama`, FSDP 2 and FSDP 2 x TP 2: training, clipping",
        f"{CLIENT}[torchtitan] {CLIENT}[torchtitan-tp] {REFUSED}",
    ),
    (
        "`torch.distributed.pipelining`",
        "torch",
        "GPipe, interleaved 1F1B, both zero-bubble schedules over sharded stages",
        "tests/ranks/test_torch_names.py",
    ),
    (
        "`hf.ShardedTrainer`",
        "transformers",
        "every field of `TrainingArguments`; resuming, the best model",
        "tests/hf/test_trainer.py tests/hf/test_arguments.py",
    ),
    (
        "trl's trainers, `hf.ShardedTrainer`",
        "trl",
        "docs/trl.md as it stands; SFT and DPO, whole and with adapters, as in one process",
        "tests/clients/test_trl.py",
    ),
    (
        "`hf.load`, `hf.shard`",
        "transformers",
        "nine architectures: gradients; loading, saving, generating",
        "tests/hf/test_load.py",
    ),
    (
        "PEFT's adapters",
        "peft",
        "LoRA, rsLoRA and DoRA in a sharded model; its files",
        "tests/hf/test_peft.py",
    ),
    (
        'Fabric, `strategy="shardwright"`',
        "lightning",
        f"{TRAINED}, resuming, under both names of Fabric",
        "tests/hf/test_fabric.py",
    ),
    (
        'Lightning\'s Trainer, `strategy="shardwright"`',
        "lightning",
        f"{TRAINED}, bf16, validation, checkpoints, resuming, under both names",
        "tests/hf/test_lightning.py",
    ),
)
"""Client, its package, what is run, and by which tests."""


def result_of(where: str) -> str:
    """Runs it: passes, FAILS, or why it was skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--show-capture=no", *where.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-3000:], flush=True)
    skipped = re.search(r"SKIPPED \[\d+\] \S+ (.*)", done.stdout)
    return "FAILS" if done.returncode else f"SKIPPED: {skipped[1]}" if skipped else "passes"


def version_of(package: str) -> str:
    """As installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"


def main(short: bool) -> int:
    """Exit status: 1 where something fails or, if ``short``, isn't as the table says."""
    chosen = [row for row in ROWS if not short or row[3].startswith("tests/clients/")]
    rows = [
        f"| {client} | {package} {version_of(package)} | {what} | {result_of(where)} |"
        for client, package, what, where in chosen
    ]
    print(*rows, sep="\n")
    if short:
        said = TABLE.read_text().splitlines()
        return int(any(row not in said and "SKIPPED" not in row for row in rows))
    before, _, after = TABLE.read_text().partition(HEAD)
    rest = after[after.find("\n\n") + 1 :] if after.startswith("|") else after
    TABLE.write_text(before + HEAD + "\n".join(rows) + "\n" + rest)
    return int(any("FAILS" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main("--short" in sys.argv))
