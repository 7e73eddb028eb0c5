"""Files that others wrote are read by their formats' own rules; what is malformed is one sentence of ours."""

import copy
import json
import os
import pathlib
import pickle
import random
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from shardwright.checkpoint import load, save
from shardwright.checkpoint.folder import is_complete, read_manifest, survey
from shardwright.checkpoint.format import dumps
from shardwright.checkpoint.shardfile import header_of, read_header
from shardwright.checkpoint.storage import LOCK, FolderLock
from shardwright.checkpoint.tools import consolidate, inspect, open_checkpoint, verify
from shardwright.checkpoint.writer import Keep
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, InputError, ShardwrightError
from shardwright.interchange import from_bitsandbytes, to_bitsandbytes

OTHERS = ("Traceback", "KeyError", "TypeError", "struct.error", "JSONDecodeError", "RecursionError")
OTHERS += ("AttributeError", "UnicodeDecodeError", "OverflowError", "AssertionError", "IndexError")


def net(fill: float = 1.0) -> nn.Module:
    model = nn.Linear(3, 2)
    for p in model.parameters():
        nn.init.constant_(p, fill)
    return model


def refusal_of(call: Callable[[], Any], *said: str) -> str:
    with pytest.raises(ShardwrightError) as caught:
        call()
    message = str(caught.value)
    assert not any(other in message for other in OTHERS), message
    assert all(text in message for text in said), message
    return message


def fine_or_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ShardwrightError as error:
        assert not any(other in str(error) for other in OTHERS), str(error)
        return False
    return True


# ---- safetensors


def described(begin: Any, end: Any, dtype: Any = "F32", shape: Any = (1,), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HEADERS = {
    "whole": file_of({"a": described(0, 4)}, b"1234"),
    "no tensors": file_of({}),
    "blanks before": file_of(b" {" + ONE + b"}", b"1234"),
    "in another order": file_of({"b": described(4, 8), "a": described(0, 4)}, b"12345678"),
    "empty tensors": file_of({"a": described(0, 0, shape=[0, 3]), "b": described(0, 4)}, b"1234"),
    "a field more": file_of({"a": described(0, 4, more=1)}, b"1234"),
    "one byte a value": file_of({"a": described(0, 4, "F8_E4M3", [2, 2])}, b"1234"),
    "no metadata": file_of({"__metadata__": None, "a": described(0, 4)}, b"1234"),
    "nothing": b"",
    "seven bytes": b"1234567",
    "bytes behind": file_of({"a": described(0, 4)}, b"12345"),
    "cut": file_of({"a": described(0, 8, shape=[2])}, b"1234"),
    "overlap": file_of({"a": described(0, 4), "b": described(0, 4)}, b"1234"),
    "gap": file_of({"a": described(0, 4), "b": described(8, 12)}, b"1234" * 3),
    "negative": file_of({"a": described(-4, 0)}, b"1234"),
    "backwards": file_of({"a": described(4, 0, shape=[0])}, b"1234"),
    "fractions": file_of({"a": described(0.0, 4.0)}, b"1234"),
    "truth": file_of({"a": described(0, 4, shape=[True])}, b"1234"),
    "three offsets": file_of({"a": {**described(0, 4), "data_offsets": [0, 4, 8]}}, b"1234"),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
    "another size": file_of({"a": described(0, 4, shape=[2])}, b"1234"),
    "unknown dtype": file_of({"a": described(0, 4, "F31")}, b"1234"),
    "dtype of a list": file_of({"a": described(0, 4, ["F32"])}, b"1234"),
    "metadata of numbers": file_of({"__metadata__": {"x": 1}}),
    "metadata of a list": file_of({"__metadata__": []}),
    "a list": file_of(b"[]"),
    "a text": file_of({"a": "F32"}),
    "null": file_of({"a": None}),
    "NaN": file_of(b'{"__metadata__":{"x":NaN}}'),
    "deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "digits": file_of(b'{"a":' + b"9" * 5000 + b"}"),
    "UTF-16": file_of("{}".encode("utf-16")),
    "byte order mark": file_of(b"\xef\xbb\xbf{}"),
    "Latin-1": file_of('{"\xe9":1}'.encode("latin-1")),
    "half a pair": file_of(b"{" + ONE.replace(b'"a"', b'"\\ud800"') + b"}", b"1234"),
    "a huge header": file_of(b"{}", length=2**63 + 5),
    "a header over the limit": file_of(b"{}", length=100_000_001),
}
STRICTER = {
    "a name twice": file_of(b"{" + ONE + b"," + ONE + b"}", b"1234"),
    "dtype without a torch one of its own": file_of({"a": described(0, 4, "F4", [8])}, b"1234"),
    "a shape no tensor has": file_of({"a": described(0, 0, shape=[0, 2**62, 2**62])}),
}
"""The library reads these."""


@pytest.mark.parametrize("case", [*HEADERS, *STRICTER])
def test_a_safetensors_file_is_refused_wherever_the_library_refuses_it(tmp_path, case):
    path = tmp_path / "x.safetensors"
    path.write_bytes((HEADERS | STRICTER)[case])
    try:
        with safe_open(path, "pt") as file:
            library = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError):
        refusal_of(lambda: read_header(path), "x.safetensors: not a readable safetensors file (")
        return
    if case in STRICTER:
        refusal_of(lambda: read_header(path), "x.safetensors: not a readable safetensors file (", "'a'")
        return
    entries = read_header(path)[1]
    shapes = {name: tuple(tensor.shape) for name, tensor in library.items()}
    assert {name: entry.shape for name, entry in entries.items()} == shapes


# ---- Hugging Face


def weights(path: Path, fill: float) -> None:
    save_file({name: tensor.detach() for name, tensor in net(fill).state_dict().items()}, path)


def mapped(**files: Any) -> dict[str, Any]:
    return {"weight_map": files}


def loaded(path: Path) -> float:
    model = net(-1.0)
    load(path, model=model)
    (value,) = {v for p in model.parameters() for v in p.detach().flatten().tolist()}
    return value


def test_a_folder_of_hugging_face_is_read_as_the_library_reads_it(tmp_path):
    weights(tmp_path / "training_backup.safetensors", 2.0)
    assert loaded(tmp_path) == 2.0  # the only one
    weights(tmp_path / "another.safetensors", 3.0)
    both = "another.safetensors, training_backup.safetensors"
    refusal_of(lambda: loaded(tmp_path), both, "model.safetensors")
    torch.save(net(4.0).state_dict(), tmp_path / "pytorch_model.bin")
    assert loaded(tmp_path) == 4.0
    for name, file in (("model", "another"), ("variant", "training_backup")):
        index = mapped(**dict.fromkeys(net().state_dict(), f"{file}.safetensors"))
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    assert loaded(tmp_path) == 3.0
    assert loaded(tmp_path / "variant.safetensors.index.json") == 2.0
    weights(tmp_path / "model.safetensors", 1.0)
    assert loaded(tmp_path) == 1.0


def test_several_indexes_of_which_none_is_the_models_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(mapped()))
    refusal_of(lambda: loaded(tmp_path), "a.safetensors.index.json, b.safetensors.index.json")


A, B = "a.safetensors", "b.safetensors"
INDEXES = {
    "a folder": (mapped(weight="sub/x.safetensors"), "'sub/x.safetensors', expected the name of a"),
    "outside": (mapped(weight="../x.safetensors"), "'../x.safetensors'"),
    "absolute": (mapped(weight="/x.safetensors"), "'/x.safetensors'"),
    "a number": (mapped(weight=1), "'1', expected the name of a file"),
    "NUL": (mapped(weight="\0"), "missing: ['\\x00']"),
    "half a pair": (mapped(weight="\ud800"), "missing: ['\\ud800']"),
    "itself": (mapped(weight="model.safetensors.index.json"), "no zip file"),
    "no map": ({}, "weight_map is None"),
    "a list": ({"weight_map": []}, "weight_map is []"),
    "no object": ([], "expected a JSON object"),
    "another place": (mapped(weight=B, bias=A), "weight is not in b.safetensors but in a."),
    "absent": (mapped(x=A), "x is not in a.safetensors, nor in another file"),
    "in both": (mapped(weight=A, bias=B), "bias is in a.safetensors and in b.safetensors"),
    "cut": (b'{"weight_map": {', "not a readable index ("),
    "deep": (b'{"a":' * 100_000, "nested too deeply"),
    "a name twice": (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' is there twice"),
    "no text": (b"\xff\xfe", "no text in UTF-8"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_is_malformed_or_lies_is_refused_with_its_name(tmp_path, case):
    content, said = INDEXES[case]
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"other" if case == "another place" else "bias": torch.zeros(2)}, tmp_path / B)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    refusal_of(lambda: loaded(tmp_path), "model.safetensors.index.json" if case != "itself" else "", said)


# ---- torch.save


def as_saved(value: Any, **options: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def repacked(compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> bytes:
    source, file = zipfile.ZipFile(BytesIO(as_saved({"w": W}))), BytesIO()
    with zipfile.ZipFile(file, "w", compression) as packed:
        for info in source.infolist():
            content = replaced.get(info.filename.rpartition("/")[2], source.read(info))
            packed.writestr(info.filename, content)
    return file.getvalue()


def with_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["a"] = found
    return found


W = torch.arange(6.0)
TORCH_FILES = {
    "no zip": (b"hello", "no zip file"),
    "nothing": (b"", "no zip file"),
    "before torch 1.6": (as_saved({"w": W}, _use_new_zipfile_serialization=False), "no zip file"),
    "compressed": (repacked(zipfile.ZIP_DEFLATED), "is compressed"),
    "big-endian": (repacked(byteorder=b"big"), "in the order"),
    "conjugated": (as_saved({"w": W.to(torch.complex64).conj()}), "resolve_conj()"),
    "negated": (as_saved({"w": torch._neg_view(W)}), "resolve_neg()"),
    "on meta": (as_saved({"w": W.to("meta")}), "has 0 bytes of data of w, expected 24"),
    "sparse": (as_saved({"w": W.to_sparse()}), "it holds sparse tensors"),
    "one name": (as_saved({1: W, "1": W}), "two tensors that are called '1'"),
    "one path": (as_saved({"a.b": W, "a": {"b": W}}), "two tensors that are called 'a.b'"),
    "in itself": (as_saved(with_itself()), "nested too deeply"),
    "a number": (as_saved(3), "holds no tensors (int)"),
}


@pytest.mark.parametrize("case", TORCH_FILES)
def test_a_torch_file_that_byte_ranges_cannot_read_is_refused(tmp_path, case):
    content, said = TORCH_FILES[case]
    (tmp_path / "x.pt").write_bytes(content)
    refusal_of(lambda: open_checkpoint(tmp_path / "x.pt"), "x.pt", said)


# ---- torch.distributed.checkpoint


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    dcp.save(net(5.0).state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


def copied(folder: Path, to: Path) -> Path:
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


class Global:
    """Pickles as a name."""

    def __init__(self, module: str, name: str) -> None:
        self.text = f"c{module}\n{name}\n".encode()


def built(of: Global, attributes: dict[str, Any]) -> bytes:
    """A pickle that sets attributes of what ``of`` names, as BUILD does with the state of slots."""
    state = pickle.dumps((None, attributes), protocol=0)[:-1]
    return of.text + state + b"b."


ATTACKED = [
    Global("pathlib", "PosixPath"),
    Global("torch.distributed.checkpoint.metadata", "TensorProperties"),
    Global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    Global("torch.serialization", "_get_layout"),
    Global("torch", "Size"),
    Global("torch", "float32"),
]


@pytest.mark.parametrize("of", ATTACKED, ids=lambda g: g.text.decode().split("\n")[1])
def test_a_pickle_sets_no_attributes_of_classes_modules_or_functions(tmp_path, dcp_folder, of):
    folder = copied(dcp_folder, tmp_path / "evil")
    classes = pathlib.PosixPath, TensorProperties, filesystem._StorageInfo
    before = [dict(vars(cls)) for cls in classes]
    for name in ("is_dir", "__setstate__", "__class__", "new"):
        (folder / ".metadata").write_bytes(built(of, {name: 1}))
        refusal_of(lambda: open_checkpoint(folder), ".metadata")
    assert [dict(vars(cls)) for cls in classes] == before
    for thing in (torch.Size, torch.float32, torch.serialization._get_layout):
        assert not hasattr(thing, "new")


def test_a_member_of_an_enumeration_is_not_rewritten(tmp_path, dcp_folder):
    folder, kind = copied(dcp_folder, tmp_path / "evil"), ATTACKED[2]
    (folder / ".metadata").write_bytes(kind.text + b"I0\n\x85R}X\x03\x00\x00\x00newI1\nsb.")
    refusal_of(lambda: open_checkpoint(folder), ".metadata")
    assert not any(hasattr(member, "new") for member in type(pickle.loads(kind.text + b"I0\n\x85R.")))


def described_by(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def changed(of: str = "", **changes: Any) -> Callable[[Path], Any]:
    """Other attributes of the metadata, or of the weight's items in the files, tensor or properties."""

    def change(folder: Path) -> None:
        found = described_by(folder)
        tensor = found.state_dict_metadata["weight"]
        items = [info for index, info in found.storage_data.items() if index.fqn == "weight"]
        parts = {"": [found], "items": items, "tensor": [tensor], "properties": [tensor.properties]}
        for part in parts[of]:
            vars(part).update(changes)
        (folder / ".metadata").write_bytes(pickle.dumps(found))

    return change


def holding(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / ".metadata").write_bytes(content)


METADATA: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a text": (holding(pickle.dumps("text")), "it has a str where a Metadata"),
    "nothing": (holding(b""), ".metadata"),
    "no pickle": (holding(b"\xff" * 99), ".metadata"),
    "a class": (holding(ATTACKED[1].text + b"."), "it has a type where"),
    "no tensors": (changed(state_dict_metadata=None), "state_dict_metadata of a Metadata"),
    "no places": (changed(storage_data=None), "storage_data of a Metadata"),
    "a text as tensor": (changed(state_dict_metadata={"weight": "x"}), "it has a str where"),
    "no index": (changed(storage_data={"weight": 1}), "it has a str where a MetadataIndex"),
    "no info": (changed(storage_data={MetadataIndex("weight", [0, 0]): 1}), "it has a int where"),
    "negative": (changed("items", offset=-1), "'weight' is at -1+"),
    "a fraction": (changed("items", offset=1.5), "offset of a _StorageInfo is a float"),
    "outside": (changed("items", relative_path="../x.distcp"), "'../x.distcp', expected bytes of a file"),
    "below": (changed("items", relative_path="sub/x.distcp"), "expected bytes of a file beside it"),
    "missing": (changed("items", relative_path="x.distcp"), "x.distcp: weight: can't be read"),
    "behind the end": (changed("items", offset=10**9), "__0_0.distcp: weight"),
    "another dtype": (changed("properties", dtype=torch.int32), "weight is F32, by .metadata it is I32"),
    "an unknown dtype": (changed("properties", dtype=torch.complex128), "'weight' has dtype"),
    "another shape": (changed("tensor", size=torch.Size([7, 7])), "elements are stored"),
    "no shape": (changed("tensor", size=[2, 3]), "size of a TensorStorageMetadata is a list"),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_is_malformed_is_refused_with_its_name(tmp_path, dcp_folder, case):
    folder = copied(dcp_folder, tmp_path / "x")
    assert loaded(folder) == 5.0
    spoil, said = METADATA[case]
    spoil(folder)
    refusal_of(lambda: loaded(folder), said)


class Attribute:
    """Pickled as an attribute of something, by its name."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> Any:
        return getattr, self.of


def test_metadata_that_python_3_11_0_to_3_11_3_wrote_is_read(tmp_path, dcp_folder, monkeypatch):
    folder = copied(dcp_folder, tmp_path / "x")
    kind = type(TensorProperties().__getstate__()[3])  # those pickle a member of an enumeration by its name
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    (folder / ".metadata").write_bytes(pickle.dumps(described_by(folder)))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert loaded(folder) == 5.0


@pytest.mark.parametrize("of", [("text", "join"), (torch.Size, "mro"), (TensorProperties, 1)], ids=str)
def test_no_other_attribute_is_read_by_a_pickle(tmp_path, dcp_folder, of):
    folder = copied(dcp_folder, tmp_path / "x")
    (folder / ".metadata").write_bytes(pickle.dumps(Attribute(*of)))
    refusal_of(lambda: open_checkpoint(folder), "which is no enumeration; refused")


# ---- our own files


def saved(path: Path) -> Path:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    extra = {"a": [1, 2.5, (True, None)], "t": torch.ones(3), "array": np.ones(2), 1: b"x"}
    return Path(save(path, model=model, optimizer=optimizer, extra=extra, step=7))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every ``(container, key)`` in a JSON tree."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def publish(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest with the checksum that it ought to have."""
    body = {key: value for key, value in body.items() if key != "manifest_crc32"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (folder / "manifest.json").write_text(f'{{"manifest_crc32":{crc32(text.encode())},{text[1:]}\n')


def open_all(folder: Path) -> None:
    verify(folder)
    inspect(folder)
    model = net(-1.0)
    load(folder, model=model, optimizer=None).restore_rng()


WRONG = [None, True, -1, 2**70, 1.5, "", "x", [], [[]], {}, {"$tensor": []}, {"$float": "x"}, {"$dict": [1]}]


def test_a_forged_manifest_loads_or_is_refused_in_a_sentence(tmp_path):
    folder = saved(tmp_path / "run").rename(tmp_path / "best")
    original = json.loads((folder / "manifest.json").read_text())
    count = len(list(places(original)))
    drawn, refused = random.Random(1), 0
    state = torch.get_rng_state()
    for number in range(count):
        for value in drawn.sample(WRONG, 2):
            body = copy.deepcopy(original)
            container, key = list(places(body))[number]
            container[key] = value
            publish(folder, body)
            refused += not fine_or_refused(lambda: open_all(folder))
    torch.set_rng_state(state)
    assert refused > count / 2
    body = copy.deepcopy(original)
    body["state"]["extra"] = json.loads("[" * 400 + "]" * 400)
    publish(folder, body)
    refusal_of(lambda: open_all(folder), "manifest.json")


NO_MANIFESTS = [b"", b"[]", b"1", b"{", b'{"manifest_crc32":1}', b"\xff"]
NO_MANIFESTS += [b'{"a":1,"a":1}', b'{"a":' * 100_000, b'{"a":NaN}']


@pytest.mark.parametrize("text", NO_MANIFESTS)
def test_a_manifest_that_is_none_is_refused_with_its_name(tmp_path, text):
    folder = saved(tmp_path)
    (folder / "manifest.json").write_bytes(text)
    refusal_of(lambda: load(folder, model=net()), "manifest.json")


def test_damage_anywhere_in_any_format_is_never_another_kind_of_error(tmp_path, dcp_folder):
    """Bytes changed, cut off and put in, at places that a fixed seed draws."""
    ours = saved(tmp_path / "run").rename(tmp_path / "best")
    others = copied(dcp_folder, tmp_path / "dcp")
    torch.save(net().state_dict(), tmp_path / "x.pt")
    weights(tmp_path / "x.safetensors", 1.0)
    files = [
        (ours, ours / "manifest.json"),
        (others, others / ".metadata"),
        (others, others / "__0_0.distcp"),
    ]
    files += [(tmp_path / name, tmp_path / name) for name in ("x.pt", "x.safetensors")]
    drawn = random.Random(2)
    for checkpoint, file in files:
        content = file.read_bytes()
        for _ in range(60):
            at, kind = drawn.randrange(len(content)), drawn.randrange(3)
            put = bytes([drawn.randrange(256)]) if kind else b""
            file.write_bytes(content[:at] + put + content[at + (kind != 2) :])
            fine_or_refused(lambda at=checkpoint: open_checkpoint(at))
            file.write_bytes(content[:at])
            fine_or_refused(lambda at=checkpoint: open_checkpoint(at))
        file.write_bytes(content)
        open_checkpoint(checkpoint)


def shard_of(folder: Path) -> Path:
    return folder / "shard-00000.safetensors"


def test_verify_finds_every_bit_of_a_header_that_changed(tmp_path):
    folder = Path(save(tmp_path, model=net(), step=1))
    content = shard_of(folder).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    drawn = random.Random(3)
    assert verify(folder).faults == ()
    for at in {*range(8), *drawn.sample(range(8, end), 150)}:
        changed = bytearray(content)
        changed[at] ^= 1 << drawn.randrange(8)
        shard_of(folder).write_bytes(changed)
        assert verify(folder).exit_code == 1, at
        loaded(folder)  # by the manifest: the weights are whole


def replaced_header(file: Path, header: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header; its length stays."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    found = json.loads(content[8:end])
    text = json.dumps(header(found) or found, separators=(",", ":")).encode().ljust(end - 8)
    assert len(text) == end - 8
    file.write_bytes(content[:8] + text + content[end:])


def swapped(a: str, b: str) -> Callable[[dict[str, Any]], Any]:
    return lambda header: {{a: b, b: a}.get(name, name): info for name, info in header.items()}


def test_verify_finds_tensors_that_are_renamed_swapped_or_reshaped_in_a_header(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    folder = Path(save(tmp_path, model=model, step=1))
    content, name = shard_of(folder).read_bytes(), "model/0.weight"
    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (swapped(name, "model/1.weight"), "calls a tensor 'model/1.weight', by the manifest it is"),
        (swapped(name, "model/9.weight"), "'model/9.weight'"),
        (lambda h: h[name].update(shape=[4]), "model/0.weight is F32 [4] by the header"),
        (lambda h: h[name].update(dtype="I32"), "model/0.weight is I32 [2, 2] by the header"),
        (lambda h: h.pop(name) and h, "shard-00000.safetensors"),
        (lambda h: h.update(__metadata__={"format": "np"}), "metadata {'format': 'np'}"),
    ]
    for header, said in changes:
        shard_of(folder).write_bytes(content)
        replaced_header(shard_of(folder), header)
        assert any(said in fault for fault in verify(folder).faults), said


def test_verify_reads_copies_that_the_manifest_does_not_list(tmp_path):
    folder = Path(save(tmp_path, model=net(), step=1)).rename(tmp_path / "best")
    manifest = read_manifest(folder)
    copies = {"model/weight": torch.ones(2, 3)}
    file = folder / "shard-00001.safetensors"
    save_file(copies, file, {"format": "pt"})
    body = json.loads(dumps(manifest))
    body["files"][file.name] = file.stat().st_size
    publish(folder, body)
    assert verify(folder).faults == ()
    for wrong in ({"model/weight": torch.full((2, 3), 2.0)}, {"model/weight": torch.ones(3, 2)}):
        save_file(wrong, file, {"format": "pt"})
        assert any("no copy of a piece" in fault for fault in verify(folder).faults)
    save_file({"model/other1": torch.ones(2, 3)}, file, {"format": "pt"})
    body["files"][file.name] = file.stat().st_size
    publish(folder, body)
    assert any("by the manifest it is 'none of them'" in fault for fault in verify(folder).faults)


def test_one_name_twice_in_one_file_is_refused_before_it_is_written():
    for name in ("a", "__metadata__"):
        with pytest.raises(CheckpointError, match=name):
            header_of([("a", "F32", (1,), 4), (name, "F32", (1,), 4)])


# ---- what is saved


T, U = torch.ones(2), torch.zeros(2)
AMBIGUOUS: dict[str, Any] = {
    "a slash": {"a/b": {"c": T}, "a": {"b/c": U}},
    "a slash at the top": {"a/b": T, "a": {"b": U}},
    "a number and its text": {1: T, "1": U},
    "inside": {"x": [{True: T, "True": U}]},
    "an array and a tensor": {"a": {"b": np.ones(2)}, "a/b": T},
    "a list and a dict": {"a": [T], "a/0": U},
    "tensors as keys": {"x": {T: 1, U: 2}},
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_two_tensors_of_one_name_are_refused_before_anything_is_written(tmp_path, case):
    run = tmp_path / "run"
    extra, said = AMBIGUOUS[case], "two tensors would have this name"
    refusal_of(lambda: save(run, model=net(), extra=extra, step=1), said)
    assert not run.exists() or not list(run.glob("step-*"))


def test_keys_that_read_alike_come_back_exactly_where_no_tensors_are_below(tmp_path):
    extra = {"a/b": {"c": 1}, "a": {"b/c": 2}, "x": {1: "one", "1": "text", 2.5: T}, "y/z": U}
    save(tmp_path, model=net(), extra=extra, step=1)
    restored = load(tmp_path, model=net()).extra
    assert {k: v for k, v in restored.items() if k not in ("x", "y/z")} == {"a/b": {"c": 1}, "a": {"b/c": 2}}
    assert restored["x"][1] == "one" and restored["x"]["1"] == "text" and torch.equal(restored["x"][2.5], T)
    assert torch.equal(restored["y/z"], U)


def in_itself() -> dict[str, Any]:
    found: dict[str, Any] = {"a": [1]}
    found["a"].append({"b": found})
    return found


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


EXTRAS: dict[str, tuple[Any, str]] = {
    "in itself": (in_itself(), "contains itself, or is nested deeper than 100"),
    "deep": ({"a": nested(5000)}, "contains itself, or is nested deeper than 100"),
    "objects": ({"a": np.array([object()])}, "extra/a: an array of object can't be saved"),
    "texts": ({"a": np.array(["x"])}, "extra/a: an array of"),
    "a function": ({"a": len}, "extra/a: a builtin_function_or_method can't be saved"),
    "digits": ({"a": 10**5000}, "extra/a: an integer of 16610 bits can't be saved"),
    "half a pair": ({"\ud800": T}, "no file can have this name"),
    "on meta": ({"a": torch.ones(2, device="meta")}, "extra/a: a tensor on meta"),
    "sparse": ({"a": torch.ones(2).to_sparse()}, "extra/a: a tensor on cpu with layout torch.sparse_coo"),
    "complex": ({"a": torch.ones(2, dtype=torch.complex128)}, "extra/a: dtype torch.complex128"),
    "a list": ([T], "extra is a list, expected a dict"),
}


@pytest.mark.parametrize("case", EXTRAS)
def test_extra_that_cannot_be_saved_is_refused_with_its_place(tmp_path, case):
    extra, said = EXTRAS[case]
    refusal_of(lambda: save(tmp_path, model=net(), extra=extra, step=1), said)
    assert not list(tmp_path.glob("step-*")) and not (tmp_path / "latest").exists()


def test_extra_for_a_load_that_is_no_dict_is_refused(tmp_path):
    save(tmp_path, model=net(), extra={"half": {"\ud800": 1}, "\ud801": 2}, step=1)
    refusal_of(lambda: load(tmp_path, model=net(), extra=[1]), "extra is a list")  # type: ignore[arg-type]
    assert load(tmp_path, model=net()).extra == {"half": {"\ud800": 1}, "\ud801": 2}


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "step of a text": ({"step": "5"}, "step is '5', expected the number of optimizer steps done, 0 or more"),
    "step of a fraction": ({"step": 5.0}, "step is 5.0"),
    "step of a truth": ({"step": True}, "step is True"),
    "step of two": ({"step": torch.ones(2, dtype=torch.int64)}, "step is tensor([1, 1])"),
    "no step": ({"step": None}, "step is None"),
    "negative": ({"step": np.int64(-1)}, "step is "),
    "huge": ({"step": 2**63}, "step is 9223372036854775808"),
    "keep of a text": ({"keep": "3"}, "keep is '3', expected at least 1, a Keep, or None"),
    "keep of a fraction": ({"keep": 1.5}, "keep is 1.5"),
    "keep of a truth": ({"keep": True}, "keep is True"),
    "keep nothing": ({"keep": 0}, "keep is 0"),
    "no path": ({"path": None}, "the path is 'None', expected a string"),
    "a path with NUL": ({"path": "a\0b"}, "without NUL"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_of_save_that_is_wrong_is_named_before_anything_is_written(tmp_path, case):
    arguments, said = ARGUMENTS[case]
    call = {"path": tmp_path, "step": 1, **arguments}
    with pytest.raises(InputError) as caught:
        save(call.pop("path"), model=net(), **call)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_integers_of_numpy_and_torch_are_integers(tmp_path):
    for step in (np.int64(5), torch.tensor(6), np.uint8(7)):
        save(tmp_path, model=net(), step=step, keep=np.int32(2))  # type: ignore[arg-type]
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == ["step-000006", "step-000007"]
    assert type(load(tmp_path, model=net()).step) is int
    for wrong in ({"last": "3"}, {"last": 1, "every": "2"}, {"last": 1.5}, {"last": True}):
        with pytest.raises(InputError, match=r"Keep\.(last|every) is"):
            Keep(**wrong)  # type: ignore[arg-type]
    assert Keep(1, every=1)


# ---- bitsandbytes


def test_a_weight_that_is_not_as_bitsandbytes_keeps_it_is_named():
    codes, absmax = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.bfloat16)
    state = to_bitsandbytes({"w": codes, "w_absmax": absmax})
    facts = "w.quant_state.bitsandbytes__nf4"
    assert from_bitsandbytes(state).keys() == {"w", "w_absmax"}
    for part in state:
        if part != facts:
            broken = {key: value for key, value in state.items() if key != part}
            refusal_of(lambda broken=broken: from_bitsandbytes(broken), "'w'", "is missing")
    wrong = (b'{"shape": 3, "blocksize": 64}', b'{"shape": [2], "blocksize": 0}')
    for text in (b"", b"[]", b"{}", b"\xff", *wrong):
        broken = {**state, facts: torch.tensor(list(text), dtype=torch.uint8)}
        refusal_of(lambda broken=broken: from_bitsandbytes(broken), "'w' isn't as bitsandbytes keeps")


# ---- names and kinds of files


def test_another_steps_files_in_a_step_folder_are_refused_and_a_copy_named_best_loads(tmp_path):
    for step in (1, 2):
        save(tmp_path, model=net(float(step)), step=step)
    copied(tmp_path / "step-000001", tmp_path / "best")
    (tmp_path / "step-000002").rename(tmp_path / "away")
    copied(tmp_path / "step-000001", tmp_path / "step-000002")
    message = refusal_of(lambda: loaded(tmp_path / "step-000002"), "step 1", "named step-000002")
    assert "manifest.json" in message
    assert not is_complete(tmp_path / "step-000002")
    assert [(found.step, found.number) for found in survey(tmp_path)] == [(1, 1), (2, 0)]
    assert loaded(tmp_path) == 1.0  # the newest that is what it says
    assert loaded(tmp_path / "best") == 1.0
    assert loaded(tmp_path / "away") == 2.0
    save(tmp_path, model=net(3.0), step=2)  # what was no step 2 is set aside
    assert loaded(tmp_path) == 3.0


def within(seconds: float, call: Callable[[], None]) -> None:
    """``call``, in a thread that the test doesn't wait for longer."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for a file"
    if errors:
        raise errors[0]


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = {"a FIFO": os.mkfifo, "a socket": a_socket, "a device": a_link_to_a_device, "a folder": Path.mkdir}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, dcp_folder, kind):
    ours = saved(tmp_path / "run").rename(tmp_path / "best")
    step = saved(tmp_path / "other")
    others = copied(dcp_folder, tmp_path / "dcp")
    for folder in ("hf", "rank", "index"):
        (tmp_path / folder).mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps(mapped(weight=A)))
    places = [(ours, "manifest.json"), (ours, "shard-00000.safetensors"), (step, "manifest.json")]
    places += [(others, ".metadata"), (others, "__0_0.distcp"), (tmp_path / "rank", "x.pt")]
    places += [(tmp_path / "index", "a.safetensors")]
    places += [(tmp_path / "hf", name) for name in ("model.safetensors.index.json", "pytorch_model.bin")]
    for folder, name in places:
        content = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).unlink(missing_ok=True)
        KINDS[kind](folder / name)
        within(10.0, lambda: refusal_of(lambda: load(folder, model=net())))  # noqa: B023
        within(10.0, lambda: is_complete(folder))  # noqa: B023
        (folder / name).rmdir() if kind == "a folder" else (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
    refusal_of(lambda: loaded(tmp_path / "hf"))


def test_a_lock_that_is_a_link_or_another_programs_file_is_not_written_to(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    elsewhere.write_text("precious")
    ways: list[tuple[Callable[[Path], Any], str]] = [
        (lambda p: p.symlink_to(elsewhere), "a symbolic link, which isn't followed"),
        (lambda p: p.symlink_to(tmp_path / "nothing"), "a symbolic link, which isn't followed"),
        (lambda p: os.link(elsewhere, p), "another program's file"),
        (os.mkfifo, "it is a FIFO, expected a regular file"),
    ]
    for make, said in ways:
        make(run / LOCK)
        within(10.0, lambda: refusal_of(lambda: save(run, model=net(), step=1), said))  # noqa: B023
        (run / LOCK).unlink()
        assert elsewhere.read_text() == "precious" and not (tmp_path / "nothing").exists()
    (run / LOCK).write_bytes(bytes(300))  # of a power cut
    save(run, model=net(), step=1)
    FolderLock(run).close()
    save(run, model=net(), step=2)


def test_the_name_of_the_latest_is_not_written_through_a_link(tmp_path):
    elsewhere = tmp_path / "precious"
    elsewhere.write_text("precious")
    run = tmp_path / "run"
    save(run, model=net(), step=1)
    for name in (".torn-latest", "latest"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(elsewhere)
    save(run, model=net(), step=2)
    assert elsewhere.read_text() == "precious"
    assert (run / "latest").read_text() == "step-000002\n" and not (run / "latest").is_symlink()


def test_a_parameter_whose_name_the_format_keeps_is_refused_by_consolidate(tmp_path):
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    save(tmp_path / "run", model=model, step=1)
    refusal_of(lambda: consolidate(tmp_path / "run", tmp_path / "out"), "'__metadata__'")
    assert not (tmp_path / "out").exists()
