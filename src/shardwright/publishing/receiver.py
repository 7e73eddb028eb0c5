"""``receive(address)``: the newest version of what a trainer publishes, in a process of any world."""

from collections.abc import Iterator, Mapping
from pathlib import PurePath

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import clock
from shardwright.checkpoint.folder import find, read_manifest, step_folders, storage_of
from shardwright.checkpoint.format import Manifest, TensorEntry
from shardwright.checkpoint.shardfile import Reader
from shardwright.checkpoint.tools import read_tensor
from shardwright.checkpoint.url import Location
from shardwright.errors import CheckpointError, CommError, InputError
from shardwright.publishing.client import Client, Ended
from shardwright.publishing.folders import ORDER, location_at
from shardwright.publishing.publisher import host_and_port
from shardwright.transport import secret

_LOOK_S = 0.2  # between two looks into a folder; a rank is asked to wait for as long at a time
_ASK_S = 1.0
_MODEL = "model/"


class _Files:
    """See ``Client``: versions in a folder or bucket."""

    def __init__(self, path: Location) -> None:
        self.version, self._path = 0, path
        self._found: tuple[Location, Manifest] | None = None
        storage_of(path)  # raises for a URL of an unknown kind

    def advance(self, wait_s: float) -> bool:
        """See ``Client``."""
        deadline = clock.monotonic() + wait_s
        while not self._look():
            if clock.monotonic() > deadline:
                return False
            clock.sleep(_LOOK_S)
        return True

    def _look(self) -> bool:
        try:
            # Of many looks most find nothing new: only names are listed then.
            if max((step for step, _ in step_folders(self._path)), default=0) <= self.version:
                return False
            folder, _ = find(self._path)
            manifest = read_manifest(folder)
        except (FileNotFoundError, CheckpointError):  # none is complete, or it has just been removed
            return False
        if manifest.step <= self.version or ORDER not in manifest.state:
            return False
        self._found, self.version = (folder, manifest), manifest.step
        return True

    def entries(self) -> Mapping[str, TensorEntry]:
        """See ``Client``."""
        if self._found is None:
            return {}
        manifest = self._found[1]
        return {key.removeprefix(_MODEL): manifest.tensors[key] for key in manifest.state[ORDER]}

    def tensors(self) -> Iterator[tuple[str, TensorEntry, torch.Tensor]]:
        """See ``Client``."""
        assert self._found is not None
        with Reader(self._found[0]) as reader:
            for name, entry in self.entries().items():
                yield name, entry, read_tensor(reader, _MODEL + name, entry)

    def close(self) -> None:
        """See ``Client``."""


class Receiver:
    """Made by ``receive``. It iterates over ``(name, tensor)`` of the newest version, and is a context
    manager, which closes it. For one thread.
    """

    def __init__(self, address: str, source: Client | _Files, timeout: float) -> None:
        self.address, self._source, self._patience_s = address, source, timeout

    @property
    def version(self) -> int:
        """The number of the version that is here; 0 before the first."""
        return self._source.version

    def wait(self, version: int | None = None, timeout: float | None = None) -> int:
        """Wait for a version, and receive it. Any process calls it alone.

        Args:
            version: wait for this one or a later one; None: for one that is newer than ``self.version``.
            timeout: seconds to wait at most; None: as ``receive`` was given.

        Returns:
            The version's number, which is ``self.version`` then; 0 where the publisher was closed before.

        Raises:
            CommError: none has come in that time, a rank is lost (it is named), or what came is damaged
                (the tensor is named); what was received before stays, unless that says otherwise.
        """
        wanted = self.version + 1 if version is None else version
        timeout = self._patience_s if timeout is None else timeout
        deadline = clock.monotonic() + timeout
        while self.version < wanted:
            left_s = deadline - clock.monotonic()
            try:
                if not self._source.advance(max(0.0, min(_ASK_S, left_s))) and left_s <= 0:
                    raise CommError(
                        f"{self.address}: no version {wanted} in {timeout:g} s, the newest is "
                        f"{self.version}; see whether all ranks of the trainer call send()"
                    )
            except Ended:
                return 0
        return self.version

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors on the CPU, one at a time, of the newest version; it waits for the first.
        A tied weight comes under each of its names. The tensors are the caller's."""
        self._newest()
        for name, entry, whole in self._source.tensors():
            yield name, whole
            for alias in entry.aliases:
                yield alias.removeprefix(_MODEL), whole

    def _newest(self) -> None:
        if not self.version:
            if not self.wait():
                raise CommError(f"{self.address}: the publisher was closed before it sent a version")
            return
        try:
            while self._source.advance(0.0):
                pass
        except Ended:  # the last version is here
            pass

    def load_into(self, module: nn.Module) -> int:
        """Copy the newest version into a plain module that has its names. Any process calls it alone.

        Args:
            module: each name must be one of its parameters or buffers, of that shape; it may have more. A
                tensor of another dtype or device is converted.

        Returns:
            The version's number.

        Raises:
            InputError: a name or a shape doesn't fit. Nothing is changed then.
            CommError: as ``wait``.
            CheckpointError: a file of the version is damaged, or was removed meanwhile. What comes before
                it is loaded.
        """
        self._newest()
        targets = module.state_dict(keep_vars=True)
        for name, entry in self._source.entries().items():
            target = targets.get(name)
            if not isinstance(target, torch.Tensor) or isinstance(target, DTensor):
                near = "a sharded parameter" if isinstance(target, DTensor) else "no such tensor"
                raise InputError(
                    f"{self.address} has {name}, and this {type(module).__name__} has {near}; give a plain "
                    "module with the trainer's names, or publish with names="
                )
            if tuple(target.shape) != entry.shape:
                raise InputError(f"{name} is {list(entry.shape)}, and {list(target.shape)} in this module")
        with torch.no_grad():
            for name, _, whole in self._source.tensors():
                targets[name].copy_(whole)
        return self.version

    def close(self) -> None:
        """End; the publisher goes on."""
        self._source.close()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def receive(address: str | PurePath, *, timeout: float = 60.0) -> Receiver:
    """What a trainer publishes by ``publish``, in any process: it need not be a rank of anything.

    Args:
        address: what ``publish`` was given, or ``Publisher.address``: ``tcp://host:port``, a folder, a URL,
            or ``shm://name``. A folder needn't be there yet.
        timeout: seconds to wait for the trainer, and by default for each version.

    Returns:
        A ``Receiver``.

    Raises:
        InputError: the address is none.
        CommError: the trainer can't be reached in that time, or has another ``SHARDWRIGHT_SECRET``.
        ConfigError: ``SHARDWRIGHT_SECRET`` is too short.
        MissingExtra: the package for this kind of URL isn't installed.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> publisher = shardwright.publish(model, to="tcp://127.0.0.1:0")
        >>> receiver = shardwright.receive(publisher.address)
        >>> publisher.send()
        1
        >>> sampler = nn.Linear(8, 4)
        >>> receiver.wait(), receiver.load_into(sampler)
        (1, 1)
        >>> receiver.close()
        >>> publisher.close()
    """
    if str(address).startswith("tcp://"):
        source: Client | _Files = Client(*host_and_port(str(address)), secret.given(), timeout)
    else:
        source = _Files(location_at(address))
    return Receiver(str(address), source, timeout)
