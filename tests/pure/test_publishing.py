"""What receivers follow, without ranks: chains of differences, damage, who may call, engines."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shardwright.checkpoint.format import Box, TensorEntry
from shardwright.errors import CommError
from shardwright.publishing import frames
from shardwright.publishing.client import Client
from shardwright.publishing.engines import VllmExtension, update_sglang
from shardwright.publishing.frames import Frame, Refused
from shardwright.publishing.receiver import Receiver
from shardwright.publishing.shards import Layout
from shardwright.publishing.versions import Copies, Message, Versions
from shardwright.transport.cpu.coder import Damaged

NUMEL = 300_000  # more than two chunks of the coder


def weights(version: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of which a few change with each version."""
    whole = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    whole[:: 1000 + version] += version
    return whole.to(dtype)


def copies(*dtypes: str) -> Copies:
    return Copies([(f"w{i}", TensorEntry((NUMEL,), dtype, ()), (NUMEL,)) for i, dtype in enumerate(dtypes)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn])
def test_each_way_to_a_version_gives_its_bits(dtype):
    sender, name = Versions(), {2: "BF16", 4: "F32", 8: "I64", 1: "F8_E4M3"}[dtype.itemsize]
    follows, late = copies(name), copies(name)
    for version in (1, 2, 3, 5):
        sender.take(version, [weights(version, dtype)], wanted=version > 1)
        if version == 1:
            assert sender.next_for(0, 0) is None
            sender.make_full()
        message = sender.next_for(follows.number, 0)
        assert message is not None and message.base == follows.number and message.version == version
        follows.apply(message)
        if version > 1:
            assert message.nbytes < NUMEL * dtype.itemsize / 5
    sender.make_full()
    late.apply(sender.next_for(0, 0))
    for each in (follows, late):
        (words,) = each.words()
        assert torch.equal(torch.from_numpy(words), weights(5, dtype).view(torch.uint8))


def test_what_is_kept_of_changes_is_a_quarter_of_a_version_at_most():
    sender = Versions()
    for version in range(1, 30):
        sender.take(version, [torch.randn(1000)], wanted=version > 1)
    assert [*sender.messages] == [28]
    assert sender.nbytes < 2.1 * 4000


@pytest.mark.parametrize("at", [5, 13, 17, 23, 60, -1])
def test_a_damaged_message_is_named_and_what_was_held_counts_no_more(at):
    sender, receiver = Versions(), copies("BF16")
    for version in (1, 2):
        sender.take(version, [weights(version)], wanted=version > 1)
        if version == 1:
            sender.make_full()
            receiver.apply(sender.full)
    message = sender.next_for(1, 0)
    piece = bytearray(message.pieces[0])
    piece[at] ^= 0x10
    with pytest.raises(Damaged, match=r"^w0 of version 2 is damaged"):
        receiver.apply(message._replace(pieces=[bytes(piece)]))
    assert receiver.number == 0
    with pytest.raises(Damaged, match=r"version 2 is one of changes since 1, of 0 here"):
        receiver.apply(message)


class Rank:
    """One that has some versions, and gets others when it is asked for them."""

    where = "a rank"

    def __init__(self, *numbers: int, later: tuple[int, ...] = ()) -> None:
        self.versions, self.later = Versions(), list(later)
        for number in numbers:
            self.take(number)

    def take(self, number: int) -> None:
        self.versions.take(number, [weights(number)], wanted=self.versions.number > 0)

    def ask(self, have, until, wait_s, names):
        while self.later and max(until, 1) > self.versions.number:
            self.take(self.later.pop(0))
        if self.versions.number <= have:
            return None, have
        if (message := self.versions.next_for(have, until)) is None:
            self.versions.make_full()
            message = self.versions.full
        return message, self.versions.number


def client_of(*ranks: Rank) -> Client:
    client = Client.__new__(Client)
    entry = TensorEntry((NUMEL * len(ranks),), "BF16", ())
    held = [[("w", Box((NUMEL * i,), (NUMEL,)))] for i in range(len(ranks))]
    client._layout, client._ranks, client.version = Layout({"w": entry}, held), [*ranks], 0
    client._names = [["w"]] * len(ranks)
    client._copies = [Copies([("w", entry, (NUMEL,))]) for _ in ranks]
    client._pool = ThreadPoolExecutor(len(ranks))
    return client


@pytest.mark.parametrize(
    ("ranks", "version"),
    [
        ([Rank(1), Rank(1)], 1),
        ([Rank(1, 2), Rank(1, later=(2,))], 2),
        ([Rank(1, 3), Rank(1, 2, 3)], 3),
        ([Rank(1, 2, 4), Rank(2, 3, later=(5,)), Rank(1, later=(2, 3, 5))], None),
    ],
)
def test_ranks_at_different_versions_meet_at_one(ranks, version):
    client = client_of(*ranks)
    if version is None:  # the first one never has what the others have
        with pytest.raises(CommError, match=r"a rank has no version 5, which other ranks have sent"):
            client.advance(0.0)
        assert client.version == 0
        return
    assert client.advance(0.0) and client.version == version
    ((name, _, whole),) = client.tensors()
    assert name == "w" and torch.equal(whole, torch.cat([weights(version)] * len(ranks)))
    assert not client.advance(0.0)


@pytest.mark.parametrize(("theirs", "lets_in"), [(b"a secret", True), (b"another", False), (b"", False)])
def test_both_ends_show_that_they_know_the_secret(theirs, lets_in):
    ours, other = socket.socketpair()
    refused = []

    def rank() -> None:
        with ours:
            try:
                frames.admit(ours, b"a secret")
            except Refused as error:
                refused.append(str(error))

    thread = threading.Thread(target=rank)
    thread.start()
    with other:
        if lets_in:
            frames.enter(other, theirs)
        else:
            with pytest.raises(Refused, match="another SHARDWRIGHT_SECRET"):
                frames.enter(other, theirs)
    thread.join(5)
    assert refused == ([] if lets_in else ["it doesn't know the secret"])


@pytest.mark.parametrize("at", range(0, 41, 4))
def test_each_byte_of_a_frames_head_counts(at):
    ours, other = socket.socketpair()
    with ours, other:
        frames.send(ours, Frame(frames.VERSION, 7, 6, 9))
        head = bytearray(other.recv(1000))
        assert len(head) == 41
        head[min(at, 40)] ^= 1
        ours.sendall(head)
        with pytest.raises(Refused, match="damaged on its way"):
            frames.receive(other)


# ---- what engines are called with, as their documentation says it


class Given:
    """One version for a receiver."""

    version = 3

    def advance(self, wait_s):
        return False

    def entries(self):
        return {f"w{i}": TensorEntry((4,), "F32", (), (f"tied{i}",) if i == 2 else ()) for i in range(3)}

    def tensors(self):
        for i, (name, entry) in enumerate(self.entries().items()):
            yield name, entry, torch.full((4,), float(i))

    def close(self):
        pass


class SGLang:
    """sglang.Engine up to 0.5.20: named_tensors: List[Tuple[str, torch.Tensor]], load_format: Optional[str] =
    None, flush_cache: bool = True; returns (success, message)."""

    answer: Any = (True, "")

    def __init__(self):
        self.calls = []

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        self.calls.append(([name for name, _ in named_tensors], load_format, flush_cache))
        return self.answer


class SGLangWithSessions(SGLang):
    """From 0.5.21 on: what isn't within a session is refused, and so is a second session."""

    is_open = False

    def begin_weight_update(self, selector="all"):
        was_open, self.is_open = self.is_open, True
        return not was_open, "a session is open"

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        answer = super().update_weights_from_tensor(named_tensors, load_format, flush_cache)
        return answer if self.is_open else (False, "no session")

    def end_weight_update(self):
        was_open, self.is_open = self.is_open, False
        return was_open, "no session"


@pytest.mark.parametrize("kind", [SGLang, SGLangWithSessions])
def test_sglang_gets_named_tensors_in_buckets_and_drops_its_cache_with_the_last(kind):
    engine = kind()
    assert update_sglang(engine, Receiver("here", Given(), 1.0), bucket_nbytes=32) == 3
    assert engine.calls == [(["w0", "w1"], None, False), (["w2", "tied2"], None, True)]
    for engine.answer in ((False, "no room"), {"success": False, "message": "no room"}):
        with pytest.raises(CommError, match="SGLang has refused version 3: no room"):
            update_sglang(engine, Receiver("here", Given(), 1.0))
    engine.answer = {"success": True}
    assert update_sglang(engine, Receiver("here", Given(), 1.0)) == 3


class Vllm:
    """GPUModelRunner of vLLM. Its model has load_weights(weights: Iterable[tuple[str, Tensor]])."""

    def __init__(self):
        self.model, self.loaded = self, {}

    def load_weights(self, weights):
        self.loaded.update(weights)
        return set(self.loaded)


class VllmThatReloadsFiles(Vllm):
    def reload_weights(self):
        raise AssertionError("it loads the files again")


class VllmThatReloads(Vllm):
    """Of 0.32. What kernels have made of weights takes none."""

    def load_weights(self, weights):
        raise AttributeError("'Parameter' object has no attribute 'weight_loader'")

    def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True):
        super().load_weights(weights_iterator)


@pytest.mark.parametrize("kind", [Vllm, VllmThatReloadsFiles, VllmThatReloads])
def test_each_worker_of_vllm_loads_an_iterable_of_names_and_tensors(kind, monkeypatch):
    made = []

    def receive(address, timeout):
        made.append(Receiver(address, Given(), timeout))
        return made[-1]

    class Worker(VllmExtension):  # vllm makes such a class of the worker and of the extension
        model_runner = kind()

    monkeypatch.setattr("shardwright.publishing.engines.receive", receive)
    worker, loaded = Worker(), Worker.model_runner.loaded
    assert [worker.update_weights_from("here") for _ in range(2)] == [3, 3]
    numbers = {name: tensor[0].item() for name, tensor in loaded.items()}
    assert len(made) == 1 and numbers == {"w0": 0.0, "w1": 1.0, "w2": 2.0, "tied2": 2.0}
    monkeypatch.setattr(kind, "load_weights", None)
    monkeypatch.setattr(kind, "reload_weights", None, raising=False)
    with pytest.raises(TypeError):
        worker.update_weights_from("here")
    monkeypatch.undo()
    monkeypatch.setattr("shardwright.publishing.engines.receive", receive)
    assert worker.update_weights_from("here") == 3 and len(made) == 2  # what broke off isn't gone on with


def test_a_message_counts_its_bytes():
    assert Message(2, 1, [b"123", b"45"]).nbytes == 5
