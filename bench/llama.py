"""A Llama of random weights, a tokenizer and chats, for times and memory where no real ones can be had.

python bench/llama.py models/llama-1b --chats chats.jsonl     the shape of Llama 3.2 1B; 50,000 chats
python bench/llama.py models/toy --chats chats.jsonl --toy    small, in seconds

The tokenizer is trained on Python's standard library, from which the chats are cut. The embedding has 128,256
rows all the same, as the real one, so head and loss take what they take there.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import transformers  # noqa: E402

from bench.tokenise import make_tokenizer, write_chats  # noqa: E402
from bench.toy import add_toy  # noqa: E402


def main() -> None:
    """Write the folder, and the chats; says how many parameters there are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the model; transformers' files")
    parser.add_argument("--chats", type=Path, required=True, help="JSONL to write")
    parser.add_argument("--count", type=int, default=50_000, help="of chats")
    for name, size in {"layers": 16, "width": 2048, "inner": 8192, "heads": 32, "vocab": 128_256}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--words", type=int, default=32_000, help="of the vocabulary that the tokenizer uses")
    add_toy(parser, layers=2, width=64, inner=128, heads=4, vocab=512, words=400, count=60)
    options = parser.parse_args()
    config = transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(1, options.heads // 4),
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.folder)
    make_tokenizer(options.folder, options.words)
    write_chats(options.chats, options.count)
    numel = sum(param.numel() for param in model.parameters())
    print(f"{options.folder}: {numel:,} parameters in bfloat16; {options.chats}: {options.count:,} chats")


if __name__ == "__main__":
    main()
