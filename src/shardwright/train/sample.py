"""Text from a trained model, one byte at a time, in one process."""

from pathlib import Path

import torch

from shardwright.data.text import FILE_START
from shardwright.errors import printable
from shardwright.recipe.config import SampleConfig
from shardwright.recipe.resolve import Resolved, resolve
from shardwright.train.folder import RunFolder
from shardwright.train.models import Transformer


@torch.no_grad()
def generate(model: Transformer, config: SampleConfig, context_length: int, seed: int) -> bytes:
    """``config.num_bytes`` bytes that continue the prompt; the model sees the last ``context_length`` bytes.

    The model must be unsharded: one process calls. The same seed gives the same bytes. They end early where
    the model's numbers are infinite or NaN.
    """
    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(FILE_START + config.prompt.encode())
    start = len(text)
    while len(text) - start < config.num_bytes:
        tokens = torch.tensor([list(text[-context_length:])], device=device)
        logits = model(tokens)[0, -1].float().cpu()
        if not logits.isfinite().all():
            break
        if config.temperature == 0:
            text.append(int(logits.argmax()))
        else:
            shares = torch.softmax(logits / config.temperature, dim=-1)
            text.append(int(torch.multinomial(shares, 1, generator=generator)))
    return bytes(text[start:])


def load_run(root: Path) -> tuple[Resolved, Transformer]:
    """The recipe of a finished run and its whole model, unsharded, on the CPU, in fp32.

    Raises:
        InputError: no finished run there.
    """
    folder = RunFolder(root)
    tensors = folder.read_model()
    resolved = resolve(folder.config)
    with torch.device("meta"):
        model = Transformer(resolved.recipe.model)
    model.load_state_dict(tensors, assign=True)
    return resolved, model.eval()


def readable(text: bytes) -> str:
    """``text`` for a screen: what is no UTF-8, and control characters, as escapes."""
    return printable(text.decode("utf-8", errors="backslashreplace"))
