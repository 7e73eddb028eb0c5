"""``transformers.Trainer``, and what is made of it (trl's SFTTrainer, DPOTrainer), over a sharded model.

    class MyTrainer(ShardedTrainer, transformers.Trainer): ...

    trainer = MyTrainer(model=hf.load("models/llama"), args=TrainingArguments(...), train_dataset=...)

Trainer has no place for another way of sharding: what it hands to Accelerate is wrapped by a closed list of
kinds. So the mixin lets Accelerate add autocast and ``torch.compile`` alone, and takes over what differs for
shards: when gradients are reduced, how they are clipped, and what is saved and loaded. Some of those are
Trainer's private methods, hence the range of versions.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint import load, save
from shardwright.checkpoint.agree import ranks
from shardwright.engine.unit import units_in
from shardwright.errors import CheckpointError, InputError
from shardwright.hf import library
from shardwright.hf.adapters import carries_peft, save_peft
from shardwright.hf.arguments import check_arguments
from shardwright.hf.export import save_pretrained
from shardwright.hf.load import shard
from shardwright.lora import adapters_in, save_adapter, trained_part
from shardwright.module import FSDPModule, register_fsdp_forward_method
from shardwright.ops.clip import clip_grad_norm_
from shardwright.transport.collect import take_values_of_rank_0

TESTED = ((5, 23), (5, 25))
"""Versions of transformers, from the first up to before the second."""
_STATE = "shardwright"


class ShardedTrainer:
    """``transformers.Trainer`` for a sharded model: a mixin, before ``Trainer`` (or trl's) among the bases.

    Every rank makes one. Losses, accumulation (reduced once a step), clipping, evaluation, saving and
    resuming are those of Trainer on one process with the whole batch. ``save_model`` writes what
    ``from_pretrained`` loads or, for a model with adapters, peft's files. A checkpoint also has every rank's
    shards of what is trained and of the optimizer, in ``shardwright/``, and resumes at any number of ranks.

    Args:
        model: a sharded model, as ``hf.load`` or ``hf.shard`` make it, or transformers itself after
            ``install()``. Or a whole one, on the host of every rank: the constructor shards it at its end,
            and with it a reference model (``ref_model``). Of one with peft's adapters (``get_peft_model``)
            every rank takes rank 0's values.
        *args: as of ``Trainer``.
        **kwargs: as of ``Trainer``.

    Raises:
        InputError: another version of transformers, no model, peft's adapters in a model that was sharded
            before, or arguments that are refused (``shardwright.hf.arguments.REFUSED``).
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    state: Any

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        first, last = TESTED
        if not first <= library.version() < last:
            shown = [".".join(map(str, version)) for version in (library.version(), first, last)]
            raise InputError(
                f"ShardedTrainer is tested with transformers from {shown[1]} up to before {shown[2]}, this "
                f"is {shown[0]}: install one of those"
            )
        if model is None:
            raise InputError("ShardedTrainer got no model; give it one, whole or sharded (no model_init)")
        if isinstance(model, FSDPModule):
            library.take_from_trainer(model)
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]  # transformers.Trainer is the next base
        for each in (self.model, getattr(self, "ref_model", None)):
            if each is not None:
                _shard_whole(each, self.args.device)
                _run_at_head(each)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Sharding moves it: of a whole model each rank's device gets its shards alone."""

    def create_accelerator_and_postprocess(self) -> None:
        """Let Accelerate add autocast and ``torch.compile`` to the model, and no data parallelism. Trainer
        calls it.

        Raises:
            InputError: an argument is refused (``shardwright.hf.arguments.REFUSED``).
        """
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator
        prepare = accelerator.prepare_model
        accelerator.prepare_model = lambda model, *_, **__: prepare(
            model, device_placement=False, evaluation_mode=True
        )
        if self.args.fp16 and not accelerator.native_amp:  # on the CPU Accelerate passes fp16 over
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one microbatch; the last one of a step reduces the gradients. Trainer calls
        it.

        Args:
            model: as of ``Trainer``.
            *args: as of ``Trainer``.
            **kwargs: as of ``Trainer``.

        Returns:
            The loss of the microbatch, detached: a tensor of shape () in the dtype that the model gives it.
        """
        self.model.set_requires_gradient_sync(self.accelerator.sync_gradients)
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        if grad_norm is not None:
            return grad_norm
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(model.parameters(), float("inf"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, with tokenizer and arguments. Every rank calls it; rank 0 writes.

        Args:
            output_dir: the folder; None: that of the arguments.
            _internal_call: as of ``Trainer``.

        Raises:
            CheckpointError: it can't be written; raised on every rank.
        """
        folder = Path(output_dir or self.args.output_dir)
        group, new = ranks(), folder / ".torn-model"
        writes = group.rank == 0
        if carries_peft(self.model):
            save_peft(self.model, folder)
        elif adapters_in(self.model):
            save_adapter(folder, self.model, base=getattr(self.model.config, "_name_or_path", None))
        else:
            group.together(f"saving {folder}", lambda: shutil.rmtree(new, True) if writes else None)
            save_pretrained(self.model, new)
        group.together(f"saving {folder}", lambda: self._finish_model(folder, new) if writes else None)

    def _finish_model(self, folder: Path, new: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in new.iterdir() if new.is_dir() else ():
            os.replace(path, folder / path.name)
        shutil.rmtree(new, ignore_errors=True)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path, step = Path(output_dir, _STATE), self.state.global_step
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        save(
            path,
            model=trained_part(self.model),
            optimizer=_inner(self.optimizer),
            extra=extra,
            step=step,
            keep=1,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights come with the optimizer, once that is there."""
        if not Path(resume_from_checkpoint, _STATE).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no folder {_STATE}/, so it isn't one that ShardedTrainer "
                "goes on from (save_only_model leaves that out); give another one"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restored = load(
                Path(checkpoint, _STATE), model=trained_part(self.model), optimizer=_inner(self.optimizer)
            )
            self.lr_scheduler.load_state_dict(restored.extra["scheduler"])

    def _load_best_model(self) -> None:
        load(Path(self.state.best_model_checkpoint, _STATE), model=trained_part(self.model))


def _shard_whole(model: nn.Module, device: torch.device) -> None:
    """Shard it, unless it is; group by group, so that a device never holds all of it."""
    if isinstance(model, FSDPModule):
        return
    if units_in(model):
        raise InputError(
            f"{type(model).__name__} got adapters after it was sharded, which nothing would average: call "
            "get_peft_model on the whole model and give that to the trainer, or hf.load(..., lora=Lora(...))"
        )
    if carries_peft(model):
        take_values_of_rank_0((param for param in model.parameters() if param.requires_grad), device)
    shard(model)


def _run_at_head(model: Any) -> None:
    """Run a forward that was exchanged (trl's, which makes log-probabilities in chunks) as one of the head's.

    It reads the head's weight without calling the head: which must be whole there, and in the backward. With
    a weight tied to the embedding's it would else be the shards, whose gradients nothing averages.
    """
    whole = model.get_base_model() if carries_peft(model) else model
    head = whole.get_output_embeddings() if "forward" in vars(whole) else None
    if head is not None:
        head.forward_of_model = whole.forward
        register_fsdp_forward_method(head, "forward_of_model")
        whole.forward = head.forward_of_model


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
