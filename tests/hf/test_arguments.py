"""Every field of TrainingArguments works in ShardedTrainer as in Trainer, has no influence, or is refused."""

import dataclasses
import multiprocessing

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
pytest.importorskip("accelerate", reason="transformers.Trainer needs it (make test-hf)")

import accelerate
import torch
import transformers

from shardwright import FSDPModule, fully_shard, hf
from shardwright.errors import InputError
from shardwright.hf.arguments import OPTIMIZERS, REFUSED, check_arguments
from tests.hf import models
from tests.hf.test_trainer import Sharded, Whole, arguments, as_torchrun, data, figures, heldout
from tests.ranks.pool import on_ranks, run_ranks

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": "default"}
# Trained by Trainer in one process and by ShardedTrainer on two ranks: figures and evaluation are equal.
WORKS = {
    "as it is": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "compiled": COMPILED,
    "compiled bf16": {**COMPILED, "bf16": True},
    "smoothed": {"label_smoothing_factor": 0.1, "label_names": ["labels"]},
    "not clipped": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "checkpointed": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "torch_empty_cache_steps": 1, "use_cache": True,
    },
    "checkpointed by its new name": {
        "activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    **{optim: {"optim": optim, "weight_decay": 0.1} for optim in OPTIMIZERS},
    "schedule": {
        "num_train_epochs": 2.0, "max_steps": 5, "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2}, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
        "seed": 5, "data_seed": 6, "full_determinism": True,
    },
    "each rank's own tokens": {"average_tokens_across_devices": False},
    "data": {
        "dataloader_drop_last": True, "dataloader_num_workers": 1, "dataloader_pin_memory": False,
        "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3, "dataloader_in_order": True,
        "dataloader_multiprocessing_context": "fork", "remove_unused_columns": False,
        "train_sampling_strategy": "sequential", "length_column_name": "long",
        "accelerator_config": {"even_batches": True}, "ddp_backend": "gloo", "ddp_timeout": 60,
    },
    "evaluation": {
        "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 1, "eval_on_start": True,
        "prediction_loss_only": True, "eval_do_concat_batches": False, "eval_use_gather_object": True,
        "eval_accumulation_steps": 1, "include_for_metrics": ["inputs"], "batch_eval_metrics": False,
        "bf16_full_eval": True,
    },
    "evaluation in fp16": {"fp16_full_eval": True},
    "logging": {
        "logging_strategy": "steps", "logging_first_step": True, "logging_nan_inf_filter": False,
        "include_num_input_tokens_seen": "all", "log_level": "error", "log_level_replica": "error",
        "log_on_each_node": False, "skip_memory_metrics": False,
    },
    "saving": {
        "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "save_only_model": True,
        "metric_for_best_model": "loss", "greater_is_better": False, "load_best_model_at_end": False,
        "ignore_data_skip": True, "restore_callback_states_from_checkpoint": True,
    },
}  # fmt: skip
ELSEWHERE = {"neftune_noise_alpha"}  # works: test_noise_of_neftune_reaches_the_loss
NO_INFLUENCE = {
    "ddp_find_unused_parameters": "of DDP, which isn't used", "ddp_bucket_cap_mb": "as above",
    "ddp_broadcast_buffers": "as above", "ddp_static_graph": "as above",
    "local_rank": "read from the environment", "tf32": "a switch of the GPU for the whole process",
    "do_train": "for scripts, Trainer doesn't read it", "do_eval": "as above", "do_predict": "as above",
    "resume_from_checkpoint": "as above: train() takes it", "optim_args": "of optimizers that are refused",
    "run_name": "of reporters, on rank 0", "project": "as above", "trackio_space_id": "as above",
    "trackio_bucket_id": "as above", "trackio_static_space_id": "as above",
    "hub_model_id": "of push_to_hub, which is refused", "hub_strategy": "as above", "hub_token": "as above",
    "hub_private_repo": "as above", "hub_always_push": "as above", "hub_revision": "as above",
}  # fmt: skip


def test_every_field_is_in_one_of_three_lists(tmp_path):
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    tried = {name for options in WORKS.values() for name in options} | ELSEWHERE
    works = tried | BASE
    assert not works & REFUSED.keys()
    assert not works & NO_INFLUENCE.keys()
    assert not REFUSED.keys() & NO_INFLUENCE.keys()
    assert works | REFUSED.keys() | NO_INFLUENCE.keys() == fields


BASE = {
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "logging_steps",
    "learning_rate", "max_grad_norm", "save_strategy", "report_to", "use_cpu", "disable_tqdm", "warmup_steps",
    "eval_strategy", "per_device_eval_batch_size",
}  # fmt: skip
"""What tests.hf.test_trainer.arguments sets, and all runs here have."""


class WholeInHalf(Whole):
    """On the CPU Accelerate passes fp16 over, so Trainer alone would train in float32."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fp16:
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu")


def train(rank, world, folder, out, runs):
    """Name -> (figures, loss of the evaluation, dtypes that a linear layer gave, frames compiled)."""
    if world > 1:
        as_torchrun(rank, world)
    multiprocessing.current_process()._config["daemon"] = False  # so that workers of the data are allowed
    found = {}
    for name, options in runs.items():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(3)
        model = models.whole(folder) if world == 1 else hf.load(folder)
        dtypes = set()
        if not options.get("torch_compile"):
            watch = model.model.layers[0].mlp.down_proj.register_forward_hook
            watch(lambda module, args, out, dtypes=dtypes: dtypes.add(out.dtype))
        args = arguments(out / name, 4 // world, **options)
        rows = data() if args.average_tokens_across_devices else heldout() * 4
        cls = WholeInHalf if world == 1 else Sharded
        trainer = cls(model, args, train_dataset=rows, eval_dataset=heldout())
        trainer.train()
        seen = frozenset(dtypes)
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        found[name] = figures(trainer), trainer.evaluate()["eval_loss"], seen, frames
        torch.use_deterministic_algorithms(False)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.write("llama", tmp_path_factory.mktemp("arguments") / "llama")


def test_what_works_gives_the_figures_of_trainer_in_one_process(llama, tmp_path):
    (expected,) = run_ranks(1, train, llama, tmp_path / "whole", WORKS, limit_s=240.0)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for found in run_ranks(2, train, llama, tmp_path / "sharded", WORKS, limit_s=240.0, timeout_s=60.0):
        for name, (rows, loss, dtypes, frames) in found.items():
            coarse = name in half or "bf16" in name or name.endswith("fp16")
            for ours, theirs in zip(rows, expected[name][0], strict=True):
                assert ours == pytest.approx(theirs, rel=2e-3 if coarse else 2e-4), name
            assert loss == pytest.approx(expected[name][1], rel=1e-3 if coarse else 1e-4), name
            assert bool(frames) == name.startswith("compiled"), name
            if name in half:  # the arithmetic is the one asked for, and changes the figures
                assert dtypes == {half[name]}
                assert rows[0][1] != found["as it is"][0][0][1]
        smoothed = found["smoothed"][0][0][1]
        assert abs(smoothed - found["as it is"][0][0][1]) > 1e-3


def noisy(rank, world, folder, out):
    runs = {"as it is": {}, "noise": {"neftune_noise_alpha": 5.0}}
    found = train(rank, world, folder, out, runs)
    return [found[name][0][0][1] for name in runs]


def test_noise_of_neftune_reaches_the_loss(llama, tmp_path):
    for plain, loss in run_ranks(2, noisy, llama, tmp_path):
        assert abs(loss - plain) > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name, tmp_path):
    args = arguments(tmp_path, 2)
    setattr(args, name, "given")
    with pytest.raises(InputError, match=f"doesn't take {name}=") as caught:
        check_arguments(args)
    assert REFUSED[name] in str(caught.value)


def test_optimizers_that_were_not_compared_are_refused_by_name(tmp_path):
    names = {name.value for name in transformers.training_args.OptimizerNames}
    assert {*OPTIMIZERS} < names
    for name in names - {*OPTIMIZERS}:
        with pytest.raises(InputError, match=f"doesn't take optim='{name}'"):
            check_arguments(arguments(tmp_path, 2, optim=name))
    with pytest.raises(InputError, match="which save_only_model=True leaves out"):
        best = {"load_best_model_at_end": True, "save_strategy": "no"}
        check_arguments(arguments(tmp_path, 2, save_only_model=True, **best))


@on_ranks(1)
def test_a_sharded_module_is_called_by_its_own_name():
    model = fully_shard(torch.nn.Linear(2, 2))
    assert isinstance(model, FSDPModule)
    assert model._get_name() == repr(model).partition("(")[0] == "Linear"
