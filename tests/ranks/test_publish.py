"""Receivers of published weights have the bits of ``full_state_dict``, whatever shards the model."""

import contextlib
import copy
import errno
import json
import os
import re
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright
from examples import experts
from shardwright import checkpoint, full_state_dict, fully_shard, publish, quantize_, receive
from shardwright.checkpoint import tools
from shardwright.errors import CheckpointError, CommError, InputError, StageError
from shardwright.lora import Lora, add_lora, merge_lora
from shardwright.publishing import folders, frames, versions
from shardwright.publishing.publisher import host_and_port
from shardwright.transport import secret
from tests.ranks.models import Run, batches, build, loss_of, sharded, squared
from tests.ranks.pool import on_ranks, run_ranks, run_ranks_but
from tests.ranks.test_surface_layouts import build_feed
from tests.ranks.wrapped import nested

TCP = "tcp://127.0.0.1:0"


def adapted(codec: str | None = None, dora: bool = False) -> nn.Module:
    """Two layers with adapters that aren't zeros, on a base in float32 or quantised."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(70, 37), nn.Tanh(), nn.Linear(37, 70))
    if codec:
        quantize_(model, codec)
    add_lora(model, Lora(("0", "2"), rank=3, alpha=6, dora=dora))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.lora_B.weight.copy_(torch.randn(layer.lora_B.weight.shape) * 0.1)
    return model


def with_tensor_parallelism() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build_feed(0)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def with_experts() -> nn.Module:
    return experts.by_fully_shard(experts.Model(width=8, num=4), shardwright.mesh(ep=2))


CASES: dict[str, tuple[int, Callable[[], nn.Module], Callable]] = {
    "two": (2, lambda: sharded(build()), loss_of),
    "three": (3, lambda: sharded(build()), loss_of),
    "tied": (2, lambda: sharded(build(tied=True)), loss_of),
    "hybrid": (4, lambda: sharded(build(), mesh=init_device_mesh("cpu", (2, 2))), loss_of),
    "tensor parallel": (4, with_tensor_parallelism, lambda model, _: squared(model, torch.ones(3, 6))),
    "experts": (4, with_experts, lambda model, batch: experts.loss_of(model, batch.long() % 256)),
    "wrapper": (2, lambda: nested(build(), use_orig_params=True), loss_of),
    "flat wrapper": (2, lambda: nested(build()), loss_of),
    "lora": (2, lambda: sharded(adapted()), lambda model, _: squared(model, torch.ones(3, 70))),
    "qlora": (3, lambda: sharded(adapted("nf4")), lambda model, _: squared(model, torch.ones(3, 70))),
}


def received(receiver: shardwright.Receiver, version: int) -> dict[str, torch.Tensor]:
    assert receiver.wait(version) == version == receiver.version
    return dict(receiver)


def assert_bits(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Scales of quantised weights keep their dtype."""
    kept = ("scales", "absmax")
    return {n: t.to(dtype) if t.is_floating_point() and not n.endswith(kept) else t for n, t in state.items()}


def same_bits(rank, world, case):
    torch.manual_seed(3)
    _, make, loss = CASES[case]
    model = make()
    run = Run.of(model)
    publisher = publish(model, TCP, dtype=torch.bfloat16)
    receiver = receive(publisher.address) if rank == 0 else None
    for step in range(3):
        loss(model, batches(step, world)[rank]).backward()
        run.step()
        version = publisher.send()
        whole = full_state_dict(model)
        if receiver is not None:
            assert_bits(received(receiver, version), cast(whole, torch.bfloat16))
    if receiver is not None:
        receiver.close()
    publisher.close()


@pytest.mark.each_case
@pytest.mark.parametrize("case", CASES)
def test_receivers_have_the_bits_of_the_whole_model(case):
    run_ranks(CASES[case][0], same_bits, case)


@on_ranks(2)
@pytest.mark.each_case
@pytest.mark.parametrize("codec", [None, "nf4"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_leave_alone_or_merged_and_decoded(rank, codec, dora):
    model, whole = sharded(adapted(codec, dora)), adapted(codec, dora)
    alone, whole_model = publish(model, TCP, names="adapters"), publish(model, TCP, names="merged")
    for publisher in (alone, whole_model):
        receiver = receive(publisher.address) if rank == 0 else None
        assert publisher.send() == 1
        if receiver is not None:
            got = received(receiver, 1)
            if publisher is alone:
                assert_bits(got, {n: p.detach() for n, p in whole.named_parameters() if "lora_" in n})
                assert receiver.load_into(adapted(codec, dora)) == 1
            else:
                plain = nn.Sequential(nn.Linear(70, 37), nn.Tanh(), nn.Linear(37, 70))
                assert receiver.load_into(plain) == 1
                x = torch.randn(4, 70)
                torch.testing.assert_close(plain(x), whole(x), rtol=1e-5, atol=1e-5)
                if not codec:
                    merge_lora(whole)
                    torch.testing.assert_close(got, dict(whole.state_dict()), rtol=1e-6, atol=1e-7)
            receiver.close()
        publisher.close()


@on_ranks(2)
def test_names_choose_rename_and_leave_out(rank, tmp_path):
    model = sharded(build())
    names = {"head.weight": "lm_head.weight", "norm.bias": "norm.bias"}
    with publish(model, tmp_path / "weights", names=names.get) as publisher:
        publisher.send()
    if rank == 0:
        assert {n: tuple(t.shape) for n, t in receive(tmp_path / "weights")} == {
            "lm_head.weight": (17, 13),
            "norm.bias": (13,),
        }


# ---- receivers in processes of their own


def tell(folder: str, name: str, text: object = "") -> None:
    place = Path(folder, name)
    place.with_suffix(".torn").write_text(str(text))
    os.replace(place.with_suffix(".torn"), place)


def hear(folder: str, name: str) -> str:
    deadline = time.monotonic() + 30
    while not Path(folder, name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.005)
    return Path(folder, name).read_text()


def trainer(rank: int, folder: str, to: str = TCP) -> tuple[nn.Module, Run, shardwright.Publisher]:
    """One of two, beside other processes."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = sharded(build())
    publisher = publish(model, to)
    if rank == 0:
        tell(folder, "address", publisher.address)
    return model, Run.of(model), publisher


def step(model: nn.Module, run: Run, number: int, rank: int) -> None:
    loss_of(model, batches(number, 2)[rank]).backward()
    run.step()


def late_joins(rank, world, folder):
    if rank < 2:
        model, run, publisher = trainer(rank, folder)
        for number in range(9):
            step(model, run, number, rank)
            publisher.send()
            publisher.wait()
            if number == 1:
                hear(folder, "first")
            if number == 2:
                hear(folder, "second")
            state = full_state_dict(model)
            if rank == 0:
                torch.save(state, f"{folder}/state{number + 1}")
        tell(folder, f"done{rank}")
        hear(folder, "received")
        publisher.close()
        return
    seen = list[tuple[int, int]]()
    apply = versions.Copies.apply
    versions.Copies.apply = lambda self, m: (seen.append((m.base, m.version)), apply(self, m))
    receiver = receive(hear(folder, "address"))
    assert receiver.wait(2) == 2
    tell(folder, "first")
    assert receiver.wait(3) == 3
    tell(folder, "second")
    assert seen[-1] == (2, 3)  # what has changed
    for other in range(2):
        hear(folder, f"done{other}")
    assert receiver.wait(9) == 9
    assert seen[-1] == (0, 9)  # what came between isn't kept: it takes the whole
    late = receive(hear(folder, "address"))
    for each in (receiver, late):
        assert_bits(received(each, 9), torch.load(f"{folder}/state9"))
        each.close()
    tell(folder, "received")


def test_who_comes_late_or_has_missed_versions_gets_the_whole_one(tmp_path):
    run_ranks(3, late_joins, str(tmp_path), grouped=False)


def trains_on(rank, world, folder, signal_number):
    if rank == 2:
        receiver = receive(hear(folder, "address"))
        receiver.wait(1)
        tell(folder, "pid", os.getpid())
        while True:
            receiver.wait()
    model, run, publisher = trainer(rank, folder)
    publisher.send()
    pid = int(hear(folder, "pid"))
    began = time.monotonic()
    with warnings.catch_warnings(record=True, action="always") as caught:
        dist.barrier()
        if rank == 0:
            os.kill(pid, signal_number)
        for number in range(8):
            step(model, run, number, rank)
            assert publisher.send() == number + 2
        assert time.monotonic() - began < 5
        with receive(hear(folder, "address")) as other:
            assert_shards(other, model)
    gone = [each for each in caught if re.match(r"the receiver at \S+ has gone", str(each.message))]
    assert len(gone) == (signal_number == signal.SIGKILL)
    dist.barrier()
    publisher.close(timeout=0.5)
    if rank == 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def assert_shards(receiver: shardwright.Receiver, model: nn.Module) -> None:
    got, found = dict(receiver), full_state_dict(model)
    for name, tensor in found.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.each_case
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_or_stands_still_stops_nobody(number, tmp_path):
    run_ranks_but(2, 3, trains_on, str(tmp_path), number, grouped=False)


def loses_a_trainer(rank, world, folder, number):
    if rank < 2:
        _, _, publisher = trainer(rank, folder)
        publisher.send()
        hear(folder, "first")
        if rank == 1:
            tell(folder, "pid", os.getpid())
            os.kill(os.getpid(), number)
        hear(folder, "told")
        return
    receiver = receive(hear(folder, "address"))
    receiver.wait(1)
    tell(folder, "first")
    began = time.monotonic()
    with pytest.raises(CommError, match=r"rank 1 at \S+ of the publisher: .*call receive\(\) again"):
        receiver.wait()
    assert time.monotonic() - began < (5 if number == signal.SIGKILL else 15)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(hear(folder, "pid")), signal.SIGKILL)
    tell(folder, "told")


@pytest.mark.each_case
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_dies_or_says_nothing_is_named_to_receivers(number, tmp_path):
    """One that is stopped is as one whose host is dark: its connections stand, and nothing comes."""
    run_ranks_but(1, 3, loses_a_trainer, str(tmp_path), number, grouped=False)


# ---- what may go wrong


@on_ranks(2)
def test_training_goes_on_during_a_send_and_what_is_sent_is_what_was_there(rank, monkeypatch):
    model = sharded(build())
    run, publisher = Run.of(model), publish(model, TCP)
    receiver = receive(publisher.address)
    publisher.send()
    receiver.wait()
    take, trained = versions.Versions.take, False

    def slowly(self, *arguments):
        while not trained:
            time.sleep(0.01)
        take(self, *arguments)

    monkeypatch.setattr(versions.Versions, "take", slowly)
    step(model, run, 0, rank)
    sent = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    publisher.send()
    for number in range(1, 4):
        step(model, run, number, rank)
    trained = True
    got = received(receiver, 2)
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
    assert not torch.equal(got["head.weight"], model.head.weight.full_tensor())
    receiver.close()
    publisher.close()


def change(model: nn.Module) -> None:
    """As a step of an optimizer does, and the same on any machine."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.to_local().mul_(1 + 0.001 * number).add_(0.01)


@on_ranks(2)
def test_a_byte_that_flips_on_its_way_is_named_and_nothing_of_it_is_used(rank, monkeypatch):
    model = sharded(build())
    with publish(model, TCP) as publisher:
        receiver = receive(publisher.address) if rank == 0 else None
        publisher.send()
        if receiver is not None:
            before = received(receiver, 1)
        dist.barrier()
        change(model)
        publisher.send()
        if receiver is not None:
            read = frames.read

            def flipped(sock, nbytes):
                data = read(sock, nbytes)
                if nbytes > 300:
                    data[200] ^= 4
                return data

            with monkeypatch.context() as patched:
                patched.setattr(frames, "read", flipped)
                says = r"rank \d at .*weight at \[\d+, 0\] of version 2: \d+ bytes are damaged on their way"
                with pytest.raises(CommError, match=says):
                    receiver.wait()
            assert receiver.version == 1
            assert_bits({n: t for n, _, t in receiver._source.tensors()}, before)
            receiver.close()
        dist.barrier()


@on_ranks(2)
def test_strangers_without_the_secret_get_no_weights_and_bring_none(rank, monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "0123456789abcdef")
    model = sharded(build())
    with publish(model, TCP) as publisher:
        publisher.send()
        for other in ("another-secret-of-16", ""):
            monkeypatch.setenv(secret.VARIABLE, other)
            with pytest.raises(CommError, match=r"has another SHARDWRIGHT_SECRET, or none"):
                receive(publisher.address)
        with socket.create_connection(host_and_port(publisher.address)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            stranger.settimeout(5)
            said = b""
            with contextlib.suppress(ConnectionError):
                while got := stranger.recv(1000):
                    said += got
            assert len(said) <= 32
        monkeypatch.setenv(secret.VARIABLE, "0123456789abcdef")
        with receive(publisher.address) as receiver:
            assert receiver.wait() == 1
        dist.barrier()


@on_ranks(2)
def test_a_folder_has_whole_versions_that_others_read_and_the_newest_of_them(rank, tmp_path):
    model, folder = sharded(build(tied=True)), tmp_path / "weights"
    whole = full_state_dict(model)
    for first in (1, 4):  # the second publisher counts on
        with publish(model, folder, keep=2) as publisher:
            for version in range(first, first + 3):
                assert publisher.send() == version
    if rank == 0:
        assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["step-000005", "step-000006"]
        newest = folder / "step-000006"
        index = json.loads((newest / "model.safetensors.index.json").read_text())
        files = {file: load_file(newest / file) for file in {*index["weight_map"].values()}}
        assert len(files) > 1
        read = {name: files[file][name] for name, file in index["weight_map"].items()}
        assert_bits({**read, "head.weight": read["embedding.weight"]}, whole)
        assert not tools.verify(newest).faults
        assert_bits(received(receive(folder), 6), whole)
    loaded = sharded(build(seed=1, tied=True))
    dist.barrier()
    checkpoint.load(folder, model=loaded)
    assert_bits(full_state_dict(loaded), whole)


@on_ranks(2)
def test_a_flipped_byte_of_a_folder_is_named(rank, tmp_path):
    with publish(sharded(build()), tmp_path / "weights") as publisher:
        publisher.send()
    if rank == 0:
        (file, *_) = sorted((tmp_path / "weights" / "step-000001").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{file.name}: model/\S+ is damaged"):
            dict(receive(tmp_path / "weights"))


@on_ranks(2)
def test_a_rank_that_cannot_write_ends_the_publisher_on_all_and_leaves_nothing(rank, tmp_path, monkeypatch):
    def full(*_):
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*_)

    write = folders.write_whole
    model = sharded(build())
    publisher = publish(model, tmp_path / "weights")
    publisher.send()
    publisher.wait()
    monkeypatch.setattr(folders, "write_whole", full)
    publisher.send()
    with pytest.raises(CommError, match=r"(?s)rank \d couldn't hand over.*rank 1: .*No space left"):
        publisher.wait()
    with pytest.raises(CommError, match="No space left"):
        publisher.send()
    with pytest.raises(CommError, match="No space left"):
        publisher.close()
    with pytest.raises(StageError, match="closed"):
        publisher.send()
    dist.barrier()
    assert [p.name for p in (tmp_path / "weights").iterdir() if p.is_dir()] == ["step-000001"]


@on_ranks(2)
@pytest.mark.parametrize("scheme", ["shm", "file"])
def test_shared_memory_and_urls_are_folders_and_memory_ends_with_the_publisher(rank, tmp_path, scheme):
    name = f"shm://test-{tmp_path.name}" if scheme == "shm" else f"file://{tmp_path}/weights"
    model = sharded(build())
    publisher = publish(model, name, keep=1)
    for _ in range(2):
        publisher.send()
    whole = full_state_dict(model)
    if rank == 0:
        assert_bits(received(receive(name), 2), whole)
    dist.barrier()
    publisher.close()
    assert scheme != "shm" or rank or not folders.location_at(name).exists()


@on_ranks(2)
def test_a_function_is_called_with_each_ranks_pieces_and_what_it_raises_comes_back(rank):
    seen, fails = [], False

    def take(version, pieces):
        if fails:
            raise RuntimeError("no room")
        seen.append((version, [(name, offset, tensor.clone()) for name, offset, tensor in pieces]))

    model = sharded(build())
    publisher = publish(model, take)
    assert publisher.send() == publisher.wait() == 1
    ((version, pieces),) = seen
    assert version == 1
    assert sum(t.nbytes for _, _, t in pieces) < 0.6 * sum(p.numel() * 4 for p in model.parameters())
    own = {name: p.to_local() for name, p in model.named_parameters()}
    assert all(torch.equal(own[name], t) for name, _, t in pieces if name in own)
    fails = True
    publisher.send()
    with pytest.raises(CommError, match=rf"rank {rank} couldn't hand over a version to .*take: no room"):
        publisher.wait()


@on_ranks(2)
def test_bad_input_is_refused_before_anything_is_sent(rank, tmp_path):
    model = sharded(build())
    bad = [
        ({"to": 3}, "to is 3, expected"),
        ({"to": "tcp://nowhere"}, "expected tcp://HOST:PORT"),
        ({"to": "shm://a/b"}, "without a slash"),
        ({"to": tmp_path, "dtype": torch.int8}, "expected a floating-point"),
        ({"to": tmp_path, "names": "all"}, "expected None, "),
        ({"to": tmp_path, "names": "adapters"}, "call add_lora"),
        ({"to": tmp_path, "names": lambda name: "x"}, "to two tensors"),
        ({"to": tmp_path, "names": lambda name: None}, "no tensor is left"),
        ({"to": tmp_path, "names": lambda name: name if rank else None}, "rank 1 publishes other names"),
        ({"to": tmp_path, "keep": 0}, "keep is 0"),
    ]
    for given, says in bad:
        with pytest.raises(InputError, match=says):
            publish(model, **given)
    with pytest.raises(InputError, match="call fully_shard on it first"):
        publish(build(), tmp_path)
    with pytest.raises(CheckpointError, match=r"rank 0: can't listen at tcp://192.0.2.1:1"):
        publish(model, "tcp://192.0.2.1:1")
    with publish(model, TCP) as publisher:
        with receive(publisher.address) as receiver:
            publisher.send()
            receiver.wait()
            other = build(num_blocks=1)
            before = {n: t.clone() for n, t in other.state_dict().items()}
            with pytest.raises(InputError, match=r"has blocks.1.*no such tensor"):
                receiver.load_into(other)
            assert_bits(dict(other.state_dict()), before)
            with pytest.raises(CommError, match=r"no version 2 in 0.1 s, the newest is 1"):
                receiver.wait(timeout=0.1)
        dist.barrier()
    model.register_buffer("late", torch.ones(1))
    publisher = publish(model, TCP)
    del model.late
    with pytest.raises(InputError, match="late isn't in the model any more"):
        publisher.send()
    assert publisher.version == 0
    publisher.close()


@on_ranks(2)
def test_staging_is_this_ranks_shards_once_and_explain_says_so(rank):
    model = sharded(build())
    with publish(model, TCP) as publisher:
        receiver = receive(publisher.address)
        for version in range(1, 4):
            publisher.send()
            receiver.wait(version)
            dist.barrier()  # else receivers of this one wait for all ranks to send the next
            change(model)
        assert not shardwright.explain(copy.deepcopy(model)).published
        (says,) = shardwright.explain(model).published
        assert publisher.address in str(shardwright.explain(model))
        total, staged, rest = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+)(?= bytes| for)", says))
        assert total == staged + rest
        everybodys = torch.tensor(staged)
        dist.all_reduce(everybodys)
        assert everybodys == sum(t.nbytes for t in build().state_dict().values())
        # The last version, the newest difference, a whole one for who asks, each with heads of pieces.
        assert rest < 3 * staged + 2 * 64 * len(list(model.parameters()))
        receiver.close()
        dist.barrier()
    assert not shardwright.explain(model).published


@on_ranks(2)
def test_a_publisher_that_ends_gives_its_last_version_and_tells(rank):
    model = sharded(build())
    publisher = publish(model, TCP)
    receiver = receive(publisher.address)
    publisher.send()
    assert receiver.wait() == 1
    dist.barrier()  # both receivers have it, so that nobody waits for the other
    publisher.close()
    assert receiver.wait() == 0
    with pytest.raises(CommError, match=r"can't be reached in 0.2 s"):
        receive(publisher.address, timeout=0.2)
