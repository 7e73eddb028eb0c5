"""Whether a model keeps texts that share a sequence apart, tried on the model itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LENGTH = 8  # tokens of each of the two texts that are tried
_DIFFERS = 1e-3  # of the norm: what is masked adds an exact 0, but kernels may round otherwise


@torch.no_grad()
def keeps_apart(
    model: Any, size: int, device: torch.device, run: Callable[[Tensor, Tensor], Tensor] | None = None
) -> bool:
    """Whether a text that begins where ``position_ids`` count from 0 again is read as if it stood alone.

    Every rank calls, for two forwards of 16 tokens: the logits of the second text must not change with the
    first. They do in models that take no ``position_ids``, that carry a state from token to token, or whose
    attention doesn't look for packed sequences. size: words that it knows. run: of a stage of a pipeline,
    what it makes of tokens and positions, in place of logits.
    """
    run = run or (lambda ids, at: model(input_ids=ids, position_ids=at, use_cache=False).logits)
    tokens = torch.arange(2 * _LENGTH, device=device)[None] * 7 % size
    other = tokens.clone()
    other[:, :_LENGTH] = (tokens[:, :_LENGTH] + 3) % size
    positions = torch.arange(_LENGTH, device=device).repeat(2)[None]
    trains = model.training
    model.eval()
    try:
        first, second = (run(ids, positions)[:, _LENGTH:].float() for ids in (tokens, other))
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        return False
    finally:
        model.train(trains)
    return bool((first - second).norm() <= _DIFFERS * first.norm())
