"""How little a sharded step has to send: how bf16 weights change between two steps, and what gradients hold.

.venv/bin/python bench/entropy.py            half an hour; --toy for seconds, whose figures mean nothing
.venv/bin/pip install zstandard lz4 isal blosc2      before: the coders that are compared, of those installed

Trains a small transformer on words of the source of Python's standard library, one process, fp32 masters with
AdamW (weight decay 0.1, 50 steps of warm-up), forwards and gradients in bf16; then, from what it has learnt
at the first rate, goes on with another text (the docstrings alone) at each learning rate. At some steps it
compares the bf16 weights with those of the step before, by class of tensor:

    unchanged   share of equal patterns
    xor         entropy of the exclusive or of two patterns, bits a weight (of 16)
    integer     entropy of the zigzag code of the difference of order-preserving patterns
    gradients   entropy of the exponents of bf16 gradients, and 8 bits for sign and mantissa

Then libraries code the integer differences, and the gradients, of all matrices of a fine-tuning step at 1e-4,
the two bytes of each number in planes of their own ("shuffle"): bits a number, GB/s of raw bytes on one core.
"""

import argparse
import ast
import importlib
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.model import Size, Transformer, build  # noqa: E402
from bench.toy import add_toy  # noqa: E402

Weights = dict[str, Tensor]


def main() -> None:
    """Trains at each learning rate and prints two tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", default="1e-3,1e-4,1e-5")
    parser.add_argument("--at", default="20,100,300", help="steps that are looked at")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--words", type=int, default=8192, help="the vocabulary")
    add_toy(parser, rates="1e-3", at="2,3", width=32, words=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(layers=4, width=options.width, vocab=options.words, sequence=128, batch=8)
    looked_at, rates = [int(step) for step in options.at.split(",")], options.rates.split(",")
    code, prose = texts(size.vocab)
    print(
        "| run | step | tensors | unchanged | xor | integer | gradients |\n|---|---:|---|---:|---:|---:|---:|"
    )
    model = build(size)
    learnt: Weights = {}
    sample: tuple[np.ndarray, np.ndarray] | None = None
    for rate in rates:
        model = build(size)
        for step, before, after, grads in train(model, size, code, float(rate), looked_at):
            report(f"from scratch, {rate}", step, before, after, grads)
        learnt = learnt or {name: value.clone() for name, value in model.state_dict().items()}
    for rate in rates:
        model.load_state_dict(learnt)
        for step, before, after, grads in train(model, size, prose, float(rate), looked_at):
            report(f"fine-tune, {rate}", step, before, after, grads)
            if sample is None or rate == "1e-4":
                sample = difference(before, after, "matrix"), patterns(grads, "matrix")
    assert sample is not None
    print("\n| coder | of | bits | code GB/s | decode GB/s |\n|---|---|---:|---:|---:|")
    for name, coder in coders():
        for what, numbers in zip(("differences", "gradients"), sample, strict=True):
            print(f"| {name} | {what} | " + " | ".join(map("{:.2f}".format, measured(coder, numbers))) + " |")


# ---- text and training


def texts(num_words: int) -> tuple[Tensor, Tensor]:
    """The source of the standard library and its docstrings, as numbers of their most frequent words."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [file.read_text(errors="replace") for file in files]
    docs = [text for source in sources for text in docstrings(source)]
    words = [re.findall(r"\w+|[^\w ]", "\n".join(each)) for each in (sources, docs)]
    number = {word: place for place, (word, _) in enumerate(Counter(words[0]).most_common(num_words - 1), 1)}
    code, prose = (torch.tensor([number.get(word, 0) for word in each]) for each in words)
    return code, prose


def docstrings(source: str) -> Iterator[str]:
    """Of modules, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def train(
    model: Transformer, size: Size, text: Tensor, rate: float, looked_at: list[int]
) -> Iterator[tuple[int, Weights, Weights, Weights]]:
    """Step, weights in bf16 before and after it, and its gradients, at each step that is looked at."""
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    for master in masters.values():
        master.grad = None
    optimizer = torch.optim.AdamW(masters.values(), lr=rate, weight_decay=0.1)
    computed = build(size).bfloat16()
    generator = torch.Generator().manual_seed(0)
    windows = text.unfold(0, size.sequence + 1, 1)
    for step in range(1, max(looked_at) + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 50)
        with torch.no_grad():
            for name, param in computed.named_parameters():
                param.copy_(masters[name])
        batch = windows[torch.randint(len(windows), (size.batch,), generator=generator)]
        computed.zero_grad()
        computed(batch).backward()
        grads = {n: p.grad for n, p in computed.named_parameters() if p.grad is not None}
        for name, grad in grads.items():
            masters[name].grad = grad.float()
        before = {name: master.bfloat16() for name, master in masters.items()}
        optimizer.step()
        if step in looked_at:
            yield step, before, {name: master.bfloat16() for name, master in masters.items()}, grads
    model.load_state_dict(masters)


# ---- what changed


def kind_of(name: str) -> str:
    """The class of a tensor."""
    if "embedding" in name or "position" in name:
        return "embedding"
    return "norm" if "norm" in name else "matrix"


def patterns(tensors: Weights, kind: str) -> np.ndarray:
    """All numbers of a class as uint16."""
    return np.concatenate(
        [
            t.view(torch.int16).numpy().ravel().view(np.uint16)
            for n, t in tensors.items()
            if kind_of(n) == kind
        ]
    )


def difference(before: Weights, after: Weights, kind: str) -> np.ndarray:
    """The zigzag code of the difference of order-preserving patterns, uint16: it wraps, so it is exact."""
    first, second = (ordered(patterns(each, kind)) for each in (before, after))
    delta = (second - first).view(np.int16)
    return ((delta << 1) ^ (delta >> 15)).view(np.uint16)


def ordered(bits: np.ndarray) -> np.ndarray:
    """Patterns that count upwards as the numbers do."""
    return np.where(bits & 0x8000, ~bits, bits | 0x8000).astype(np.uint16)


def entropy(values: np.ndarray) -> float:
    """Bits a value, of values drawn by themselves (Shannon 1948)."""
    counts = np.bincount(values)
    shares = counts[counts > 0] / len(values)
    return float(-(shares * np.log2(shares)).sum())


def report(run: str, step: int, before: Weights, after: Weights, grads: Weights) -> None:
    """A row for each class of tensors."""
    for kind in ("embedding", "norm", "matrix"):
        first, second, grad = (patterns(each, kind) for each in (before, after, grads))
        exponents = entropy((grad >> 7 & 0xFF).astype(np.int64)) + 8
        figures = entropy(first ^ second), entropy(difference(before, after, kind)), exponents
        shown = " | ".join(map("{:.2f}".format, figures))
        print(f"| {run} | {step} | {kind} | {(first == second).mean():.0%} | {shown} |", flush=True)


# ---- coders

Coder = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def coders() -> Iterator[tuple[str, Coder]]:
    """Of the libraries that are installed: to code and to decode planes of bytes."""
    zstandard, lz4, isal = (_imported(name) for name in ("zstandard", "lz4.frame", "isal.isal_zlib"))
    blosc2 = _imported("blosc2")
    if zstandard:
        yield (
            "zstd 1, shuffle",
            (zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress),
        )
    if lz4:
        yield "lz4, shuffle", (lz4.compress, lz4.decompress)
    if isal:
        yield "isal (deflate) 1, shuffle", (lambda raw: isal.compress(raw, 1), isal.decompress)
    if blosc2:
        for codec in ("ZSTD", "LZ4"):

            def code(raw: bytes, codec: str = codec) -> bytes:
                filters = blosc2.Filter.BITSHUFFLE
                return blosc2.compress(raw, typesize=1, clevel=1, filter=filters, codec=blosc2.Codec[codec])

            yield f"blosc2 {codec} 1, bitshuffle", (code, blosc2.decompress)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"({name.partition('.')[0]} is not installed)", file=sys.stderr)
        return None


def measured(coder: Coder, numbers: np.ndarray) -> tuple[float, float, float]:
    """Bits a number, and GB of raw bytes coded and decoded per second, planes made and undone included."""
    code, decode = coder
    coded, coding_s = _best(lambda: code(shuffled(numbers)))
    decoded, decoding_s = _best(lambda: unshuffled(decode(coded)))
    assert np.array_equal(decoded, numbers), "the coder has lost something"
    return 8 * len(coded) / len(numbers), numbers.nbytes / coding_s / 1e9, numbers.nbytes / decoding_s / 1e9


def shuffled(numbers: np.ndarray) -> bytes:
    """The low bytes of uint16 numbers, then the high ones."""
    return (numbers & 0xFF).astype(np.uint8).tobytes() + (numbers >> 8).astype(np.uint8).tobytes()


def unshuffled(planes: bytes) -> np.ndarray:
    """The reverse."""
    low, high = np.frombuffer(planes, np.uint8).reshape(2, -1)
    return high.astype(np.uint16) << 8 | low


def _best(do: Callable[[], Any]) -> tuple[Any, float]:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = do()
        times.append(time.perf_counter() - start)
    return result, min(times)


if __name__ == "__main__":
    main()
