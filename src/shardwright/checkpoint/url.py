"""Objects under a URL (``s3://``, ``gs://``, ...), through fsspec: what all object stores can do, no more.

    put       an object appears whole, with its last byte, or not at all; what was there is replaced
    put new   the same, unless it is there already (S3 ``If-None-Match``, GCS ``ifGenerationMatch=0``)
    objects   every object below a folder, with its size; what has been put is in it
    no rename, no append, no change in place, no folders, no locks

S3 lists what has been put since December 2020; GCS and Azure always did. fsspec gives all of them the same
names; the package of each (``s3fs``, ``gcsfs``) is the user's to install.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import quote

import fsspec
from fsspec.registry import known_implementations

from shardwright.errors import InputError, MissingExtra, StorageError
from shardwright.extras import require
from shardwright.files import fcntl, open_regular

_OF_THE_EXTRA = ("s3fs", "gcsfs")
_LOCAL = ("file:", "local:")  # a path on this host, which begins with a slash
_CREDENTIALS = (
    "give this process credentials: for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the "
    "machine's role; for gs:// `gcloud auth application-default login` or the machine's service account"
)


class RemotePath(PurePosixPath):
    """The URL of an object, or of a folder of objects, with pathlib's ``/``, ``name`` and ``parent``.

    It does no I/O. ``str`` gives the URL.
    """

    def __str__(self) -> str:
        scheme, *rest = self.parts
        return f"{scheme}//{'/' * (scheme in _LOCAL)}{'/'.join(rest)}"


Location = Path | RemotePath
"""A path of this host's file systems, or a URL."""


def location_of(path: str | PurePath) -> Location:
    """``path`` as a URL where it has ``://``, else as a path of this host.

    Raises: InputError for what is no path, or a URL that went through ``pathlib.Path``, which takes one of
    its slashes.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise InputError(f"the path is {str(path)[:80]!r}, expected a string without NUL, or a pathlib.Path")
    if isinstance(path, RemotePath):
        return path
    if "://" in str(path):
        return RemotePath(str(path))
    if isinstance(path, PurePath) and (found := re.match(r"([a-z][a-z0-9+.-]+):/", str(path))):
        raise InputError(
            f"got the path {path}, which was a URL before pathlib took one of its slashes: give the string "
            f"{str(path).replace(found[0], found[0] + '/', 1)!r}"
        )
    return Path(path)


def local_only(path: str | PurePath, what: str) -> Path:
    """``path`` of this host. Raises: InputError for a URL, saying that ``what`` goes to a local folder."""
    found = location_of(path)
    if isinstance(found, RemotePath):
        raise InputError(f"{found}: {what} a local folder; give one, and copy it to the URL from there")
    return found


class ObjectStore:
    """The objects below one URL. It keeps no listing: other processes put objects, too.

    Every method raises StorageError where the store can't be reached or refuses, and says what to do.
    Raises (from ``__init__``): MissingExtra for a package that isn't installed; InputError for a URL of an
    unknown kind.
    """

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        scheme = root.parts[0].rstrip(":").split("::")[0]
        package = known_implementations.get(scheme, {}).get("class", "").split(".")[0]
        if package in _OF_THE_EXTRA:
            require("storage", package)
        options = {"auto_mkdir": True} if root.parts[0] in _LOCAL else {}
        try:
            self._fs, base = fsspec.url_to_fs(str(root), **options)
        except ImportError as error:
            raise MissingExtra(f"{root}: {error}", name=package or None) from error
        except ValueError as error:
            raise InputError(f"{root}: {error}; give a URL that fsspec knows, as s3:// or gs://") from error
        self._below = str(base).rstrip("/")

    def objects(self, folder: RemotePath) -> dict[str, int]:
        """The size of every object below ``folder``, by its name relative to it; none where there is none."""
        with self._asking(f"list {folder}"):
            self._fs.invalidate_cache()
            base = self._path(folder) + "/"
            try:
                found = self._fs.find(base[:-1], detail=True)
            except FileNotFoundError:
                found = {}
            if not found:
                self._check_bucket()
        return {name[len(base) :]: info["size"] for name, info in found.items() if name.startswith(base)}

    def _check_bucket(self) -> None:
        bucket = self._below.split("/")[0]
        if bucket and not self._fs.exists(bucket):
            raise StorageError(
                f"{self.root}: there is no bucket {bucket!r} that these credentials may see; create it, or "
                "correct the URL"
            )

    def read(self, path: RemotePath) -> bytes:
        """The bytes of one object. Raises: FileNotFoundError if there is none."""
        with self._asking(f"read {path}"):
            return self._fs.cat_file(self._path(path))

    def put(self, path: RemotePath, data: bytes) -> None:
        """Put one small object."""
        with self._asking(f"write {path}"), self._bucket_is_there():
            self._fs.pipe_file(self._path(path), data)

    def put_new(self, path: RemotePath, data: bytes) -> bool:
        """Put one small object, unless there is one: then False.

        Of two who do it at once one gets True, where the store decides; where it has no such request (and
        where fsspec's package doesn't make it) who asks while the other writes may replace it.
        """
        with self._asking(f"write {path}"), self._bucket_is_there():
            try:
                self._fs.pipe_file(self._path(path), data, mode="create")
            except Exception:  # FileExistsError, or how this store says it
                self._fs.invalidate_cache()
                if not self._fs.exists(self._path(path)):
                    raise
                return False
        return True

    def upload(self, file: Path, path: RemotePath) -> None:
        """Put the bytes of a local file."""
        with self._asking(f"write {path}"), self._bucket_is_there():
            self._fs.put_file(str(file), self._path(path))

    def download(self, path: RemotePath, file: Path) -> None:
        """Write the bytes of one object to a local file. Raises: FileNotFoundError if there is none."""
        with self._asking(f"read {path}"):
            self._fs.get_file(self._path(path), str(file))

    def copy(self, path: RemotePath, to: RemotePath) -> None:
        """Copy one object inside of the store."""
        with self._asking(f"copy {path} to {to}"):
            self._fs.cp_file(self._path(path), self._path(to))

    def remove(self, path: RemotePath) -> None:
        """Remove one object, or nothing where there is none."""
        with self._asking(f"remove {path}"):
            try:
                self._fs.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def fetch(self, path: RemotePath) -> Path:
        """A local file with the bytes that the object has now: the copy in the cache, or a new one.

        Processes of this host that ask for the same one take turns, and one of them downloads it.
        Raises: FileNotFoundError if there is no such object.
        """
        with self._asking(f"read {path}"):
            file = self._copy_of(path)
            with _turn(file.parent):
                if not file.exists():
                    part = file.with_name(f"{file.name}.part")
                    self.download(path, part)
                    self._check_size(path, part)
                    os.replace(part, file)
        return file

    def _check_size(self, path: RemotePath, part: Path) -> None:
        """Raise StorageError where a download ended early, or the object was replaced meanwhile."""
        expected, got = self._fs.size(self._path(path)), part.stat().st_size
        if expected is not None and got != expected:
            raise StorageError(
                f"{path}: got {got:,} bytes of {expected:,}; the download was cut, or the object was "
                "replaced meanwhile: try again"
            )

    def keep(self, file: Path, path: RemotePath) -> None:
        """Move ``file``, of which ``path`` was uploaded, to where ``fetch`` looks first."""
        with self._asking(f"read {path}"):
            os.replace(file, self._copy_of(path))

    def _copy_of(self, path: RemotePath) -> Path:
        """Where a copy of what the object is now lies in the cache: elsewhere after it was replaced (of S3,
        by its ETag)."""
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(path))
        known = [info.get(key) for key in ("size", "ETag", "etag", "generation", "LastModified", "mtime")]
        state = repr([*known, str(info.get("created"))])
        cached(path).mkdir(parents=True, exist_ok=True)
        return cached(path) / sha256(state.encode()).hexdigest()[:16]

    def _path(self, path: RemotePath) -> str:
        return "/".join((self._below, *path.parts[len(self.root.parts) :]))

    @contextmanager
    def _bucket_is_there(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:  # no folder has to be there, so it is the bucket
            self._check_bucket()
            raise

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        """Around requests: what a package raises of its own becomes one error, with what to do."""
        try:
            yield
        except (FileNotFoundError, StorageError):
            raise
        except Exception as error:
            said = f"can't {doing}: {str(error) or type(error).__name__}"
            refused = isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}"
            remedy = _CREDENTIALS if refused else "see whether this host reaches the store, and try again"
            raise StorageError(f"{said}; {remedy}") from error


def cached(path: RemotePath) -> Path:
    """Where copies of an object, or of the objects of a folder, lie on this host.

    Below ``~/.cache/shardwright``, or ``$XDG_CACHE_HOME/shardwright``; any of it may be removed at any time
    while nobody reads it.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright"
    return root.joinpath(*(quote(part, safe="").replace("..", "%2E%2E") for part in path.parts))


def forget(path: RemotePath) -> None:
    """Remove the copies of an object, or of the objects of a folder, from the cache of this host."""
    shutil.rmtree(cached(path), ignore_errors=True)


def local_copy(url: str) -> Path:
    """A local copy of one object, or of a folder of objects, as they are now; what hasn't changed since the
    last time is not fetched again. Processes of one host share it.

    Raises: FileNotFoundError if there is nothing; StorageError; MissingExtra.
    """
    root = RemotePath(url)
    store = ObjectStore(root)
    names = sorted(store.objects(root))
    if outside := [name for name in names if ".." in name.split("/")]:
        raise StorageError(f"{root}: {outside[0]!r} would lie outside of its folder; rename that object")
    files = {name: store.fetch(root / name) for name in names} or {root.name: store.fetch(root)}
    state = repr([(name, file.name) for name, file in files.items()])
    folder = cached(root) / f".as-{sha256(state.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder.parent):
        for name, file in files.items():  # under their own names: a suffix says what a file is
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.symlink(file, link)
    return folder if names else folder / root.name


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process of this host at a time; where the file system has no locks, all at once."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(open_regular(folder / ".lock", flags), "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
