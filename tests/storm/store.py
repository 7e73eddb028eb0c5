"""The job's store, simulated: a process holds it, the others ask over the network."""

from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from tests.storm.network import Network
from tests.storm.sim import Process, Task

_HELD_S = 900.0
"""How long a call waits for a store that is silent: as torch's TCPStore, for the kernel."""


class Held:
    """What the store holds. process: with which it ends. serve_s: seconds for which its one thread is busy
    with a call, and with each key of it. calls, nbytes: of all that was asked and answered."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.keys: dict[str, bytes] = {}
        self.silent_until = self.busy_until = 0.0
        self.serve_s = 0.0, 0.0
        self.calls = self.nbytes = 0
        self.waiters: dict[Task, None] = {}
        self.fronts: list[SimulatedStore] = []


class SimulatedStore(Store):
    """A connection to it. silent: while it is, who asks waits."""

    def __init__(self, held: Held, network: Network) -> None:
        super().__init__()
        self.held, self.network = held, network
        held.fronts.append(self)  # torch's C++ holds only half of a store that is written in Python

    timeout = timedelta(seconds=300)  # type: ignore[assignment]
    host, port = "agent", 29500

    def __repr__(self) -> str:
        ours = self.network.sim.is_inside and self.held.process is self.network.sim.here
        return f"SimulatedStore(server={'here' if ours else '<nullptr>'})"

    def clone(self) -> "SimulatedStore":
        return SimulatedStore(self.held, self.network)

    def set_timeout(self, _: timedelta) -> None:
        """It has one."""

    def _ask(self, nbytes: int = 0, num_keys: int = 1) -> dict[str, bytes]:
        """The keys, once the store has heard. Raises: DistNetworkError, where it has ended."""
        sim, held = self.network.sim, self.held
        host, there = sim.here.host, held.process.host
        held.calls, held.nbytes = held.calls + 1, held.nbytes + nbytes
        arrives_s = sim.now + (self.network.delay_s(nbytes) if there != host else 1e-5)
        if held.serve_s[0]:
            arrives_s = max(arrives_s, held.busy_until) + held.serve_s[0] + held.serve_s[1] * num_keys
            held.busy_until = arrives_s
        sim.sleep(arrives_s - sim.now)
        if sim.now < held.silent_until or self.network.are_cut(host, there):
            sim.wait(
                lambda: (
                    not held.process.alive
                    or (sim.now >= held.silent_until and not self.network.are_cut(host, there))
                ),
                sim.now + _HELD_S,
            )
        if not held.process.alive or self.network.are_cut(host, there):
            raise DistNetworkError("Connection was likely closed. Did the remote server shutdown or crash?")
        return held.keys

    def set(self, key: str, value: Any) -> None:
        self._ask(len(key) + len(value))[key] = _bytes(value)
        self.network.sim.look_at(self.held.waiters)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        found = [self.held.keys[key] for key in keys]
        self.held.nbytes += sum(map(len, found))
        return found

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._ask(sum(map(len, (*keys, *values))), len(keys)).update(
            zip(keys, map(_bytes, values), strict=True)
        )
        self.network.sim.look_at(self.held.waiters)

    def add(self, key: str, amount: int) -> int:
        keys = self._ask(len(key))
        keys[key] = str(int(keys.get(key, b"0")) + amount).encode()
        self.network.sim.look_at(self.held.waiters)
        return int(keys[key])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        keys = self._ask(len(key) + len(desired))
        if keys.get(key, b"") == _bytes(expected):
            keys[key] = _bytes(desired)
            self.network.sim.look_at(self.held.waiters)
        return keys.get(key, _bytes(expected))

    def check(self, keys: list[str]) -> bool:
        held = self._ask(sum(map(len, keys)), len(keys))
        return all(key in held for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._ask(len(key)).pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        held, sim = self._ask(sum(map(len, keys)), len(keys)), self.network.sim
        until = sim.now + (timeout or self.timeout).total_seconds()
        if not sim.wait(lambda: all(key in held for key in keys), until, self.held.waiters):
            raise DistStoreError(f"wait timeout, keys: {keys}")

    deleteKey = delete_key


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
