"""Text from a model of transformers, sharded or whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import InputError


@dataclass(frozen=True)
class Wanted:
    """How to write: at most ``num_tokens``, at ``temperature`` (0: the likeliest), drawn from ``seed``."""

    num_tokens: int
    temperature: float
    seed: int = 1


def tokens_of(prompt: str, tokenizer: Any, instead: Sequence[int] = ()) -> torch.Tensor:
    """A text to continue, behind the mark of a text's begin, int64 (1, n); ``instead`` of none.

    Raises: InputError where there is no token at all.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tokens = [*begin, *tokenizer(prompt, add_special_tokens=False)["input_ids"]] or [*instead]
    if not tokens:
        raise InputError(
            "the tokenizer has no mark for the begin of a text: give a text to continue (--prompt)"
        )
    return torch.tensor([tokens])


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, tokens: torch.Tensor, wanted: Wanted, **options: Any
) -> torch.Tensor:
    """The tokens that ``model`` writes after ``tokens``, int64 (1, n), up to the end of the text, or of its
    positions; 1-D."""
    room = getattr(model.config, "max_position_embeddings", None)
    number = wanted.num_tokens if room is None else min(wanted.num_tokens, room - tokens.shape[1])
    how = {"temperature": wanted.temperature} if wanted.temperature else {}
    written = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max(1, number),
        pad_token_id=tokenizer.pad_token_id or 0,
        do_sample=wanted.temperature > 0,
        **how,
        **options,
    )
    return written[0, tokens.shape[1] :]
