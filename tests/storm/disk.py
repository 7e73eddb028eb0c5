"""A disk that crashes, fills up and refuses: a real folder, whose operations go through functions that are
put in place of Python's.

Only paths below the folder, and descriptors opened there, are the disk's. Each operation has a number and a
name, and ``before`` is called with it, which may raise: an OSError, or ``Killed``, after which every
operation of that process raises ``Killed``, so that no ``finally`` of it changes anything.

What a power cut leaves: of a file what was there at its last fsync, and of what was written since any
beginning, with zeros behind it or not; of a folder the names of its last fsync, and the first few changes
since.
"""

import builtins
import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple


class Killed(BaseException):
    """The process is dead."""


_KINDS = {"read": "read", "preadv": "read", "flock": "lock", "listdir": "list"} | dict.fromkeys(
    ("fstat", "stat", "lstat"), "stat"
)
"""Operations that change nothing."""


class Op(NamedTuple):
    """One operation: its number, what it does, and the path below the disk's folder."""

    number: int
    kind: str
    path: str


class _File:
    """What a file had at its last fsync. ``live``: what it has, once it has no name any more."""

    def __init__(self, synced: bytes = b"") -> None:
        self.synced, self.live = synced, b""


class _Folder:
    """Its names, those of its last fsync, and the changes since: each removes one name and gives one."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.synced: dict[str, Any] = {}
        self.changes: list[tuple[str, str, Any]] = []

    def change(self, gone: str, new: str = "", node: Any = None) -> None:
        self.changes.append((gone, new, node))
        _apply(self.names, gone, new, node)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.names), []


def _apply(names: dict[str, Any], gone: str, new: str, node: Any) -> None:
    names.pop(gone, None)
    if new:
        names[new] = node


class _Open:
    """A descriptor: whose it is, and what it is of."""

    def __init__(self, fd: int, owner: Any, path: str, node: Any) -> None:
        self.fd, self.owner, self.path, self.node = fd, owner, path, node
        self.is_open, self.is_direct = True, False


class _Raw(io.RawIOBase):
    """What ``open`` gives."""

    def __init__(self, disk: "Disk", file: _Open, writes: bool) -> None:
        self._disk, self._file, self._writes = disk, file, writes

    def fileno(self) -> int:
        return self._file.fd

    def readable(self) -> bool:
        return not self._writes

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._file.fd, offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._file.fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return os.write(self._file.fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._file.is_open:  # that of a killed process is closed
                os.close(self._file.fd)


class _Entry:
    """What ``scandir`` gives: only ``stat`` asks the disk."""

    def __init__(self, found: os.DirEntry[str], folder: str) -> None:
        self._found, self.name, self.path = found, found.name, f"{folder}/{found.name}"
        self.is_dir, self.is_file, self.is_symlink = found.is_dir, found.is_file, found.is_symlink

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)


class _Entries(list[_Entry]):
    """A list as ``scandir`` gives it."""

    def __enter__(self) -> Iterator[_Entry]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        pass

    close = __exit__


def error(number: int, path: str = "") -> OSError:
    """The error of that number."""
    return OSError(number, os.strerror(number), path or None)


class Disk:
    """See the file. owner: names the process that asks.

    before: is called before each operation. room: bytes that it still takes, where it is filling up.
    partial: how likely a write takes less than it is given. direct: whether it takes writes past the cache.
    """

    def __init__(self, root: Path, random: Random, owner: Callable[[], Any] = lambda: None) -> None:
        self.root, self.random, self.owner = str(root), random, owner
        self.before: Callable[[Op], None] = lambda op: None
        self.room: int | None = None
        self.partial, self.direct = 0.0, True
        self.count = 0
        self.dead = set[Any]()
        self._is_off = 0
        self._open: dict[int, _Open] = {}
        self._real: list[tuple[Any, str, Any]] = []
        self._tree = _Folder()
        self.settle()

    def __enter__(self) -> "Disk":
        in_os = "open close read write preadv fsync fstat stat lstat mkdir rmdir unlink remove rename replace"
        places = [(os, name) for name in (*in_os.split(), "scandir", "listdir")]
        places += [(builtins, "open"), (fcntl, "flock"), (fcntl, "fcntl")]
        self._real = [(owner, name, getattr(owner, name)) for owner, name in places]
        for owner, name, real in self._real:
            setattr(owner, name, self._instead(real, getattr(self, f"_do_{name}", None) or self._plain(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, real in self._real:
            setattr(owner, name, real)
        for each in [*self._open.values()]:
            self._forget(each)

    def _instead(self, real: Any, ours: Any) -> Any:
        def function(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            at = None if self._is_off else self._place(path, kwargs.get("dir_fd"))
            if at is None and isinstance(path, int) and not self._is_off and self.owner() in self.dead:
                raise Killed  # its descriptors may be another's by now
            return real(path, *args, **kwargs) if at is None else ours(real, at, path, *args, **kwargs)

        return function

    def _place(self, path: Any, dir_fd: int | None) -> str | _Open | None:
        """Where it is on this disk; None where it isn't."""
        if isinstance(path, int):
            return self._open.get(path)
        if not isinstance(path, str | os.PathLike):
            return None
        name = os.fspath(path)
        if dir_fd is not None:
            return f"{self._open[dir_fd].path}/{name}" if dir_fd in self._open else None
        return name if f"{name}/".startswith(f"{self.root}/") else None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside of it nothing is counted or fails, or is remembered: call ``settle`` after changes."""
        self._is_off += 1
        try:
            yield
        finally:
            self._is_off -= 1

    # ---- what happens to it

    def kill(self, owner: Any) -> None:
        """The process ends: its descriptors are closed, its locks free, and what it has written stays."""
        self.dead.add(owner)
        for each in [each for each in self._open.values() if each.owner == owner]:
            self._forget(each)

    def _forget(self, file: _Open) -> None:
        with self.off():
            os.close(file.fd)
        file.is_open = False
        del self._open[file.fd]

    def opened_by(self, owner: Any) -> list[str]:
        """What the process has open."""
        return [each.path for each in self._open.values() if each.owner == owner]

    def settle(self) -> None:
        """All that is there is safe."""
        with self.off():
            self._tree = self._read(self.root)

    def _read(self, path: str) -> Any:
        if not os.path.isdir(path) or os.path.islink(path):
            return _File(_content(path) if os.path.isfile(path) else b"")
        folder = _Folder()
        folder.names = {name: self._read(f"{path}/{name}") for name in sorted(os.listdir(path))}
        folder.sync()
        return folder

    def crash(self) -> None:
        """A power cut: all processes that have something open end, and what was not synced may be lost."""
        for owner in {each.owner for each in self._open.values()}:
            self.kill(owner)
        manner = self.random.choice(["all", "nothing", "some", "some"])
        with self.off():
            self._capture(self._tree, self.root)
            for name in os.listdir(self.root):
                shutil.rmtree(f"{self.root}/{name}")
            self._leave(self._tree, self.root, manner)
        self.settle()

    def _capture(self, folder: _Folder, path: str) -> None:
        for name, node in folder.names.items():
            if isinstance(node, _Folder):
                self._capture(node, f"{path}/{name}")
            elif os.path.isfile(f"{path}/{name}"):
                node.live = _content(f"{path}/{name}")

    def _leave(self, folder: _Folder, path: str, manner: str) -> None:
        names, number = dict(folder.synced), len(folder.changes)
        for change in folder.changes[: self._some(number, manner)]:
            _apply(names, *change)
        for name, node in names.items():
            if isinstance(node, _Folder):
                os.mkdir(f"{path}/{name}")
                self._leave(node, f"{path}/{name}", manner)
            else:
                with open(f"{path}/{name}", "wb") as file:
                    file.write(self._left_of(node, manner))

    def _left_of(self, file: _File, manner: str) -> bytes:
        if file.live == file.synced:
            return file.live
        at = self._some(len(file.live), manner)
        zeros = bytes(max(0, len(file.live) - at)) if self.random.random() < 0.4 else b""
        return file.live[:at] + (zeros or file.synced[at:])

    def _some(self, number: int, manner: str) -> int:
        some = self.random.randint(0, self.random.choice([number, min(number, 4)]))
        return {"all": number, "nothing": 0}.get(manner, some)

    # ---- what is asked of it

    def _ask(self, kind: str, at: str | _Open) -> str:
        owner, path = self.owner(), at.path if isinstance(at, _Open) else at
        if owner in self.dead:
            raise Killed
        self.count += 1
        try:
            self.before(Op(self.count, kind, path[len(self.root) + 1 :]))
        except Killed:
            self.kill(owner)
        if owner in self.dead:  # it may have been another process' turn meanwhile
            raise Killed
        return path

    def _plain(self, name: str) -> Any:
        def ours(real: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
            self._ask(_KINDS[name], at)
            return real(*args, **kwargs)

        return ours

    def _node(self, path: str) -> Any:
        node: Any = self._tree
        for name in [each for each in path[len(self.root) :].split("/") if each not in ("", ".")]:
            node = node.names[name]
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rstrip("/").rpartition("/")
        return self._node(folder), name

    def _do_open(self, real: Any, at: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if real is not self._real[0][2]:  # not that of ``os``
            return self._do_builtin_open(at, *args, **kwargs)
        writes = args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        self._ask("open to write" if writes else "open", at)
        with self.off():
            is_new = writes and not os.path.lexists(at)
        fd = real(path, *args, **kwargs)
        if is_new:
            folder, name = self._parent(at)
            folder.change("", name, _File())
        self._open[fd] = _Open(fd, self.owner(), at, self._node(at))
        return fd

    def _do_builtin_open(
        self, at: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None
    ) -> Any:
        writes = "r" not in mode
        if not isinstance(at, _Open):
            flags = {"r": os.O_RDONLY, "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}.get(
                mode[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            )
            at = self._open[os.open(at, flags, 0o644)]
        raw = _Raw(self, at, writes)
        if "b" in mode and not buffering:
            return raw
        file = io.BufferedWriter(raw) if writes else io.BufferedReader(raw)
        return file if "b" in mode else io.TextIOWrapper(file, encoding or "utf-8")

    def _do_close(self, real: Any, at: _Open, fd: int) -> None:
        """It is closed, whatever comes of it."""
        if self.owner() in self.dead:
            raise Killed
        self._forget(at)
        self._ask("close", at)

    def _do_write(self, real: Any, at: _Open, fd: int, data: Any) -> int:
        self._ask("write", at)
        view = memoryview(data).cast("B")
        if at.is_direct and len(view) % 512:
            raise error(errno.EINVAL, at.path)
        if len(view) > 1 and self.random.random() < self.partial:
            view = view[: self.random.randrange(1, len(view))]
        if self.room is not None:
            view = view[: self.room]
            self.room -= len(view)
            if not view:
                raise error(errno.ENOSPC, at.path)
        return real(fd, view)

    def _do_fsync(self, real: Any, at: _Open, fd: int) -> None:
        self._ask("fsync", at)
        if isinstance(at.node, _Folder):
            at.node.sync()
        else:
            with self.off():
                at.node.synced = _content(f"/proc/self/fd/{fd}")

    def _do_mkdir(self, real: Any, at: str, path: Any, *args: Any, **kwargs: Any) -> None:
        self._ask("mkdir", at)
        if self.room == 0:
            raise error(errno.ENOSPC, at)
        real(path, *args, **kwargs)
        folder, name = self._parent(at)
        folder.change("", name, _Folder())

    def _do_unlink(self, real: Any, at: str, path: Any, **kwargs: Any) -> None:
        self._ask("unlink", at)
        self._keep_content(at)
        real(path, **kwargs)
        folder, name = self._parent(at)
        folder.change(name)

    _do_remove = _do_unlink

    def _keep_content(self, at: str) -> None:
        with self.off():
            if os.path.isfile(at):
                self._node(at).live = _content(at)

    def _do_rmdir(self, real: Any, at: str, path: Any, **kwargs: Any) -> None:
        self._ask("rmdir", at)
        real(path, **kwargs)
        folder, name = self._parent(at)
        folder.change(name)

    def _do_rename(self, real: Any, at: str, path: Any, to: Any) -> None:
        self._ask("rename", at)
        self._keep_content(os.fspath(to))
        real(path, to)
        (folder, old), (into, new) = self._parent(at), self._parent(os.fspath(to))
        assert folder is into, "what is moved between folders isn't simulated"
        folder.change(old, new, folder.names[old])

    _do_replace = _do_rename

    def _do_scandir(self, real: Any, at: Any, path: Any) -> _Entries:
        folder = self._ask("list", at)
        with real(path) as found:
            return _Entries(_Entry(each, folder) for each in sorted(found, key=lambda each: each.name))

    def _do_fcntl(self, real: Any, at: _Open, fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_GETFL:
            return os.O_DIRECT if at.is_direct else 0
        self._ask("set flags", at)
        if flags & os.O_DIRECT and not self.direct:
            raise error(errno.EINVAL, at.path)
        at.is_direct = bool(flags & os.O_DIRECT)
        return 0


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
