"""vLLM's engine, worker and model take published weights, on CPUs: `make test-vllm`."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from vllm.model_executor.layers import utils  # noqa: E402

TRAINER = Path(__file__).with_name("trainer.py")
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def fused(state):
    """What vLLM holds for these weights: those of q, k and v, and of gate and up, below each other."""
    parts = {}
    for name in sorted(state, key=lambda name: [place for place, part in enumerate(FUSED) if part in name]):
        part = next((part for part in FUSED if f".{part}." in name), None)
        parts.setdefault(name.replace(part, FUSED[part]) if part else name, []).append(state[name])
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def whole_weights(layer, remove_weight):
    """In the place of packing them for the CPU's kernels, after which nobody can look at them."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.mark.timeout(400)
def test_an_engine_of_vllm_has_each_version_and_generates_with_it(tmp_path, monkeypatch):
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=256, hidden_size=256, intermediate_size=512,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    trainer = subprocess.Popen([*launched, TRAINER, tmp_path])
    try:
        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", whole_weights)
        engine = vllm.LLM(
            str(tmp_path), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            enforce_eager=True, max_model_len=64, max_num_seqs=2,
            worker_extension_cls="shardwright.publishing.engines.VllmExtension",
        )  # fmt: skip
        for version in (1, 2):
            while not (tmp_path / f"version{version}").exists():
                assert trainer.poll() is None
                time.sleep(0.1)
            left = torch.load(tmp_path / f"version{version}")
            call = partial(engine.collective_rpc, "update_weights_from", args=(left["address"],))
            while (got := call()) != [version]:
                assert got == [version - 1]  # `send` returns before a version is handed over
            [held] = engine.apply_model(lambda model: dict(model.named_parameters()))
            wanted = fused(left["state"])
            assert held.keys() == wanted.keys()
            for name, tensor in wanted.items():  # vLLM pads the vocabulary
                assert torch.equal(held[name][: len(tensor)], tensor), name
            plain = LlamaForCausalLM(config).bfloat16().eval()
            plain.load_state_dict(left["state"])
            tokens = plain.generate(
                torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, eos_token_id=None
            )
            sampling = vllm.SamplingParams(max_tokens=4, temperature=0, detokenize=False)
            [out] = engine.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
            assert [*out.outputs[0].token_ids] == tokens[0, 3:].tolist()
            (tmp_path / f"seen{version}").touch()
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
        trainer.wait()
