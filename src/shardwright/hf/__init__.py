"""Models of Hugging Face, sharded: loaded from a local folder, trained, and written back as one.

    from shardwright import hf

    model = hf.load("models/llama", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    ...
    hf.save_pretrained(model, "models/tuned", tokenizer_from="models/llama")

Needs the extra: ``pip install 'shardwright[hf]'``.
"""

from shardwright.hf.export import save_pretrained
from shardwright.hf.load import WeightsRead, load, read_weights, shard
from shardwright.hf.trainer import ShardedTrainer

__all__ = ["ShardedTrainer", "WeightsRead", "load", "read_weights", "save_pretrained", "shard"]
