"""Checkpoints under a URL keep the promises of the local ones: never half published, verified on read.

Without servers the URL is ``file://``, through fsspec, and nothing is renamed; `make test-storage` runs the
same tests against one of ``s3://`` and one of ``gs://``.
"""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright import fully_shard, publish, receive
from shardwright.checkpoint import async_save, latest, load, remote, save
from shardwright.checkpoint.format import Manifest, dumps, loads
from shardwright.checkpoint.url import location_of
from shardwright.checkpoint.writer import Writer
from shardwright.cli import main
from shardwright.data.text import read_corpus
from shardwright.errors import CheckpointError, DamagedError, InputError
from shardwright.recipe.config import DataConfig
from tests.buckets import SCHEMES, Bucket, server
from tests.ranks.models import filled
from tests.ranks.pool import run_ranks


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def environment(scheme: str) -> Iterator[Mapping[str, str]]:
    with server(scheme) as found:
        yield found


@pytest.fixture
def bucket(
    scheme: str, environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    place = f"{tmp_path}/bucket" if scheme == "file" else f"bucket/{tmp_path.name}"
    url = f"{scheme}://{place}/run"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Bucket(url, tmp_path / "cache", tmp_path / "log", environment)


build = partial(filled, width=300)


def values(model: nn.Module) -> set[float]:
    return {x for p in model.parameters() for x in torch.unique(p.detach().to_local()).tolist()}


def save_steps(rank: int, world: int, bucket: Bucket, steps: tuple[int, ...]) -> None:
    bucket.watch()
    for step in steps:
        model = fully_shard(build(float(step)))
        optimizer = torch.optim.AdamW(model.parameters())
        folder = save(bucket.url, model=model, optimizer=optimizer, step=step, keep=2)
        assert str(folder) == bucket.path(f"step-{step:06d}")


def load_latest(rank: int, world: int, bucket: Bucket) -> tuple[str, int, tuple[str, ...], set[float]]:
    bucket.watch()
    model = fully_shard(build(-1.0))
    assert str(latest(bucket.url)) == str(load(bucket.url, model=model).path)
    restored = load(bucket.url, model=model)
    return str(restored.path), restored.step, restored.skipped, values(model)


def shards(bucket: Bucket, step: int) -> list[str]:
    folder = bucket.path(f"step-{step:06d}")
    manifest = loads(bucket.fs.cat_file(f"{folder}/manifest.json").decode(), folder)
    return [f"step-{step:06d}/{name}" for name in sorted(manifest.files)]


def test_the_manifest_is_put_when_all_files_are_and_nothing_is_renamed(bucket):
    run_ranks(2, save_steps, bucket, (1,))
    requests, files = bucket.requests(), shards(bucket, 1)
    assert sorted(requests[:2]) == [f"upload {file}" for file in files]
    assert requests[2:] == ["put_new step-000001/manifest.json", "put latest"]
    assert bucket.names() == sorted(["latest", "step-000001/manifest.json", *files])
    assert bucket.fs.cat_file(bucket.path("latest")) == b"step-000001\n"

    run_ranks(2, save_steps, bucket, (2, 3))
    assert {name.split("/")[0] for name in bucket.names()} == {"latest", "step-000002", "step-000003"}
    lines = [line for line in bucket.requests() if line.startswith("remove step-000001")]
    removed = [line.rpartition("/")[2][:8] for line in lines]
    assert removed == ["manifest", "shard-00", "shard-00"]  # what is to go is no checkpoint from the first on


def test_a_load_takes_the_copies_of_the_last_save_and_fetches_what_another_host_needs_once(bucket):
    run_ranks(2, save_steps, bucket, (1, 2))
    assert sorted(bucket.copies()) == shards(bucket, 2)  # not those of step 1
    bucket.requests()
    expected = (bucket.path("step-000002"), 2, (), {2.0})
    assert run_ranks(2, load_latest, bucket) == [expected] * 2
    assert bucket.requests() == []
    bucket.forget_copies()
    assert run_ranks(3, load_latest, bucket) == [expected] * 3
    assert sorted(bucket.requests()) == [f"download {file}" for file in shards(bucket, 2)]


def load_damaged(rank: int, world: int, bucket: Bucket) -> str:
    bucket.watch()
    model = fully_shard(build(-1.0))
    with pytest.raises(DamagedError) as caught:
        load(bucket.url, model=model)
    assert values(model) == {-1.0}
    return str(caught.value)


def test_a_damaged_copy_is_fetched_again_and_a_damaged_object_is_an_error_on_all_ranks(bucket):
    run_ranks(2, save_steps, bucket, (1, 2))
    name, copy = sorted(bucket.copies().items())[1]
    content = bytearray(copy.read_bytes())
    content[-1] ^= 0xFF
    copy.write_bytes(content)
    bucket.requests()
    assert {found[3] == {2.0} for found in run_ranks(2, load_latest, bucket)} == {True}
    assert sorted(bucket.requests()) == [f"download {file}" for file in shards(bucket, 2)]

    bucket.flip(name, len(content) - 1)
    for said in run_ranks(2, load_damaged, bucket):
        assert f"{Path(name).name}: " in said
        assert "is damaged" in said
        assert "older complete checkpoints: step-000001" in said


KILLS = {  # before which request of which rank the process is killed, and what the next one finds
    "upload": (1, "upload step-000002", 1),
    "manifest": (0, "put_new step-000002/manifest", 1),
    "latest": (0, "put latest", 2),
}


def save_and_be_killed(rank: int, world: int, bucket: Bucket, killed: int, at: str) -> None:
    bucket.enter()
    if rank == killed:
        bucket.before_each_request(lambda line: line.startswith(at) and os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CheckpointError, match="lost contact"):
        async_save(bucket.url, model=fully_shard(build(2.0)), step=2).wait()


def load_and_save(rank: int, world: int, bucket: Bucket) -> tuple[int, tuple[str, ...], set[float]]:
    remote.LOST_S = 1.0
    bucket.enter()
    model = fully_shard(build(-1.0))
    restored = load(bucket.url, model=model)
    found = restored.step, restored.skipped, values(model)
    async_save(bucket.url, model=model, step=restored.step + 1).wait()
    return found


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_while_a_save_is_uploaded_leaves_the_last_whole_one(bucket, moment):
    killed, at, step = KILLS[moment]
    run_ranks(2, save_steps, bucket, (1,))
    with pytest.raises(AssertionError, match=f"rank {killed} of 2 failed.*died without a report"):
        run_ranks(2, save_and_be_killed, bucket, killed, at)
    left = [name for name in bucket.names() if name.startswith("step-000002")]
    if killed == 0:  # else rank 0 has removed what was uploaded
        assert len([name for name in left if "shard-" in name]) == 2
    found = (step, (), {float(step)})  # what isn't published isn't even passed over
    assert run_ranks(2, load_and_save, bucket) == [found] * 2
    now = bucket.names()
    assert now == sorted({*now, *shards(bucket, 1), *shards(bucket, step + 1)})
    if step == 1:  # what the killed one has left is gone
        assert not set(left) & set(now)
    assert ".lock" not in now
    assert not list(bucket.cache.rglob(".torn*"))


def test_who_saves_holds_a_lock_that_a_killed_one_loses_and_a_late_one_publishes_nothing(bucket, monkeypatch):
    if bucket.url.startswith("gs:"):
        pytest.skip("the emulator replaces an object that gcsfs asks it to put only where there is none")
    monkeypatch.setattr(remote, "BEAT_S", 0.1)
    monkeypatch.setattr(remote, "LOST_S", 1.5)
    monkeypatch.setattr(remote, "_LOOK_S", 0.05)
    root = location_of(bucket.url)
    first = Writer(root, 1)
    with pytest.raises(CheckpointError, match=rf"another process is saving here \(pid {os.getpid()} on "):
        Writer(root, 1)
    # The first one stands still; the second waits for its lock to be nobody's.
    first._lock._closed.set()  # its thread ends, as a stopped process's stands
    second = Writer(root, 1)
    files = {}
    for writer in (first, second):
        file = writer.storage.scratch(writer.attempt) / f"shard-00000{writer.attempt.tag}.safetensors"
        file.write_bytes(b"x")
        writer.storage.send(writer.attempt, file)
        files[writer] = file.name
    assert files[first] != files[second]
    with pytest.raises(CheckpointError, match="another process writes here now"):
        first.publish(manifest_text(files[first]))
    second.publish(manifest_text(files[second]))
    first._lock.check = lambda: None  # even if it had looked just before that
    monkeypatch.setattr(first, "_is_there", lambda: False)
    with pytest.raises(CheckpointError, match="has come to exist; nothing was overwritten"):
        first.publish(manifest_text(files[first]))
    first.close()
    second.close()
    assert shards(bucket, 1) == [f"step-000001/{files[second]}"]
    assert {*shards(bucket, 1), "latest", "step-000001/manifest.json"} <= set(bucket.names())


def manifest_text(file: str) -> str:
    return dumps(Manifest(1, {}, {file: 1}))


def test_the_command_reads_urls_and_writes_folders(bucket, tmp_path, capsys):
    bucket.enter()
    run_ranks(2, save_steps, bucket, (1,))
    assert main(["checkpoint", "verify", bucket.url, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["path"], said["faults"]) == (bucket.path("step-000001"), [])
    assert main(["checkpoint", "consolidate", bucket.url, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert main(["checkpoint", "consolidate", bucket.url, bucket.path("out")]) == 1
    assert "give one, and copy it to the URL from there" in capsys.readouterr().err
    bucket.flip(shards(bucket, 1)[0], -1)
    assert main(["checkpoint", "verify", bucket.url]) == 1
    assert "is damaged" in capsys.readouterr().out
    with pytest.raises(InputError, match="before pathlib took one of its slashes"):
        load(Path(bucket.url), model=build(0.0))


def read_data(rank: int, world: int, bucket: Bucket) -> tuple[int, bytes]:
    bucket.watch()
    corpus = read_corpus(DataConfig(path=bucket.path("text")))
    return corpus.num_files, bytes(corpus.train) + bytes(corpus.heldout)


def test_data_under_a_url_is_downloaded_once_by_one_rank_of_a_host_and_read_by_all(bucket):
    for name in ("a.txt", "below/b.txt"):
        bucket.fs.pipe_file(bucket.path(f"text/{name}"), name.encode() * 50)
    (found, text), other = run_ranks(2, read_data, bucket)
    assert (found, text) == other
    assert found == 2 and b"below/b.txt" * 50 in text
    assert len([line for line in bucket.requests() if line.startswith("download ")]) == 2


def save_and_resume_in_memory(rank: int, world: int) -> int:
    url = "memory://bucket/run"
    model = fully_shard(build(3.0))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    save(url, model=model, optimizer=optimizer, step=7)
    expected = [p.detach().to_local().clone() for p in model.parameters()]
    again = fully_shard(build(-1.0))
    other = torch.optim.AdamW(again.parameters())
    restored = load(url, model=again, optimizer=other)
    assert all(torch.equal(p.to_local(), q) for p, q in zip(again.parameters(), expected, strict=True))
    moments = [other.state[p]["exp_avg"].to_local() for p in again.parameters()]
    wanted = [optimizer.state[p]["exp_avg"].to_local() for p in model.parameters()]
    assert all(map(torch.equal, moments, wanted))
    return restored.step


def test_one_rank_saves_to_memory_and_resumes_from_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run_ranks(1, save_and_resume_in_memory) == [7]


def publish_twice(rank: int, world: int, bucket: Bucket) -> tuple[int, set[float]]:
    bucket.watch()
    model = fully_shard(build(1.0))
    with publish(model, bucket.url, keep=1) as publisher:
        publisher.send()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        publisher.send()
        publisher.wait()
        with receive(bucket.url) as receiver:
            version = receiver.wait(2)
            return version, {x for _, tensor in receiver for x in torch.unique(tensor).tolist()}


def test_weights_that_are_published_to_a_bucket_are_received_from_it(bucket):
    assert run_ranks(2, publish_twice, bucket) == [(2, {2.0})] * 2
    assert {name.split("/")[0] for name in bucket.names()} == {"latest", "step-000002"}
