"""What is run of each client, on one rank: with torch's own names, or with ours in their place.

Each case imports its client only when it runs, after ``install()``, trains a few steps, and returns losses
and norms. On the CPU Accelerate has no FSDP: ``as_on_a_gpu`` says to it that the job is one of several GPUs.
"""
# ruff: noqa: PLC0415

import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from torch import nn

import shardwright

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def run(rank, world, case, ours, folder):
    """A case's figures, and the classes of its sharded modules' package."""
    as_launched(rank, world, ours)
    figures, model = CASES[case](rank, world, folder)
    sharded = [type(m) for m in model.modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]
    mine = [cls for cls in sharded if issubclass(cls, shardwright.FSDPModule)]
    return figures, len(sharded), len(mine)


def as_launched(rank, world, ours=True):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "HF_HUB_OFFLINE": "1",
    }
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29998"}
    if ours:
        shardwright.install()


def tokens(step, rank):
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def llama():
    import transformers

    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def as_on_a_gpu():
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def accelerate_plugin(rank, world, folder):
    as_on_a_gpu()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_offload=False,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    figures = []

    def steps(first, last):
        for step in range(first, last):
            with accelerator.accumulate(model):
                batch = tokens(step, rank)
                loss = model(batch, labels=batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if step % 2 else None
                optimizer.step()
                optimizer.zero_grad()
            figures.extend([loss.item(), *([] if norm is None else [float(norm)])])

    steps(0, 4)
    accelerator.save_state(str(folder / "state"))
    steps(4, 6)
    after = figures[-3:]
    accelerator.load_state(str(folder / "state"))
    steps(4, 6)
    assert torch.allclose(torch.tensor(figures[-3:]), torch.tensor(after), rtol=1e-4), "resumed"
    whole = accelerator.get_state_dict(model)
    if rank == 0:
        figures.append(sum(value.float().square().sum().item() for value in whole.values()))
    return figures, model


def arguments(cls, folder, **options):
    common = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = cls(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        **common | options,
    )
    assert args.device.type == "cpu"  # asked here, since asking makes Accelerate look at the machine anew
    as_on_a_gpu()
    return args


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def logged(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [row[key] for row in rows for key in ("loss", "grad_norm")]


def transformers_trainer(rank, world, folder):
    import transformers

    trainer = trained_by_trainer(llama(), arguments(transformers.TrainingArguments, folder, **FSDP2))
    trainer.save_model(str(folder / "model"))
    return logged(trainer), trainer.model


def trained_by_trainer(model, args, kind=None, resume=None):
    import transformers

    rows = torch.randint(3, 96, (32, 12), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = (kind or transformers.Trainer)(model, args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def transformers_native(sizes, rank, world, folder):
    """Sharded by transformers itself, in ``from_pretrained``. sizes: of its ``DistributedConfig``."""
    import transformers
    from transformers.distributed import DistributedConfig
    from transformers.distributed import load_optimizer_distributed as load_optimizer
    from transformers.distributed import save_optimizer_distributed as save_optimizer

    config = DistributedConfig(**sizes)
    place = rank // config.tp_size

    def steps(model, optimizer, first, last):
        return [each for i in range(first, last) for each in clipped_step(model, optimizer, i, place)]

    model = native_llama(rank, folder, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    figures = steps(model, optimizer, 0, 3)
    model.save_pretrained(folder / "whole")
    assert_holds(read_llama(folder / "whole"), model)
    model.save_pretrained(folder / "shards", distributed_checkpoint=True)
    save_optimizer(model, optimizer, str(folder / "optimizer"))
    figures += steps(model, optimizer, 3, 5)
    for saved in ("whole", "shards"):
        model = read_llama(folder / saved, config)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        load_optimizer(model, optimizer, str(folder / "optimizer"))
        assert steps(model, optimizer, 3, 5) == figures[-4:], "resumed"
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    args = arguments(transformers.TrainingArguments, folder / "trainer", **options)
    trainer = trained_by_trainer(read_llama(folder / "whole", config), args)
    trainer.save_model()
    for saved in ("trainer", "trainer/checkpoint-4"):
        assert_holds(read_llama(folder / saved), trainer.model)
    return figures + logged(trainer), trainer.model


def native_llama(rank, folder, sizes):
    from transformers.distributed import DistributedConfig

    if rank == 0:
        llama().save_pretrained(folder / "llama")
    torch.distributed.barrier()
    return read_llama(folder / "llama", DistributedConfig(**sizes))


def read_llama(folder, config=None):
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=config)


def clipped_step(model, optimizer, number, place):
    batch = tokens(number, place)
    loss = model(batch, labels=batch).loss
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    norm = torch.stack([grad.full_tensor().norm() for grad in grads]).norm()
    for grad in grads:  # torch's clip_grad_norm_ takes no gradients of several meshes
        grad.mul_((0.5 / norm).clamp(max=1.0).item())
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def assert_holds(whole, model):
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), whole.get_parameter(name)), name


def trl_sft(rank, world, folder):
    import datasets
    import tokenizers
    import transformers
    import trl

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 96)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    rows = torch.randint(3, 96, (32, 12), generator=torch.Generator().manual_seed(5)).tolist()
    data = datasets.Dataset.from_dict({"text": [" ".join(f"w{i}" for i in row) for row in rows]})
    options = {"max_length": 16, "bf16": False, "gradient_checkpointing": False}
    args = arguments(trl.SFTConfig, folder, **FSDP2, **options)
    trainer = trl.SFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return logged(trainer), trainer.model


def fabric_model_parallel(rank, world, folder):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(model, mesh):
        from torch.distributed.fsdp import fully_shard

        for block in model[:2]:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    os.environ |= {"NODE_RANK": "0"}
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 0.05))
    figures = []

    def steps(first, last):
        for step in range(first, last):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                loss = model(x).square().mean()
                fabric.backward(loss)
            if step % 2:
                figures.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
                optimizer.step()
                optimizer.zero_grad()
            figures.append(loss.item())

    steps(0, 4)
    state = {"model": model, "optimizer": optimizer, "step": 4}
    fabric.save(folder / "saved", state)
    steps(4, 6)
    fabric.load(folder / "saved", state)
    steps(4, 6)
    assert figures[-3:] == figures[-6:-3], "resumed"
    return figures, model


def torchtitan_llama3(backend, tp, rank, world, folder):
    """backend: its ``parallelism.spmd_backend``. tp: ranks of its tensor parallelism."""
    # Kernels for experts, written in Triton, which a build of torch for the CPU doesn't bring; what logs.
    for absent in ("torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard"):
        sys.modules[absent] = MagicMock()
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.full_dtensor import parallelize_inputs
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.parallelize import parallelize_llama

    parallel_dims.device_type = "cpu"
    parallelism = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=backend)
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = config.build()
    for module in model.modules():
        if type(module).__name__ == "FlexAttention":  # which has no backward on the CPU
            module.forward = _attention
    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    torch.manual_seed(7)
    with torch.no_grad():
        model.init_states()
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # torch's own can't scale in Gloo
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    figures = []
    for step in range(3):
        batch = tokens(step, rank // tp)
        if backend == "full_dtensor":
            batch, *_ = parallelize_inputs(dims, batch, batch, {})
        out, batch = plain(model(batch)), plain(batch)
        loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures += [loss.item(), float(plain(norm))]
    return figures, model


def plain(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _attention(q, k, v, *, scale=None, enable_gqa=False, **_):
    """As FlexAttention's forward, causal: (batch, length, heads, size) each."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    return nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


CASES = {
    "accelerate": accelerate_plugin,
    "transformers": transformers_trainer,
    "transformers-fsdp": partial(transformers_native, {"fsdp_size": 2}),
    "transformers-hsdp": partial(
        transformers_native, {"fsdp_size": 2, "dp_replicate_size": 2, "fsdp_mixed_precision": True}
    ),
    "transformers-tp": partial(transformers_native, {"fsdp_size": 2, "tp_size": 2}),
    "trl": trl_sft,
    "lightning-fabric": fabric_model_parallel,
    "torchtitan": partial(torchtitan_llama3, "partial_dtensor", 1),
    "torchtitan-tp": partial(torchtitan_llama3, "full_dtensor", 2),
}
WORLDS = {"transformers-hsdp": 4, "transformers-tp": 4, "torchtitan-tp": 4}
"""Ranks of a case, where they are not 2."""
