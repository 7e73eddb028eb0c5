"""The memory that a group's unsharded parameters live in: one storage, freed and regrown in place.

Autograd saves tensors that view this storage. So it must be the same storage object for the life of the
group: swapping the parameter's data between pooled buffers would let the backward of one layer read the
weights of another. ``resize_(0)`` really frees the memory, and every saved view reads the regrown one.

The tensors handed out are made over the storage one by one, not as views of each other: so they have
version counters of their own, and filling the buffer doesn't look like an in-place change of a weight.
"""

import torch

from shardwright.transport.cpu.pages import HUGE_PAGE_NBYTES, advise_huge, keep_freed_pages


class Buffer:
    """``nbytes`` of device memory, given back and taken again at a stable storage. Starts freed.

    allocated_nbytes: held now, ``nbytes`` or 0.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.allocated_nbytes = 0
        self._storage = torch.UntypedStorage(0, device=device)
        if self._storage.device.type == "cpu" and nbytes >= HUGE_PAGE_NBYTES:
            keep_freed_pages()

    def alloc(self) -> None:
        """Take the memory (uninitialised). No-op where it is already held."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)
            if self.nbytes >= HUGE_PAGE_NBYTES:
                advise_huge(self._storage)
        self.allocated_nbytes = self.nbytes

    def free(self) -> None:
        """Give the memory back; tensors over it may not be read until it is taken and filled again."""
        self._storage.resize_(0)
        self.allocated_nbytes = 0

    def arrive(self, keep_wire: bool) -> None:
        """What was gathered is there. No-op where it was gathered into the place of use."""

    def tensor(
        self, dtype: torch.dtype, offset_nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor over the memory, with a version counter of its own. The memory must be held."""
        empty = torch.empty(0, dtype=dtype, device=self._storage.device)
        return empty.set_(self._storage, offset_nbytes // dtype.itemsize, shape, strides)  # type: ignore[arg-type]


class ReorderedBuffer(Buffer):
    """Some of what lies in it is gathered elsewhere, on the ``wire``, in another order.

    pairs: a part of this memory, through tensors of its own, and the part of the wire that it is copied from.
    allocated_nbytes: of both.
    """

    def __init__(self, nbytes: int, wire: Buffer, device: torch.device) -> None:
        super().__init__(nbytes, device)
        self.wire = wire
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def alloc(self) -> None:
        """Take the memory of both."""
        super().alloc()
        self.wire.alloc()
        self.allocated_nbytes += self.wire.nbytes

    def free(self) -> None:
        """Give the memory of both back."""
        super().free()
        self.wire.free()

    def arrive(self, keep_wire: bool) -> None:
        """Copy what was gathered into the order of use. keep_wire: it is still needed while unsharded."""
        for place, part in self.pairs:
            place.copy_(part)
        if not keep_wire:
            self.wire.free()
            self.allocated_nbytes = self.nbytes
