"""``publish(model, to=...)``: every rank hands its shards of each version over, beside training.

main thread     step, send(): copy this rank's shards to the host, step, send(), ...
its thread             code or write them, hand them over        the next ones
"""

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright import clock
from shardwright.checkpoint.agree import Ranks, ranks
from shardwright.checkpoint.background import yield_to_training
from shardwright.checkpoint.format import Box, TensorEntry
from shardwright.checkpoint.shardfile import DTYPE_NAME
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, CommError, InputError, StageError
from shardwright.lora import adapters_in
from shardwright.observe.explain import PUBLISHED
from shardwright.publishing.destination import Destination
from shardwright.publishing.folders import GROUP_TIMEOUT, Folder, config_of, location_at
from shardwright.publishing.server import Server
from shardwright.publishing.shards import (
    Held,
    Layout,
    Names,
    Staging,
    come_to_rest,
    layout_of,
    shards_of,
)
from shardwright.transport import secret
from shardwright.transport.attempt import new_group
from shardwright.transport.cpu.handshake import addresses_of, listen, serve
from shardwright.transport.process import start_thread
from shardwright.transport.streams import wait_for_stream

Pieces = Sequence[tuple[str, tuple[int, ...], torch.Tensor]]
"""Of each piece of this rank: the tensor's name, where it begins in that, and its values."""
_LOOK_S = 0.5


def publish(
    model: nn.Module,
    to: str | PurePath | Callable[[int, Pieces], object],
    *,
    dtype: torch.dtype | None = None,
    names: Names = None,
    keep: int = 2,
) -> "Publisher":
    """Hand the weights of a sharded model to other processes, as often as ``send()`` is called.

    Every rank calls it, between steps. Each rank sends its own shards; no rank ever holds the model. Nothing
    is sent before the first ``send()``.

    Args:
        model: a model with at least one sharded module.
        to: where versions go; the same on all ranks.
            "tcp://host:port": rank 0 listens there, port 0 for a free one (``address`` says which), the
            other ranks at ports of their own, and any number of processes call ``receive`` with it. From the
            second version on only what has changed is sent, without loss.
            A folder, a URL as "s3://bucket/run", or "shm://name" for memory of this host: each version is a
            subfolder ``step-000001`` with safetensors, an index and, of a model of transformers,
            ``config.json``; complete, or not there.
            A function: called on a thread of each rank, one version after another, with the version's
            number and this rank's pieces ``[(name, offset, tensor)]``; the tensors change when it returns.
        dtype: what floating-point tensors are cast to; None: as they are at rest. Scales of quantised
            weights keep theirs.
        names: None: all of ``full_state_dict``, quantised weights as codes and scales. "adapters": what is
            trained of a model with adapters. "merged": weights decoded, with their adapters added (adapters
            are gathered for it). A function: called with each name, returns what to call it, or None to leave
            it out.
        keep: how many of the newest versions stay in a folder or bucket.

    Returns:
        A ``Publisher``.

    Raises:
        InputError: an argument, or a tensor that can't be sent. No rank publishes then.
        StageError: it was called inside a step.
        CheckpointError: on all ranks, where one of them refuses, with its reason: an address that can't be
            listened at, a folder that can't be written, a dtype or placement that can't be sent.
        ConfigError: ``SHARDWRIGHT_SECRET`` is too short.
        CommError: a rank didn't come.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> with shardwright.publish(model, to="published", dtype=torch.bfloat16) as publisher:
        ...     publisher.send()  # after optimizer.step()
        1
        >>> for name, tensor in shardwright.receive("published"):
        ...     print(name, tuple(tensor.shape), tensor.dtype)
        weight (4, 8) torch.bfloat16
        bias (4,) torch.bfloat16
    """
    come_to_rest(model, "publish")
    _check(model, to, dtype, names, keep)
    group = _own_ranks()
    described: dict[str, TensorEntry] = {}

    # Outside of `together`, since merging gathers adapters; a rank that fails here is told by the next one.
    fault, own = "", list[tuple[str, Box]]()
    try:
        for name, shard in shards_of(model, dtype, names):
            if name in described:
                raise InputError(f"names= gives {name!r} to two tensors")
            described[name] = shard.entry
            own += [(name, box) for box, _ in shard.views] if shard.owner else []
    except (InputError, RuntimeError) as error:
        fault = str(error)

    def told() -> tuple[int, Held]:
        if fault:
            raise InputError(fault)
        return crc32(f"{described} {'' if callable(to) else to}".encode()), own

    try:
        marks, held = zip(*group.together("publish()", told), strict=True)
    except CheckpointError as error:
        raise (InputError(fault) if fault else error) from error
    if differ := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
        raise InputError(
            f"rank {differ[0]} publishes other names, shapes or dtypes than rank 0, or to another place; "
            "give all ranks the same"
        )
    layout = layout_of(described, held)
    return Publisher(model, to, dtype, names, keep, group, layout)


def _check(model: nn.Module, to: Any, dtype: Any, names: Any, keep: Any) -> None:
    if not (callable(to) or isinstance(to, str | PurePath)):
        raise InputError(
            f"to is {to!r}, expected a tcp:// address, a folder, a URL, shm://name or a function"
        )
    if dtype is not None and not (dtype in DTYPE_NAME and dtype.is_floating_point):
        raise InputError(f"dtype is {dtype!r}, expected a floating-point torch.dtype, or None")
    if not (names in (None, "adapters", "merged") or callable(names)):
        raise InputError(f'names is {names!r}, expected None, "adapters", "merged" or a function of a name')
    if names == "adapters" and not (adapters_in(model) or hasattr(model, "peft_config")):
        raise InputError(f'names="adapters", and {type(model).__name__} has none; call add_lora first')
    if type(keep) is not int or keep < 1:
        raise InputError(f"keep is {keep!r}, expected a number of versions, at least 1")


def _own_ranks() -> Ranks:
    """All ranks, in a group whose exchanges can't meet those of training or of a save in the background."""
    shared = ranks()
    own = Ranks(shared.rank, shared.world)
    if own.world > 1:
        own.cpu_group = new_group(range(own.world), "gloo", GROUP_TIMEOUT)
    return own


def host_and_port(address: str) -> tuple[str, int]:
    """Of a ``tcp://`` address. Raises: InputError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"the address is {address!r}, expected tcp://HOST:PORT, as tcp://10.0.0.1:5555")
    return host.strip("[]"), int(port)


class _Called(Destination):
    """See ``Destination``: a function of the user's, which may have ranks meet."""

    takes_each = True

    def __init__(self, function: Callable[[int, Pieces], object], held: Held) -> None:
        self._function, self._held, self._number = function, held, 0
        self.address = getattr(function, "__qualname__", "a function")

    def is_due(self, number: int) -> bool:
        """See ``Destination``."""
        return number > self._number

    def take(self, number: int, pieces: Sequence[torch.Tensor]) -> None:
        """See ``Destination``."""
        self._number = number
        held = zip(self._held, pieces, strict=True)
        self._function(number, [(name, box.offset, piece) for (name, box), piece in held])


class Publisher:
    """Made by ``publish``. Also a context manager, which closes it.

    ``address`` is what ``receive`` is called with; ``version`` the number of the last ``send()``, 0 before
    the first (in a folder with earlier versions they are counted on).

    Raises:
        InputError: as ``publish``.
        ConfigError: the same.
    """

    def __init__(
        self,
        model: nn.Module,
        to: Any,
        dtype: torch.dtype | None,
        names: Names,
        keep: int,
        group: Ranks,
        layout: Layout,
    ) -> None:
        self.model, self._dtype, self._group = model, dtype, group
        self._names: Names = names
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_busy = self._is_closed = False
        self.version = self._staged = 0
        self.address = str(to)
        if callable(to):
            self._target: Destination = _Called(to, layout.held[group.rank])
        elif str(to).startswith("tcp://"):
            self._target = self._listening(str(to), layout)
        else:
            self._target = Folder(location_at(to), group, layout, keep, config_of(model))
            self.version = self._target.number
        self.address = self._target.address or self.address
        pinned = any(p.device.type != "cpu" for p in model.parameters())
        self._staging = Staging(layout, group.rank, pinned)
        model.__dict__.setdefault(PUBLISHED, []).append(weakref.ref(self))
        self._thread = start_thread("shardwright-publish", self._run)

    @property
    def said(self) -> str:
        """What ``explain`` says of this publisher."""
        parts = self._staging.nbytes, self._target.nbytes
        return (
            f"published to {self.address}: {sum(parts):,} bytes of host memory on this rank ({parts[0]:,} "
            f"for the newest version, {parts[1]:,} for the one before and for changes between versions)"
        )

    def _listening(self, to: str, layout: Layout) -> Server:
        """Every rank listens; rank 0 knows where."""
        group, own = self._group, []
        host, port = host_and_port(to)

        def begin() -> tuple[str, int, str]:
            key = secret.given()
            if group.rank == 0:
                try:
                    family = addresses_of(host, port)[0][0]
                    own[:] = [serve((host, port), family=family, backlog=128), key]
                except OSError as error:
                    raise InputError(
                        f"can't listen at {to}: {error.strerror or error}; give an address of rank 0's host "
                        "and a free port, or port 0"
                    ) from error
                return host, own[0].getsockname()[1], secrets.token_hex(16)
            found = listen()
            if isinstance(found, str):
                raise InputError(f"rank {group.rank} can't listen: {found}")
            own[:] = [found[0], key]
            return found[1].host, found[1].port, ""

        try:
            told = group.together("publish()", begin)
        except BaseException:
            for listener in own[:1]:
                listener.close()
            raise
        said: dict[str, Any] = {"token": told[0][2]}
        if group.rank == 0:
            said |= {"places": [each[:2] for each in told], **layout.told()}
        self.address = f"tcp://{host}:{told[0][1]}"
        return Server(own[0], own[1], said, self._changed)

    def send(self) -> int:
        """Hand over the weights as they are now. Every rank calls it, after ``optimizer.step()``.

        It returns when this rank's shards are copied to the host, so that training may go on at once. Over
        TCP it waits only while the version before is being coded, never for a receiver, and a version that
        nobody has asked for is replaced by the next one. Into a folder or a function each version goes, and
        it waits for the one before.

        Returns:
            The version's number: 1, 2, and so on, the same on all ranks.

        Raises:
            StageError: it was called inside a step, or the publisher is closed.
            InputError: the model's names, shapes or sharding have changed. The last version stays.
            CheckpointError: a tensor has a dtype or a placement now that can't be sent. The same holds.
            CommError: this rank couldn't hand over an earlier version; the cause says why.
        """
        come_to_rest(self.model, "send")
        self._check_open("send")
        with torch.no_grad(), self._changed:
            while self._error is None and (self._is_busy or (self._target.takes_each and self._is_due())):
                clock.wait(self._changed, _LOOK_S)
            self._raise_error()
            self._staged = 0  # until all of it is there, nobody may take it
            if self._staging.fill(shards_of(self.model, self._dtype, self._names)):
                wait_for_stream()
            self.version += 1
            self._staged = self.version
            self._changed.notify_all()
        return self.version

    def wait(self, timeout: float = 600.0) -> int:
        """Wait until the last version is handed over: written, called with, or ready for receivers.

        Any rank may call it; of a folder or bucket every rank's thread must come to its end.

        Args:
            timeout: seconds to wait at most.

        Returns:
            The version's number.

        Raises:
            CommError: it failed, or isn't done in that time.
        """
        deadline = clock.monotonic() + timeout
        with self._changed:
            while self._error is None and (self._is_busy or self._is_due()):
                if clock.monotonic() > deadline:
                    raise CommError(
                        f"version {self.version} isn't handed over to {self.address} in {timeout:g} s; see "
                        "whether the other ranks run, and the disk or store isn't full"
                    )
                clock.wait(self._changed, min(_LOOK_S, timeout))
            self._raise_error()
        return self.version

    def close(self, timeout: float = 10.0) -> None:
        """Hand over the last version, and end. Every rank calls it, and waits for the others; a second call
        does nothing.

        Args:
            timeout: seconds that receivers which are connected have to fetch the last version.

        Raises:
            CommError: as ``wait``, after 600 s.
            CheckpointError: another rank was lost.
        """
        if self._is_closed:
            return
        try:
            self.wait()
            # A receiver needs all ranks: none ends before the last one has come here.
            self._group.together("closing a publisher", lambda: None)
        finally:
            self._end(timeout if self._error is None else 0.0)

    def _end(self, timeout: float) -> None:
        try:
            self._target.close(timeout)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._thread.join(timeout)
            self.model.__dict__[PUBLISHED].remove(weakref.ref(self))

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not come to the end of a version
            self._end(0.0)

    def _is_due(self) -> bool:
        return self._target.is_due(self._staged)

    def _check_open(self, caller: str) -> None:
        if self._is_closed:
            raise StageError(f"{caller}: this publisher is closed; call publish again")

    def _raise_error(self) -> None:
        if self._error is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise CommError(
                f"rank {rank} couldn't hand over a version to {self.address}: {self._error}; mend that, "
                "close this publisher and publish anew"
            ) from self._error

    def _run(self) -> None:
        """The thread."""
        yield_to_training()
        try:
            while self._work():
                pass
        except BaseException as error:
            with self._changed:
                self._error, self._is_busy = error, False
                self._changed.notify_all()

    def _work(self) -> bool:
        with self._changed:
            number = self._staged
            while not (is_due := self._target.is_due(number)) and not self._target.has_more():
                if self._is_closed:
                    return False
                clock.wait(self._changed, _LOOK_S)
                number = self._staged
            self._is_busy = is_due
        if is_due:
            self._target.take(number, self._staging.pieces)
        else:
            self._target.do_more()
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
        return True
