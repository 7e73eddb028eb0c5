"""Where data comes from: files and data sets as rows or pieces of text, read as they are asked for.

    text             each file is one text, read a MiB at a time
    .jsonl, .json    a record per line, or an array of records; by what is in the file
    .parquet         a record per row
    a folder of datasets, saved or cached, or the name of one on the Hugging Face Hub

Nothing is read whole, hence the size of a file doesn't matter.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from shardwright.data.formats import reader_of
from shardwright.data.text import NO_TEXT, check_found, corpus_paths, corpus_root, drawn, is_text, told_of
from shardwright.errors import DataError, MissingExtra
from shardwright.files import parsed, reason_of
from shardwright.recipe.config import DataConfig

_HEAD_NBYTES = 2**16
_BLOCK_NBYTES = 2**20
_NOT_DATA = re.compile(r"readme|licen[cs]e|notice|changelog|dataset_infos?", re.IGNORECASE)
_ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SPLITS = r"train|test|validation|valid|val|dev|eval"
_SUFFIXES = {".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".txt", ".md", ".csv", ".py"}
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_BRACKET = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)  # or a string, perhaps cut
Kind = Literal["text", "lines", "array", "parquet"]


class Row(NamedTuple):
    """A record, or why there is none; where it stands, and its bytes there."""

    where: str
    nbytes: int
    record: Any
    problem: str = ""


class TextPiece(NamedTuple):
    """Text of a file, and whether it is the first and the last of it."""

    text: str
    is_first: bool
    is_last: bool


class File(NamedTuple):
    """A file, by its name below what was asked for."""

    name: str
    path: Path
    nbytes: int
    kind: Kind


@dataclass(frozen=True)
class DataSource:
    """What one source of ``config`` is: ``files``, of which ``table`` reads the rows where they are a data
    set's. ``left_out``: lines for people."""

    config: DataConfig
    files: tuple[File, ...]
    table: Any = None
    left_out: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether it is plain text, and no records."""
        return self.table is None and self.files[0].kind == "text"

    def rows(self) -> Iterator[Row]:
        """Every record, in order. Raises: DataError for an array that isn't JSON."""
        columns = self.config.columns
        for row in self._rows():
            if columns and isinstance(row.record, dict):
                row = row._replace(record=_renamed(row.record, columns))
            yield row

    def _rows(self) -> Iterator[Row]:
        if self.table is not None:
            for number, (nbytes, record) in enumerate(self.table.rows(), 1):
                yield Row(f"{self.config.path}, row {number}", nbytes, record)
            return
        for file in self.files:
            if file.kind == "lines":
                yield from _lines(file)
            elif file.kind == "array":
                yield from _array(file)
            else:
                for number, (nbytes, record) in enumerate(_tables().parquet_rows(file.path), 1):
                    yield Row(f"{file.name}, row {number}", nbytes, record)

    def sha256(self) -> str:
        """SHA-256 of names and contents, in order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.nbytes}\0".encode())
            with file.path.open("rb") as opened:
                while block := opened.read(_BLOCK_NBYTES):
                    digest.update(block)
        return digest.hexdigest()


def pieces(file: File, begin: int, end: int) -> Iterator[TextPiece]:
    """The text of bytes ``begin`` to ``end`` of a file, cut after lines where it is long."""
    with file.path.open("rb") as opened:
        opened.seek(begin)
        at, is_first = begin, True
        while at < end or is_first:
            block = opened.read(min(_BLOCK_NBYTES, end - at))
            if at + len(block) < end:
                block += opened.readline(end - at - len(block))
            at = at + len(block) if block else end
            yield TextPiece(block.decode("utf-8", errors="replace"), is_first, at >= end)
            is_first = False


def find(config: DataConfig) -> DataSource:
    """What ``data.path`` is: files, a folder of datasets, or the name of a data set on the Hub.

    Raises: DataError where it is nothing of these, holds no text and no records, or both.
    """
    root = corpus_root(config)
    if not root.exists() and _ON_THE_HUB.fullmatch(config.path) and root.suffix not in _SUFFIXES:
        return _of_table(config, _on_the_hub(config))
    if root.is_dir() and not config.suffixes:
        table = _saved(root, config.split)
        if table is not None:
            return _of_table(config, table)
    paths = list(corpus_paths(config))
    taken = drawn(config, [(name, path.stat().st_size) for name, path in paths])
    files, no_text = _sniffed(config, [(name, path) for name, path in paths if name in taken])
    files, others = _of_split([*_alike(config, files)], config.split)
    left_out = [told_of(NO_TEXT, no_text)] if no_text else []
    if others:
        left_out.append(told_of(f"as they are not of the split {config.split!r}", others))
    check_found(config, "text or records", [file.nbytes for file in files], left_out)
    return DataSource(config, tuple(files), left_out=tuple(left_out))


def _tables() -> Any:
    """The module that reads tables; its packages are imported where there is one."""
    return import_module("shardwright.data.tables")


def _on_the_hub(config: DataConfig) -> Any:
    try:
        return _tables().on_the_hub(config.path, config.subset, config.split)
    except MissingExtra as error:
        raise DataError(
            f"data.path = {config.path!r}: no such file or folder; if it is a data set of the Hugging Face "
            f"Hub, {error}"
        ) from None


def _saved(root: Path, split: str) -> Any:
    """The data set in a folder, as ``datasets`` saves or caches it; None: it is none."""
    is_saved = any((root / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if is_saved:
        return _tables().saved(root, split)
    cached = {path.parent for path in root.rglob("dataset_info.json") if any(path.parent.glob("*.arrow"))}
    if len(cached) > 1:
        raise DataError(
            f"{root} holds {len(cached)} cached data sets: point data.path at one, as {min(cached)}"
        )
    return _tables().cached(cached.pop(), split) if cached else None


def _of_table(config: DataConfig, table: Any) -> DataSource:
    files = [File(path.name, path, path.stat().st_size, "parquet") for path in table.files]
    return DataSource(config, tuple(files), table)


def _sniffed(config: DataConfig, paths: Sequence[tuple[str, Path]]) -> tuple[list[File], list[str]]:
    """Files by what is in them, and the names of those that are neither text nor records."""
    files, left_out = [], []
    for name, path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEAD_NBYTES)
        kind = _kind(name, head, config.columns)
        if kind == "text" and not is_text(config, name, head, "text or records"):
            left_out.append(name)
        else:
            files.append(File(name, path, size, kind))
    return files, left_out


def _kind(name: str, head: bytes, columns: Mapping[str, str]) -> Kind:
    if head.startswith(b"PAR1"):
        return "parquet"
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if text.startswith("["):
        return "array" if re.match(r"\[\s*\{", text) or name.endswith((".jsonl", ".ndjson")) else "text"
    if name.endswith((".jsonl", ".ndjson")):
        return "lines"
    try:
        first = parsed(json.loads, text.partition("\n")[0])
    except ValueError:
        return "text"
    is_record = isinstance(first, dict) and reader_of(_renamed(first, columns)) is not None
    return "lines" if is_record else "text"


def _renamed(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    return {**record, **{to: record[of] for to, of in columns.items() if of in record}}


def _alike(config: DataConfig, files: Sequence[File]) -> Sequence[File]:
    """Records alone, without the pages that describe a data set; or text alone."""
    records = [file for file in files if file.kind != "text"]
    others = [f for f in files if f.kind == "text" and not _NOT_DATA.match(Path(f.name).name)]
    if not records:
        return files
    if others:
        raise DataError(
            f"data.path = {config.path!r} holds {len(records)} files of records and {len(others)} of text, "
            f'as {records[0].name} and {others[0].name}: choose with data.suffixes, as [".jsonl"]'
        )
    return records


def _of_split(files: Sequence[File], split: str) -> tuple[Sequence[File], list[str]]:
    """Return the files of records that aren't of other splits, by their names; and the others' names."""
    own, other = (
        re.compile(rf"(?<![a-z0-9])({words})(?![a-z0-9]|_[a-z])")
        for words in (re.escape(split), rf"({_SPLITS})(_[a-z]+)*")
    )
    if files and (files[0].kind == "text" or not any(own.search(file.name.lower()) for file in files)):
        return files, []
    others = [f for f in files if not own.search(f.name.lower()) and other.search(f.name.lower())]
    return [file for file in files if file not in others], [file.name for file in others]


def _lines(file: File) -> Iterator[Row]:
    with file.path.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                where = f"{file.name}, line {number}"
                try:
                    yield Row(where, len(line), parsed(json.loads, line))
                except ValueError as error:
                    problem = f"not JSON ({error}); each line is one object"
                    yield Row(where, len(line), None, problem)


class _TextReader:
    """Text of a file from ``at`` on, of which more is read where it doesn't suffice."""

    def __init__(self, opened: IO[str]) -> None:
        self._opened, self.text, self.at = opened, "", 0

    def more(self) -> bool:
        """Read on, at least as much as there is; whether there was more."""
        read = self._opened.read(max(_BLOCK_NBYTES, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + read, 0
        return bool(read)

    def next(self) -> str:
        """The first character that isn't white space, which is not passed; "" at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def _array(file: File) -> Iterator[Row]:
    """Elements of a JSON array, decoded one by one."""
    with file.path.open(encoding="utf-8-sig", errors="replace") as opened:
        reader, number, after = _TextReader(opened), 0, "["
        while reader.next() == after:
            reader.at += 1
            if reader.next() == "]":
                break
            number, after = number + 1, ","
            yield _element(reader, f"{file.name}, element {number}")
        if reader.next() != "]":
            raise DataError(
                f"{file.name}, element {number}: got {reader.next()!r} after it, expected a comma or the end "
                "of the array; the file is cut or isn't JSON"
            )
        reader.at += 1
        if reader.next():
            found = reader.text[reader.at : reader.at + 40]
            raise DataError(
                f"{file.name}: got {found!r} after the end of its array (element {number}), expected the end "
                "of the file: make one array of all records, or write one record on each line"
            )


def _element(reader: _TextReader, where: str) -> Row:
    """The JSON value that ``reader`` is at; the reader then is behind it."""
    while True:
        begin, record, problem = reader.at, None, ""
        try:
            record, reader.at = _DECODER.raw_decode(reader.text, begin)
        except RecursionError as error:
            problem, reader.at = f"not JSON that can be used: {reason_of(error)}", _end(reader.text, begin)
        except ValueError as error:
            problem, reader.at = f"not JSON ({error}); the array is cut there or has another form", -1
        if reader.at >= 0:
            return Row(where, reader.at - begin, record, problem)
        reader.at = begin
        if not reader.more():
            raise DataError(f"{where}: {problem}")


def _end(text: str, begin: int) -> int:
    """Where the array or object ends that begins there; -1: not in this text."""
    depth = 0
    for found in _BRACKET.finditer(text, begin):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    return -1
