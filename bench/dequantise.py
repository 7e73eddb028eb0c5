"""NF4 weights decoded to bfloat16 on one thread: million parameters a second, beside others where installed.

python bench/dequantise.py                  a 4096 x 4096 weight, the median and the best of 15
python bench/dequantise.py --rows 1024      another one
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from bench.toy import add_toy  # noqa: E402
from shardwright import nf4  # noqa: E402

REPEATS = 15


def ours(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Our codes and bfloat16 scales."""
    codes, absmax = nf4.quantize(weight)
    return lambda: nf4.dequantize(codes, absmax, weight.shape, torch.bfloat16)


def bitsandbytes(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Its codes, scales quantised once."""
    functional = importlib.import_module("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weight.bfloat16(), quant_type="nf4", blocksize=64)
    return lambda: functional.dequantize_4bit(packed, state)


def torchao(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Its ``NF4Tensor``."""
    kind = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    packed = kind.to_nf4(weight.bfloat16(), 64, 256)
    return lambda: packed.get_original_weight()


def main() -> None:
    """Prints a row for each, and checks that all decode the same weight."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    add_toy(parser, rows=64, cols=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.randn(options.rows, options.cols, generator=torch.Generator().manual_seed(0)) * 0.02
    print(f"{options.rows} x {options.cols}, {REPEATS} times, torch {torch.__version__}:\n")
    print("| | M params/s, median | best | relative error |\n|---|---:|---:|---:|")
    for system in (ours, bitsandbytes, torchao):
        if system is not ours and importlib.util.find_spec(system.__name__) is None:
            print(f"{system.__name__}: not installed", file=sys.stderr)
            continue
        decode = system(weight)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            decoded = decode()
            times.append(time.perf_counter() - begin)
        error = ((decoded.float() - weight).norm() / weight.norm()).item()
        speeds = [weight.numel() / 1e6 / seconds for seconds in (median(times), min(times))]
        print(f"| {system.__name__} | {speeds[0]:.0f} | {speeds[1]:.0f} | {error:.4f} |")


if __name__ == "__main__":
    main()
