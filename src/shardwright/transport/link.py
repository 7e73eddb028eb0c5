"""How fast ranks reach each other, and whether it pays to code what they send (``wire="auto"``)."""

import os
import platform
import zlib
from collections import deque
from collections.abc import Sequence

import torch

from shardwright import clock
from shardwright.schedule.layout import equal_spans
from shardwright.transport.base import Comm, LinkSpeed, Segment
from shardwright.transport.differences import Kept, Sends
from shardwright.transport.host_memory import host_free_nbytes
from shardwright.transport.liveness import boot_id

_PART_NBYTES = (256 << 10, 1 << 20, 4 << 20)  # by turns, until one takes long enough to be measured
_LONG_US = 50_000
_SAMPLE_NUMEL = 1 << 19
_SAVED_CODED, _SAVED_GRADIENTS = 0.85, 0.3  # bytes of bf16 that coding saves (docs/performance.md)
# The time of coding, or of finding out what has changed, is taken from compute, where a link's may be hidden.
# With differences that saved twice their coder's time a step took as long as without, or longer, and so did
# one in which only the second all-gather of what is trained was saved (docs/design/wire.md).
_MARGIN_CODED, _MARGIN_UNCHANGED = 3.0, 2.0


def measured(comm: Comm) -> LinkSpeed:
    """The link between the ranks of ``comm``, which has a network: measured once, in at most half a second at
    100 Mbit/s. Every rank calls it."""
    if comm.link is None:
        comm.link = _measure(comm)
    return comm.link


def free_nbytes(comm: Comm) -> int:
    """Bytes of free host memory for each rank of a host, on the host of ``comm`` that has least: the same on
    all ranks, read once. Every rank calls it."""
    if comm.free_nbytes is None:
        host = zlib.crc32((boot_id() or platform.node()).encode())
        hosts = [row[0] for row in comm.exchange([host], "ranks of each host")]
        # Other axes may have ranks here, too, which the launcher knows of.
        ranks = max(hosts.count(host), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        comm.free_nbytes = -_largest(comm, [-(host_free_nbytes() // ranks)])[0]
    return comm.free_nbytes


def _measure(comm: Comm) -> LinkSpeed:
    sent_nbytes, took_us, nbytes = comm.sent_nbytes, 0, 0
    for nbytes in _PART_NBYTES:
        flat = torch.zeros(nbytes * comm.world, dtype=torch.uint8)
        start = clock.perf_counter()
        comm.all_gather([Segment(flat, equal_spans(nbytes, comm.world))], "measure the link").wait()
        took_us = _largest(comm, [_us_since(start)])[0]
        if took_us > _LONG_US:
            break
    # Not counted: `sent_nbytes` is what parameters and gradients cost.
    comm.sent_nbytes = sent_nbytes
    coded_us, unchanged_us = _largest(comm, _coding_us())
    sample_nbytes = 2 * _SAMPLE_NUMEL
    link_s = took_us / 1e6 / (nbytes * (comm.world - 1))
    return LinkSpeed(link_s, coded_us / 1e6 / sample_nbytes, unchanged_us / 1e6 / sample_nbytes)


def what_pays(link: LinkSpeed, frozen: float) -> Sends:
    """What is worth its coder's time on a link, of a group of which this share is frozen (0 to 1)."""
    codes = frozen < 1 and _SAVED_CODED * link.s > _MARGIN_CODED * link.coded_s
    unchanged = frozen * link.s > _MARGIN_UNCHANGED * link.unchanged_s
    gradients = frozen < 1 and _SAVED_GRADIENTS * link.s > _MARGIN_CODED * link.coded_s
    why = "" if codes or unchanged else f"its link moves {1e-6 / link.s:.0f} MB/s, and it would not be faster"
    return Sends(codes or unchanged, codes, gradients, why)


def _largest(comm: Comm, words: Sequence[int]) -> list[int]:
    return comm.all_reduce_words(words, max, "what the link was measured at")


def _us_since(start: float) -> int:
    return int(1e6 * (clock.perf_counter() - start))


def _coding_us() -> tuple[int, int]:
    """Microseconds to code and decode some bf16 weights after a step; and once more, with none between."""
    from shardwright.transport.cpu.coder import Coder  # noqa: PLC0415 the coder
    from shardwright.transport.cpu.views import view_of  # noqa: PLC0415 the coder

    generator = torch.Generator().manual_seed(0)
    masters = 0.02 * torch.randn(_SAMPLE_NUMEL, generator=generator)
    steps = [masters, masters + 3e-5 * torch.randn(_SAMPLE_NUMEL, generator=generator)]
    coder, ours, theirs, took_us = Coder(), Kept(), Kept(), [0]
    ours.on = ours.codes = True
    # The first message is a difference from zeros, and its time is left out.
    for weights in (steps[0], steps[1], steps[1]):
        values = weights.bfloat16()
        place = torch.empty_like(values)
        start = clock.perf_counter()
        message = torch.frombuffer(bytearray(b"".join(coder.code([values], [ours], 0))), dtype=torch.uint8)
        coder.decode(view_of(message), deque([view_of(place)]), [theirs], 0)
        took_us.append(_us_since(start))
    return took_us[-2], took_us[-1]
