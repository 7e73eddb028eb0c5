"""Public functions say what they take, give and raise; the rules of docstrings.py see one that doesn't."""

from pathlib import Path

import pytest

import shardwright
from tests.pure import docstrings

PACKAGE = docstrings.package_at(Path(shardwright.__file__).parent)


def test_every_public_function_says_what_it_takes_gives_and_raises():
    found = PACKAGE.documented()
    complaints = [complaint for item in found for complaint in PACKAGE.complaints(item)]
    assert not complaints, f"{len(found)} public functions and classes\n" + "\n".join(complaints)


def test_what_the_package_exports_is_looked_at():
    names = {item.name for item in PACKAGE.documented()}
    modules = {"nf4"}
    assert {*shardwright.__all__} - modules <= names
    assert {"FSDPModule.set_requires_gradient_sync", "FSDPModule.unsharded", "Cluster.load"} <= names


@pytest.mark.parametrize("table", ["CANNOT_RAISE", "NEVER_RAISES", "MADE_BY", "NO_SHAPE"])
def test_each_exception_to_the_rules_is_needed(table, monkeypatch):
    found = PACKAGE.documented()
    for name in [*getattr(docstrings, table)]:
        with monkeypatch.context() as patched:
            patched.delitem(getattr(docstrings, table), name)
            of_it = [item for item in found if name in (item.name, f"{item.module}: {item.name}")]
            assert any(map(PACKAGE.complaints, of_it or found)), f"{name} is not needed (any more)"


ERRORS = "class ShardError(Exception):\n    pass\nclass FileError(ShardError):\n    pass\n"


def complaints_of(source: str, **others: str) -> list[str]:
    """Of a package with this file as its public names."""
    others = {f"{name}.py": text for name, text in others.items()}
    files = {"public.py": source, "errors.py": ERRORS, **others}
    package = docstrings.Package(files | {f"{m.replace('.', '/')}.py": "" for m in docstrings.PUBLIC[1:]})
    return [complaint for item in package.documented() for complaint in package.complaints(item)]


GOOD = '''
from shardwright.errors import ShardError
from shardwright.other import checked

def f(a: int, *more: int, b: str = "") -> int:
    """Do it.

    Args:
        a: a number.
        *more: numbers
            on two lines: of them.
        b: text.

    Returns:
        The sum.

    Raises:
        ShardError: it is negative.
    """
    _check(a)
    try:
        checked(a)
    except ShardError:
        return 0
    return a

def _check(a):
    if a < 0:
        raise ShardError
'''
OTHER = 'def checked(a):\n    """Check. Raises: FileError for a file."""\n'


def test_a_docstring_that_says_everything_passes():
    assert complaints_of(GOOD, other=OTHER) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("        b: text.\n", "", "Args are"),
        ("        b: text.\n", "        b: text.\n        c: gone.\n", "Args are"),
        ("        a: a number.\n", "", "Args are"),
        ("    Returns:\n        The sum.\n", "", "has no Returns"),
        ("    Raises:\n        ShardError: it is negative.\n", "", "Raises lacks ['ShardError']"),
        ("        ShardError: it", "        FileError: it", "Raises lacks ['ShardError']"),
        (
            "    except ShardError:",
            "    except KeyError:\n        raise ValueError from None\n    except FileError:",
            "V",
        ),
        ("    Raises:\n        ShardError:", "    Raises: ShardError", "Raises is no section"),
        ("Do it.\n\n", "Do it.\n", "Args are []"),
        ("(a: int", "(model: int", "doesn't say who must call it"),
    ],
)
def test_a_docstring_that_leaves_something_out_is_seen(old, new, expected):
    assert old in GOOD
    source = GOOD.replace(old, new)
    assert any(expected in complaint for complaint in complaints_of(source, other=OTHER))


TENSORS = '''
def f(rows: Tensor, wait_s: float, keep_nbytes: int | None, hook: Callable[[Tensor], None]) -> Tensor:
    """Do it.

    Args:
        rows: [n, width], of any dtype.
        wait_s: seconds to wait.
        keep_nbytes: bytes to keep.
        hook: called first.

    Returns:
        The sum, of shape () in fp32.
    """
'''


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", None),
        ("[n, width], of", "what is summed, of", "rows is a tensor, and nothing says its shape"),
        ("[n, width], of any dtype", "[n, width]", "rows is a tensor, and nothing says its dtype"),
        ("of shape () in fp32", "on every rank", "f is a tensor, and nothing says its shape and dtype"),
        ("seconds to wait", "how long to wait", "wait_s has a unit, and nothing says it"),
        ("bytes to keep", "what to keep", "keep_nbytes has a unit, and nothing says it"),
    ],
)
def test_a_tensor_has_shape_and_dtype_and_a_number_its_unit(old, new, expected):
    found = complaints_of(TENSORS.replace(old, new) if old else TENSORS)
    assert found == ([f"public: f: {expected}"] if expected else [])


def test_what_a_called_function_is_documented_to_raise_counts_unless_it_is_caught():
    source = GOOD.replace("    except ShardError:", "    except KeyError:")
    source = source.replace("ShardError: it", "KeyError: it")
    (complaint,) = complaints_of(source, other=OTHER)
    assert complaint.endswith("Raises lacks ['FileError', 'ShardError']")


def test_methods_of_bases_and_fields_of_dataclasses_are_looked_at():
    source = '''
from dataclasses import dataclass
from shardwright.other import Base

@dataclass(frozen=True)
class Policy(Base):
    """What is chosen."""
    depth: int = 1
'''
    base = "class Base:\n    def grow(self, by: int) -> None:\n        pass\n"
    assert complaints_of(source, other=base) == [
        "public: Policy: Args are [], expected ['depth']",
        "other: Policy.grow: has no docstring",
    ]
