"""AdamW with its state in 8 bits, by bitsandbytes, over sharded parameters (Dettmers et al.,
arXiv:2110.02861).

bitsandbytes steps plain tensors, so each rank's shards are stepped as such. Its state is in blocks of 256
elements of a shard, which another number of ranks cuts elsewhere: checkpoints have it in float32, as AdamW's.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.extras import from_extra
from shardwright.params.ragged import placed_as

with from_extra("bnb"):
    import bitsandbytes  # pyright: ignore[reportMissingImports]

_BLOCK = 256
_PARTS = (("exp_avg", "1"), ("exp_avg_sq", "2"))


class AdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' ``AdamW8bit`` over parameters that may be DTensors; each rank steps its own rows.

    Of a shard with fewer than 4096 elements the state is in float32, as bitsandbytes has it. ``state`` is
    empty but inside of ``opened``.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self._local: dict[nn.Parameter, nn.Parameter] = {
            p: nn.Parameter(_rows(p))
            for group in self.param_groups
            for p in group["params"]
            if _rows(p).numel()
        }
        self._inner = bitsandbytes.optim.AdamW8bit(
            [
                {**group, "params": [self._local[p] for p in group["params"] if p in self._local]}
                for group in self.param_groups
            ]
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of this rank's shards; local."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        self._point()
        for p, local in self._local.items():
            local.grad = None if p.grad is None else _rows(p.grad)
        self._inner.step()
        for local in self._local.values():
            local.grad = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """``state`` is AdamW's, in float32 and distributed as the parameters, for the length of the block;
        what is there at its end is taken over. For checkpoints. Local.

        What was in 8 bits is the same bits afterwards, if nothing was written.
        """
        for p, local in self._local.items():
            if self._inner.state[local]:
                self.state[p] = self._plain(p, self._inner.state[local])
        try:
            yield
            self._point()
            for number, group in enumerate(self.param_groups):
                for p in group["params"]:
                    if self.state.get(p) and p in self._local:
                        self._take(number, p)
        finally:
            self.state.clear()

    def _point(self) -> None:
        """Point at the shards, which may have been put elsewhere in memory since."""
        for p, local in self._local.items():
            local.data = _rows(p)

    def _plain(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
        for name, number in _PARTS:
            rows = state[f"state{number}"]
            if rows.dtype == torch.uint8:
                rows = bitsandbytes.functional.dequantize_blockwise(
                    rows, absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=_BLOCK
                )
            found[name] = _like(p, rows)
        return found

    def _take(self, number: int, p: nn.Parameter) -> None:
        local, plain = self._local[p], self.state[p]
        self._inner.init_state(self._inner.param_groups[number], local, number, 0)
        state = self._inner.state[local]
        state["step"] = int(plain["step"])
        for name, part in _PARTS:
            rows = _rows(plain[name]).contiguous()
            if state[f"state{part}"].dtype != torch.uint8:
                state[f"state{part}"].copy_(rows)
                continue
            codes, absmax = _encoded(rows, state[f"qmap{part}"])
            state[f"state{part}"].copy_(codes)
            state[f"absmax{part}"].copy_(absmax)


def _encoded(rows: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes, shaped as ``rows``, and float32 absmax of each block: those that ``rows`` were decoded
    from.

    bitsandbytes' own ``quantize_blockwise`` makes others of them: the lowest value of ``code`` is above -1,
    so a block whose largest number is negative comes out smaller each time.
    """
    flat = rows.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    absmax = torch.where(-low >= high, low / code[0], high / code[-1]) if code[0] < 0 else high / code[-1]
    relative = torch.where(absmax > 0, blocks / absmax, 0.0)
    codes = torch.bucketize(relative, (code[1:] + code[:-1]) / 2).to(torch.uint8)
    return codes.flatten()[: len(flat)].view_as(rows), absmax.flatten()


def _rows(tensor: Tensor) -> Tensor:
    """This rank's, as a plain tensor that shares its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(p: nn.Parameter, rows: Tensor) -> Tensor:
    """``rows`` distributed as ``p`` is."""
    return placed_as(p, rows)
