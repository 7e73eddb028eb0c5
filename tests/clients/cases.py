"""What is run of each client, on one rank: with torch's own names, or with ours in their place.

Each case imports its client only when it runs, after ``install()``, trains a few steps, and returns losses
and norms. On the CPU Accelerate has no FSDP: ``as_on_a_gpu`` says to it that the job is one of several GPUs.
"""
# ruff: noqa: PLC0415

import os
import sys
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
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "HF_HUB_OFFLINE": "1",
    }
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29998"}
    if ours:
        shardwright.install()
    figures, model = CASES[case](rank, world, folder)
    sharded = [type(m) for m in model.modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]
    mine = [cls for cls in sharded if issubclass(cls, shardwright.FSDPModule)]
    return figures, len(sharded), len(mine)


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


def fsdp_arguments(cls, folder, **options):
    args = cls(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        **options,
    )
    assert args.device.type == "cpu"  # asked here, since asking makes Accelerate look at the machine anew
    as_on_a_gpu()
    return args


def logged(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [row[key] for row in rows for key in ("loss", "grad_norm")]


def transformers_trainer(rank, world, folder):
    import transformers

    args = fsdp_arguments(transformers.TrainingArguments, folder)
    rows = torch.randint(3, 96, (32, 12), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(llama(), args, train_dataset=data)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return logged(trainer), trainer.model


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
    args = fsdp_arguments(trl.SFTConfig, folder, **options)
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


def torchtitan_llama3(rank, world, folder):
    # Kernels for experts, written in Triton, which a build of torch for the CPU doesn't bring.
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.llama3 import llama3_configs

    torch.manual_seed(7)
    model = llama3_configs["debugmodel"](attn_backend="flex").build()
    for module in model.modules():
        if type(module).__name__ == "FlexAttention":  # which has no backward on the CPU
            module.forward = _attention
    model.init_states()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # torch's own can't scale in Gloo
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    figures = []
    for step in range(3):
        batch = tokens(step, rank)
        out = model(batch)
        loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures += [loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)]
    return figures, model


def _attention(q, k, v, *, scale=None, enable_gqa=False, **_):
    """As FlexAttention's forward, causal: (batch, length, heads, size) each."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    return nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


CASES = {
    "accelerate": accelerate_plugin,
    "transformers": transformers_trainer,
    "trl": trl_sft,
    "lightning-fabric": fabric_model_parallel,
    "torchtitan": torchtitan_llama3,
}
