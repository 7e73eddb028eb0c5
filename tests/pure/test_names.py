"""The public surface: what ``shardwright`` exports, no more and no less; and one name for one thing."""

import ast
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import shardwright
from tests.ranks.cases import CASES

ROOT = Path(__file__).parents[2]

PUBLIC = """
BackwardPrefetch Blocks CPUOffloadPolicy DataParallelMeshDims DiskOffloadPolicy Explanation FSDPModule
FullyShardedDataParallel GradientReductionHandle Grouping Mesh MixedPrecisionPolicy OffloadPolicy
OptimizerOffloadPolicy Owned Publisher Receiver ReduceScatterBucketer ReduceScatterHandle SchedulePolicy
ShardPlacementResult Stats StepInBackward UnshardHandle WatchPolicy clip_grad_norm_ communication_s
context_parallel expert_parallel explain full_state_dict fully_shard install linear_cross_entropy lockstep
loss_weights mesh gathered nf4
offload_states other_params owned_params pickle_shards publish quantize_ register_fsdp_forward_method receive
record_function
reload_states scattered share_comm_ctx set_process set_transport set_watch stats stream_state_dict
uninstall
"""
NAMES = PUBLIC.split()


def test_the_public_names_are_these():
    assert sorted(getattr(shardwright, "__all__", [])) == sorted(NAMES)


def test_a_name_is_never_hidden_by_a_module_that_was_imported_before_it():
    """Python sets the attribute ``shardwright.X`` when it imports shardwright/X.py."""
    modules = {path.stem for path in (ROOT / "src" / "shardwright").iterdir()}
    assert all(isinstance(getattr(shardwright, name), ModuleType) for name in modules & set(NAMES))


def test_names_come_with_the_first_that_is_asked_for():
    code = (
        "import sys, shardwright\n"
        "assert shardwright.__version__[0].isdigit() and 'torch' not in sys.modules\n"
        "try: shardwright.__wrapped__\n"
        "except AttributeError: assert 'torch' not in sys.modules\n"
        "try: shardwright.nosuch\n"
        "except AttributeError as error: print(error)\n"
        "assert set(shardwright.__all__) < set(dir(shardwright))\n"
        "from shardwright import *\n"
        "print(fully_shard.__name__, explain.__name__, shardwright.lockstep.__name__, nf4.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert not done.stderr
    refused, told = done.stdout.splitlines()
    assert refused == "module 'shardwright' has no attribute 'nosuch'"
    assert told == "fully_shard explain lockstep shardwright.quantized.nf4"


def test_every_public_name_has_a_docstring_of_its_own():
    bare = [name for name in NAMES if not own_docstring(getattr(shardwright, name))]
    assert not bare, f"without a docstring: {bare}"


def own_docstring(thing: object) -> str:
    """The docstring written for this class or function: not inherited, not a dataclass's signature."""
    doc = thing.__doc__ or ""
    if inspect.isclass(thing) and (doc.startswith(f"{thing.__name__}(") or doc == thing.__mro__[1].__doc__):
        return ""
    return doc


def test_the_docstring_check_sees_through_inherited_ones():
    class Documented:
        """Something."""

    class Bare(Exception):
        pass

    Bare.__doc__ = Exception.__doc__
    assert own_docstring(Documented)
    assert not own_docstring(Bare)


def test_every_test_that_the_docs_name_is_there():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    files = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"\btest_\w+", page.read_text()):
            assert name in files or f"def {name}(" in tests, f"{page.name} names {name}"
        assert {*re.findall(r"\btest_cases\[(.+?)\]", page.read_text())} <= CASES.keys(), page.name


def test_every_link_between_pages_leads_to_a_file():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}"


def test_every_page_is_in_the_navigation_of_the_site():
    listed = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed, f"give these a line under nav of mkdocs.yml: {sorted(pages - listed)}"


def test_every_weakness_of_torchs_fully_shard_has_a_row():
    page = (ROOT / "docs" / "from-fsdp2.md").read_text().split("## What torch refuses or gets wrong")[1]
    numbers = set()
    for cell in re.findall(r"^\| ([\d, -]+) \|", page, re.MULTILINE):
        for part in cell.split(","):
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers == set(range(1, 52))


SAME_NAME = {
    "BackwardPrefetch": "public twice, as in torch: a policy's choice, and an argument of the wrapper class",
}
"""Classes of the package that share a name, and why they may."""

MOVED = {
    "bucketer": "ops.bucketer",
    "nf4": "quantized.nf4",
    "interchange": "quantized.interchange",
    "train.lora": "lora",
}
"""Documented modules that have moved; those of Lightning too, which tests/hf imports."""


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_has_moved_is_the_same_one_under_its_old_path(old):
    assert import_module(f"shardwright.{old}") is import_module(f"shardwright.{MOVED[old]}")


CORE = ("schedule", "engine", "params", "quantized", "transport", "observe")
"""The rooms whose public classes the glossary lists."""


def classes_of(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_no_two_classes_of_the_package_share_a_name():
    places = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in classes_of(path.read_text()):
            places[name].append(path.relative_to(ROOT / "src").as_posix())
    shared = {name: found for name, found in places.items() if len(found) > 1 and name not in SAME_NAME}
    assert not shared, f"give these different names: {shared}"
    assert all(len(places[name]) > 1 for name in SAME_NAME), "an exception isn't needed"


def test_the_glossary_has_every_class_of_the_core_under_its_room_and_no_other():
    page = (ROOT / "docs" / "glossary.md").read_text()
    for room in CORE:
        table = re.search(rf"^### `{room}/`\n(.*?)(?=^##|\Z)", page, re.M | re.S)
        assert table, f"docs/glossary.md has no section for {room}/"
        cells = re.findall(r"^\| (`.*?) \|", table[1], re.M)
        listed = set(re.findall(r"`(\w+)`", " ".join(cells)))
        files = (ROOT / "src" / "shardwright" / room).rglob("*.py")
        there = {name for path in files for name in classes_of(path.read_text()) if name[0] != "_"}
        missing, gone = there - listed, listed - there
        assert not missing, f"docs/glossary.md, {room}/: add a row for {sorted(missing)}"
        assert not gone, f"docs/glossary.md, {room}/: no class is called {sorted(gone)}"
