"""Chats tokenised for fine-tuning, and found by the next start: seconds, CPU seconds, and memory.

python bench/tokenise.py                   50,000 chats of four messages, from the standard library
python bench/tokenise.py --chats 5000      fewer
"""

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import tokenizers  # noqa: E402
import transformers  # noqa: E402

from bench.toy import add_toy  # noqa: E402
from shardwright.data.feed import feed_of  # noqa: E402
from shardwright.data.text import Share  # noqa: E402
from shardwright.hf import library  # noqa: E402
from shardwright.recipe.config import Recipe  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("user", "assistant")


def lines() -> Iterator[str]:
    """Lines of the standard library, again and again."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while True:
        for path in files:
            yield from (line for line in path.read_text(errors="replace").splitlines() if line.strip())


def make_tokenizer(folder: Path, words: int) -> None:
    """A byte-level BPE of so many words, with a template of ChatML."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    bpe.train(files, vocab_size=words, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_chats(path: Path, count: int) -> None:
    """Two questions and two answers each, of 3 and 12 lines."""
    source = lines()
    with path.open("w") as file:
        for _ in range(count):
            said = ["\n".join(next(source) for _ in range(n)) for n in (3, 12, 3, 12)]
            messages = [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(said)]
            file.write(json.dumps({"messages": messages}) + "\n")


def one_start(folder: Path) -> None:
    """What a rank does before it has its windows, in this process, as a row of JSON."""
    recipe = Recipe.model_validate(
        {
            "base": {"folder": str(folder)},
            "data": {"path": str(folder / "chats.jsonl"), "cache": str(folder / "cache")},
            "training": {"sequence_length": 2048},
        }
    )
    tokenizer = library.tokenizer(folder)
    tokenizer("warm")
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    feed = feed_of(recipe, tokenizer, Share(0, 1, 1))
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    (source,) = feed.sources
    filled = sum(int(part.length.sum()) for part in feed.train.parts)
    row = {
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "more_mb": (after.ru_maxrss - before.ru_maxrss) / 1000,
        "tokens": int(source.examples.ends[-1]),
        "sequences": len(feed.train),
        "filled": filled / (len(feed.train) * 2049),
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chats", type=int, default=50_000)
    parser.add_argument("--words", type=int, default=32_000, help="of the tokenizer")
    parser.add_argument("--start", type=Path, default=None, help=argparse.SUPPRESS)
    add_toy(parser, chats=100, words=400)
    given = parser.parse_args()
    if given.start:
        one_start(given.start)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder, given.words)
        write_chats(folder / "chats.jsonl", given.chats)
        size = (folder / "chats.jsonl").stat().st_size / 1e6
        for start in ("first", "second"):
            command = [sys.executable, __file__, "--start", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            print(
                f"{start} start: {given.chats:,} chats of {size:.0f} MB, {row['tokens']:,} tokens, "
                f"{row['sequences']:,} sequences of 2048, {row['filled']:.1%} full: {row['wall_s']:.2f} s, "
                f"{row['cpu_s']:.2f} s of CPU, {row['more_mb']:.0f} MB more memory at its peak"
            )


if __name__ == "__main__":
    main()
