"""A group's encoded weights: gathered as codes and scales, decoded once all of them are there.

at rest       codes and scales, this rank's rows
gathering     ``arrival``: codes and scales of all ranks
unsharded     ``dense``: the decoded weights, which modules show; ``arrival`` is freed

Beside them the group's parameters of tensor subclasses that encode themselves (``extended``).
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.params.binding import Buffer, bind
from shardwright.params.param import ParamSite, ShardedParam
from shardwright.policy import MixedPrecisionPolicy
from shardwright.quantized import encodings
from shardwright.quantized.codec import Encoding, scales_name
from shardwright.schedule.layout import GroupLayout, pack
from shardwright.transport.base import Segment, copy_together


@dataclass(frozen=True)
class EncodedPair:
    """Codes and scales of one weight."""

    codes: ShardedParam
    scales: ShardedParam

    @property
    def encoding(self) -> Encoding:
        """How the weight is encoded, now."""
        site = self.codes.sites[0]
        return encodings(site.module)[site.name]

    def check_frozen(self) -> None:
        """Raises: InputError where the scales ask for a gradient."""
        if self.scales.trainable or self.codes.trainable:
            raise InputError(
                f"{self.codes.fqn!r} is quantised ({self.encoding.codec.name}), it can't be trained: "
                "call requires_grad_(False) on its codes and scales and train adapters, or leave it out of "
                "quantize_"
            )

    def encode(self, weight: torch.Tensor) -> None:
        """Take this rank's rows of a whole weight over into the shards."""
        encode, dim = self.encoding.codec.encode, self.codes.layout.dim
        if dim is None or dim == len(self.encoding.shape) - 1:
            codes, scales = (p.rows_of(t) for p, t in zip(self.parts, encode(weight), strict=True))
        else:
            codes, scales = encode(self.codes.rows_of(weight))
        self.codes.local.copy_(codes)
        self.scales.local.copy_(scales)

    @property
    def parts(self) -> tuple[ShardedParam, ShardedParam]:
        """Codes and scales."""
        return self.codes, self.scales


def encode_sharded(param: ShardedParam, encoding: Encoding) -> ShardedParam:
    """Make ``param``, at rest, the codes of its weight, in place; returns the parameter of its scales.

    Every rank encodes its own rows. Blocks of a codec run along the last dim: a weight that is sharded on
    that one is collected first, and every rank of its mesh calls this then.
    """
    dim, encode = param.layout.dim, encoding.codec.encode
    shapes = [tuple(part.shape) for part in encode(torch.empty(encoding.shape, device="meta"))]
    scales = copy.copy(param)
    scales.fqn = scales_name(param.fqn, encoding.codec)
    scales.sites = [ParamSite(site.module, scales_name(site.name, encoding.codec)) for site in param.sites]
    if dim is None or dim == len(encoding.shape) - 1:
        # A block's numbers may lie on several ranks, which would each find another scale.
        whole = encode(param.sharded.detach().full_tensor())  # type: ignore[attr-defined]
        ranges = [param.layout.like(s).row_range(param.axis.rank) for s in shapes]
        parts = [
            part[..., start:stop].contiguous() for part, (start, stop) in zip(whole, ranges, strict=True)
        ]
    else:
        parts = list(encode(param.local.detach()))
    for made, shape, rows in zip((param, scales), shapes, parts, strict=True):
        made.become(shape, rows.to(param.local.device))
    return scales


def pairs_in(params: Iterable[ShardedParam]) -> list[EncodedPair]:
    """The encoded weights of which both parts are among ``params``."""
    by_site = {(id(site.module), site.name): param for param in params for site in param.sites}
    found: dict[ShardedParam, EncodedPair] = {}
    for param in dict.fromkeys(by_site.values()):
        site = param.sites[0]
        encoding = encodings(site.module).get(site.name)
        if encoding is not None:
            scales = by_site.get((id(site.module), scales_name(site.name, encoding.codec)))
            if scales is not None:
                found[param] = EncodedPair(param, scales)
    return list(found.values())


class Decoding:
    """The weights of a group that are decoded on arrival (``pairs``), and their two buffers.

    is_idle: there are neither such weights nor ``extended`` parameters, so that nothing is to be done.
    faces: what modules show of them while unsharded, by their codes. Weights that are decoded per use are
        no part of this: their codes are unsharded as any parameter is.
    """

    def __init__(
        self, params: Sequence[ShardedParam], policy: MixedPrecisionPolicy, device: torch.device
    ) -> None:
        every = pairs_in(params)
        for pair in every:
            for part in pair.parts:
                # A codec packs bits into whatever dtype; to cast it would be to change the weight.
                part.kept_dtype = True
            for site in pair.codes.sites:
                table, dtype = encodings(site.module), policy.param_dtype or pair.encoding.dtype
                table[site.name] = replace(table[site.name], compute_dtype=dtype)
        self.frozen = every
        self.extended: list[Any] = [param for param in params if param.extended]
        self._policy = policy
        self.pairs = [pair for pair in every if not pair.encoding.per_use]
        self.parts = {part for pair in self.pairs for part in pair.parts}
        self.faces: dict[ShardedParam, nn.Parameter] = {}
        self._filled: dict[ShardedParam, torch.Tensor] = {}
        self._device = device
        self.is_idle = not self.pairs and not self.extended
        self.arrival = Buffer(0, device)
        self.dense = Buffer(0, device)

    def bind(self) -> None:
        """Lay out both buffers, once."""
        for param in self.extended:
            param.unbind(param.compute_dtype(self._policy))
        if self.faces or not self.pairs:
            return
        parts = [part for pair in self.pairs for part in pair.parts]
        dtypes = [part.local.dtype for part in parts]
        layout = GroupLayout(tuple(p.layout for p in parts), tuple(d.itemsize for d in dtypes))
        self.arrival = Buffer(layout.nbytes, self._device)
        self.arrival.alloc()
        for part, offset, dtype in zip(parts, layout.offsets_nbytes, dtypes, strict=True):
            bind(part, self.arrival, offset, dtype)
        self.arrival.free()
        how = [pair.encoding for pair in self.pairs]
        offsets, nbytes = pack([torch.Size(e.shape).numel() * e.compute_dtype.itemsize for e in how])
        self.dense = Buffer(nbytes, self._device)
        self.dense.alloc()
        faces: dict[ShardedParam, nn.Parameter] = {}
        for pair, e, offset in zip(self.pairs, how, offsets, strict=True):
            strides = torch.empty(e.shape, device="meta").stride()
            face, filled = (self.dense.tensor(e.compute_dtype, offset, e.shape, strides) for _ in range(2))
            faces[pair.codes] = nn.Parameter(face, requires_grad=False)
            self._filled[pair.codes] = filled  # of its own, so that filling is no in-place change of a weight
        self.dense.free()
        self.faces = faces  # all at once: they say that this is done

    def fill(self) -> list[Segment]:
        """Take the memory of ``arrival``, and fill it for extended parameters; what these have to gather."""
        self.arrival.alloc()
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        segments = [segment for param in self.extended for segment in param.fill(self._policy, copies)]
        copy_together([place for place, _ in copies], [part for _, part in copies])
        return segments

    def arrive(self, keep_arrival: bool) -> int:
        """Decode what was gathered; returns the bytes that were held meanwhile.

        keep_arrival: the codes are still needed while unsharded.
        """
        self.dense.alloc()
        with torch.no_grad():
            for pair in self.pairs:
                codes, scales = (part.unsharded.detach() for part in pair.parts)
                pair.encoding.decode(codes, scales, out=self._filled[pair.codes])
            for param in self.extended:
                param.arrive(self._policy)
        # Of both buffers, before the codes are freed: so much is held at once.
        held_nbytes = self.held_nbytes
        if not keep_arrival:
            self.arrival.free()
        return held_nbytes

    def show(self) -> None:
        """Modules show the decoded weights."""
        for codes, face in self.faces.items():
            codes.show(face)

    def free(self) -> None:
        """Give the memory of both buffers back, and that of extended parameters."""
        self.arrival.free()
        self.dense.free()
        for param in self.extended:
            param.free()

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the decoded weights while they are there."""
        return self.dense.nbytes

    @property
    def arrival_nbytes(self) -> int:
        """Bytes of the codes until they are decoded."""
        return self.arrival.nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of both buffers and of extended parameters now."""
        own = sum(param.held_nbytes for param in self.extended)
        return own + self.arrival.allocated_nbytes + self.dense.allocated_nbytes

    def write_back(self, param: ShardedParam) -> None:
        """Encode anew the decoded weight whose codes are ``param``, which was edited."""
        for pair in self.pairs:
            if pair.codes is param:
                pair.encode(self.faces[param].detach())
