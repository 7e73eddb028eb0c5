"""The only file that imports datasets and pyarrow: tables, on disk or from the Hugging Face Hub, as rows."""
# pyright: reportMissingImports=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.errors import DataError
from shardwright.extras import from_extra

with from_extra("finetune"):
    import datasets
    import pyarrow
    from pyarrow import parquet

_AT_ONCE = 1000
_CACHED = "cache-"  # what `datasets` puts beside a data set: results of its map and filter
datasets.disable_progress_bars()  # each rank would draw its own


@dataclass(frozen=True)
class Table:
    """A data set, and the files that it lies in."""

    data: Any

    @property
    def files(self) -> Sequence[Path]:
        """Its files, in order, of memory-mapped Arrow."""
        return [Path(file["filename"]) for file in self.data.cache_files]

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(bytes, on the average of those read with it; row) of each."""
        for table in self.data.with_format("arrow").iter(batch_size=_AT_ONCE):
            yield from _rows(table)


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes, on the average of those read with it; row) of each.

    Raises: DataError for a file that is damaged.
    """
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_AT_ONCE):
                yield from _rows(batch)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is damaged, or no Parquet ({error}): write it again") from None


def saved(folder: Path, split: str) -> Table:
    """A data set that was saved by ``save_to_disk``; of several splits that one.

    Raises: DataError where ``datasets`` can't read it, or has no such split.
    """
    try:
        loaded: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:  # ArrowInvalid is a ValueError
        raise DataError(
            f"{folder}: datasets can't read it ({error}); save it again by save_to_disk"
        ) from None
    if not isinstance(loaded, dict):
        return Table(loaded)
    if split not in loaded:
        raise DataError(f"{folder} has no split {split!r}; there is {', '.join(loaded)}: set data.split")
    return Table(loaded[split])


def cached(folder: Path, split: str) -> Table:
    """A data set in the cache of ``datasets``. Raises: DataError where it has no such split."""
    files = sorted(path for path in folder.glob("*.arrow") if not path.name.startswith(_CACHED))
    of_split = [path for path in files if f"-{split}.arrow" in path.name or f"-{split}-" in path.name]
    if not of_split:
        there = ", ".join(path.name for path in files)
        raise DataError(f"{folder} has no split {split!r}; there is {there}: set data.split")
    parts = [datasets.Dataset.from_file(str(path)) for path in of_split]
    return Table(datasets.concatenate_datasets(parts))


def on_the_hub(name: str, subset: str, split: str) -> Table:
    """A data set of that name, downloaded, or as it was kept by an earlier download.

    Raises: DataError where there is no network, and it wasn't kept; or no such data set, subset or split.
    """
    try:
        return Table(datasets.load_dataset(name, subset or None, split=split))
    except Exception as error:  # of the network, of the Hub, of its files: many classes
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and "Unknown split" in text:
            raise DataError(f"{name} has no split {split!r} ({text:.300}): set data.split") from None
        raise DataError(
            f"data.path = {name!r}: no such file or folder, and the Hugging Face Hub gives no data set of "
            f"this name ({type(error).__name__}: {text:.300}); correct the path, or download the data set "
            "where there is a network and give its folder"
        ) from None


def _rows(table: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = table.to_pylist()
    nbytes = table.nbytes // max(1, len(rows))
    yield from ((nbytes, row) for row in rows)
