"""The ways of fine-tuning under comparison: one model, the same adapters, the same batches, bfloat16.

ours            full            every parameter trained
                lora            adapters on a frozen base
                qlora           the base in NF4
                qlora-sockets   the same, without the memory that ranks of one host share
torch's         fsdp2-full      every parameter trained
fully_shard     peft            peft's adapters
                peft-bnb        peft's adapters, bitsandbytes' Linear4bit
                torchao         adapters, torchao's NF4Tensor and linear_nf4
"""

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import shardwright
from bench.model import Size, Transformer, build
from shardwright.lora import Lora, add_lora

TARGETS = ("qkv", "project", "expand", "contract")
RANK, ALPHA = 8, 16


def _sharded(model: Transformer, shards: Callable[..., nn.Module]) -> Transformer:
    for part in (model.embedding, *model.blocks):
        shards(part)
    shards([model.norm, model.head])
    shards(model)
    return model


def _full(size: Size, shards: Callable[..., nn.Module]) -> Transformer:
    return _sharded(build(size).bfloat16(), shards)


def _ours(size: Size, codec: str | None, transport: str = "auto") -> Transformer:
    shardwright.set_transport(transport)
    return _sharded(adapted(build(size), codec), shardwright.fully_shard)


def adapted(model: Transformer, codec: str | None = "nf4") -> Transformer:
    """The same model in bfloat16, its base frozen and coded, with our adapters."""
    model = model.bfloat16()
    if codec:
        shardwright.quantize_(model, codec, [f"*.{target}.weight" for target in TARGETS])
    add_lora(model, Lora(TARGETS, RANK, ALPHA))
    return model


def _peft(size: Size, four_bits: bool) -> Transformer:
    peft = importlib.import_module("peft")
    model = build(size).bfloat16()
    if four_bits:
        bnb = importlib.import_module("bitsandbytes.nn")
        for name, layer in list(model.named_modules()):
            if name.rpartition(".")[2] in TARGETS:
                options = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
                small = bnb.Linear4bit(layer.in_features, layer.out_features, **options)
                small.weight.data = layer.weight.data
                model.set_submodule(name, small.to(layer.weight.device))
        model.is_loaded_in_4bit = True  # what transformers tells peft
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))
    peft.inject_adapter_in_model(config, model)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    return _sharded(model.bfloat16() if not four_bits else _adapters_to(model), torch_fsdp.fully_shard)


def _adapters_to(model: Transformer) -> Transformer:
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.bfloat16()
    return model


class _Nf4Linear(nn.Module):
    """What torchao's users write: its product with a frozen NF4Tensor, and an adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        self._linear = nf4.linear_nf4
        self.weight = nn.Parameter(nf4.to_nf4(layer.weight.detach(), 64, 256), requires_grad=False)
        options = {"bias": False, "dtype": layer.weight.dtype}
        self.lora_A = nn.Linear(layer.in_features, RANK, **options)
        self.lora_B = nn.Linear(RANK, layer.out_features, **options)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self._linear(x, self.weight) + self.lora_B(self.lora_A(x)) * (ALPHA / RANK)


def _torchao(size: Size) -> Transformer:
    model = build(size).bfloat16().requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if name.rpartition(".")[2] in TARGETS:
            model.set_submodule(name, _Nf4Linear(layer))  # type: ignore[arg-type]
    return _sharded(model, torch_fsdp.fully_shard)


SYSTEMS: dict[str, Callable[[Size], Transformer]] = {
    "full": lambda size: _full(size, shardwright.fully_shard),
    "lora": lambda size: _ours(size, None),
    "qlora": lambda size: _ours(size, "nf4"),
    "qlora-sockets": lambda size: _ours(size, "nf4", "sockets"),
    "fsdp2-full": lambda size: _full(size, torch_fsdp.fully_shard),
    "peft": lambda size: _peft(size, False),
    "peft-bnb": lambda size: _peft(size, True),
    "torchao": _torchao,
}
_NEEDS = {"peft": ("peft",), "peft-bnb": ("peft", "bitsandbytes"), "torchao": ("torchao",)}


def missing(system: str) -> list[str]:
    """Packages that a system needs and that aren't installed."""
    return [name for name in _NEEDS.get(system, ()) if importlib.util.find_spec(name) is None]


def load(system: str) -> None:
    """Import what a system needs, before memory is measured."""
    for name in _NEEDS.get(system, ()):
        importlib.import_module(name)


def held_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes at rest on this rank: shards, scales that a library keeps beside them, the optimizer's state."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            tensors += [t for t in (state.absmax, state.code) if t is not None]
    return sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    parts = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean")
    if hasattr(local, parts[0]):
        return sum(getattr(local, part).nbytes for part in parts)
    return local.nbytes
