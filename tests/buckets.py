"""Object stores for tests: servers for ``s3://`` (moto) and ``gs://`` where they are installed (`make
test-storage`), else a folder behind fsspec's ``file://``, which the code treats like any other store, without
rename.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest

from shardwright.checkpoint.url import ObjectStore, RemotePath

REQUESTS = ("put", "put_new", "upload", "download", "copy", "remove")


@dataclass(frozen=True)
class Bucket:
    """A folder of objects, the cache of the host that uses it, and what has to be in a process's environment
    to reach it. ``log`` has the requests of the processes that called ``watch``, in their order."""

    url: str
    cache: Path
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def enter(self) -> None:
        """From here on this process reaches it."""
        os.environ.update(self.environment, XDG_CACHE_HOME=str(self.cache))
        fsspec.config.set_conf_env(fsspec.config.conf)

    def watch(self) -> None:
        """Enter, and log the requests of this process."""
        self.enter()
        self.before_each_request(self._write_down)

    def _write_down(self, line: str) -> None:
        with open(self.log, "a") as log:  # one write: lines of two processes don't mix
            log.write(line + "\n")

    def before_each_request(self, call: Callable[[str], object]) -> None:
        """``call("put latest")``, in this process, before that is put."""

        def wrapped(request):
            def requested(store, *arguments):
                paths = [str(each) for each in arguments if isinstance(each, RemotePath)]
                call(" ".join([request.__name__, *(each.removeprefix(self.url + "/") for each in paths)]))
                return request(store, *arguments)

            return requested

        for name in REQUESTS:
            setattr(ObjectStore, name, wrapped(getattr(ObjectStore, name)))

    def requests(self) -> list[str]:
        """What was logged since the last call, but for the lock's."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if not line.endswith(".lock")]

    @property
    def fs(self):
        return fsspec.url_to_fs(self.url, **({"auto_mkdir": True} if self.url.startswith("file") else {}))[0]

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """All objects in it."""
        self.fs.invalidate_cache()
        base = fsspec.url_to_fs(self.url)[1].rstrip("/") + "/"
        return sorted(name.removeprefix(base) for name in self.fs.find(base[:-1]))

    def flip(self, name: str, at: int) -> None:
        """Replace an object by one of which one byte is another."""
        content = bytearray(self.fs.cat_file(self.path(name)))
        content[at] ^= 0xFF
        self.fs.pipe_file(self.path(name), bytes(content))

    def forget_copies(self) -> None:
        """As if this were another host."""
        shutil.rmtree(self.cache, ignore_errors=True)

    def copies(self) -> dict[str, Path]:
        """The files in the cache, by the names of the objects that they are copies of."""
        files = [file for file in self.cache.rglob("step-*/*/*") if file.name != ".lock"]
        return {f"{file.parts[-3]}/{file.parts[-2]}": file for file in files}


PACKAGES = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator")}
SCHEMES = [name for name, of in PACKAGES.items() if all(map(importlib.util.find_spec, of))] or ["file"]
"""Of the stores that tests have a server for here, or the local one."""


def _server_of(scheme: str, port: int) -> tuple[list[str], Mapping[str, str]]:
    """The command of a server, and what a process's environment needs to reach it."""
    if scheme == "s3":
        return ["moto_server", "-H", "127.0.0.1", "-p", str(port)], {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    return ["gcp-storage-emulator", "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"], {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "FSSPEC_GS_TOKEN": "anon",
        "FSSPEC_GS_PROJECT": "test",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks Google over gRPC what bucket it is
    }


@contextlib.contextmanager
def server(scheme: str) -> Iterator[Mapping[str, str]]:
    """A server for a scheme with the bucket ``bucket``; what a process's environment needs to reach it."""
    if scheme == "file":
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (name, *arguments), environment = _server_of(scheme, port)
    listing = [str(Path(sys.executable).with_name(name)), *arguments]
    process = subprocess.Popen(listing, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, f"{name} did not start"
            time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            fsspec.config.set_conf_env(fsspec.config.conf)  # which fsspec read when it was imported
            fsspec.filesystem(scheme).mkdir("bucket")
            yield environment
    finally:
        process.kill()
        process.wait()
