"""What of ``TrainingArguments`` a sharded model can't be trained with: a closed list, with reasons."""

from collections.abc import Mapping
from typing import Any

from shardwright.errors import InputError

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of ``optim`` that are exact on shards."""

REFUSED: Mapping[str, str] = {
    "fsdp": "the model is sharded already; hf.load and hf.shard take what is to be chosen",
    "fsdp_config": "the model is sharded already; hf.load and hf.shard take what is to be chosen",
    "deepspeed": "the model is sharded already, and DeepSpeed would shard it again",
    "parallelism_config": "the batch is split over all ranks, along no other axis",
    "use_liger_kernel": "it exchanges parts of the model; apply it before the model is sharded",
    "liger_kernel_config": "it exchanges parts of the model; apply it before the model is sharded",
    "auto_find_batch_size": "a rank that runs out of memory would begin anew while the others go on",
    "enable_jit_checkpoint": "each rank would save at another step; save_steps saves at one",
    "save_on_each_node": "rank 0 alone writes what from_pretrained reads; give a folder that all hosts share",
    "push_to_hub": "nothing is uploaded from here; upload the folder that save_model has written",
    "debug": "it prints the least and largest weights of modules, and a rank has rows of them",
    "optim_target_modules": "GaLore and APOLLO project whole matrices, and a rank has rows of them",
}
"""Field of ``TrainingArguments`` -> why a value other than its default is refused."""


def _whole(optimizer: str) -> str:
    if any(kind in optimizer for kind in ("adafactor", "galore", "apollo")):
        return "it reads rows and columns of whole matrices, and a rank has rows of them"
    if "lomo" in optimizer:
        return "it steps inside the backward, before gradients are reduced"
    return "it was not compared on shards"


def check_arguments(args: Any) -> None:
    """Raises: InputError for what is in ``REFUSED`` and given, or an optimizer not in ``OPTIMIZERS``."""
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise InputError(f"ShardedTrainer doesn't take {name}={getattr(args, name)!r}: {reason}")
    if (name := str(getattr(args.optim, "value", args.optim))) not in OPTIMIZERS:
        raise InputError(
            f"ShardedTrainer doesn't take optim={name!r}: {_whole(name)}; take one of "
            f"{', '.join(OPTIMIZERS)}, or give optimizers=(your own, None)"
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise InputError(
            "ShardedTrainer loads the best model from its shards, which save_only_model=True leaves out: "
            "leave out one of save_only_model and load_best_model_at_end"
        )
