"""The package doesn't grow unseen: what its import loads, what a step runs, how much text and state it has.

python -m tests.ranks.test_ceilings    prints all that is counted, one per line; diff shows what has grown
"""

import ast
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from bench.counting import code_lines, count_calls, functions_run
from bench.model import Size, build, tokens
from tests.ranks.pool import run_ranks


class Ceiling(NamedTuple):
    """limit: the most that there may be. plan: what was planned. raised: why the limit is above that."""

    limit: int
    plan: int
    raised: str = ""


_PLANNED = "what users have of it was to stay: docs/design/README.md says what would have to leave"

_SUMMED = "a bit that flips in a message, in memory or in what is saved in the background is told: 190 lines"

_MANY = (
    "a job of 10,000 ranks starts and is watched, a store that is lost is told, a host that goes dark early "
    "is missed: 125 lines"
)

_ORDERED = "second hops between nodes keep one order: 6 lines"

_LEFT = "gradients of some ranks only, then frozen or zeroed: 20 lines; side streams of a device: 13"

_HOSTS = "words between hosts go through one rank of each, and no thread is woken for them: 140 lines"

_AHEAD = "a forward's first gathers are launched while words travel: 30 lines"

_MESHES = (
    "meshes of scripts and recipes; sequences, experts and layers that ranks share: 1,000 lines "
    "(src/shardwright/parallel); their prices in plans: 420; pipelines' checkpoints: 70"
)

_OWNED = "whole matrices on their owner, blocks, Muon: core 440, src 660"
_ALL_AXES = "experts and pipelines in recipes: 350; waits by axis, inputs on the host, rings: 360; plans: 130"
_STACKED = "adapters of stacked experts: 160 lines; codes of stacked and packed weights, of the core: 115"

_PUBLISHED = "weights leave as they are made (src/shardwright/publishing): 1,269 lines"

_APART = "what coded messages keep lies beside a transport, and not in parameters: 25 lines"

_SIMULATED = "tests/storm has 4,400, and made 1,100 superfluous: it finds what no other test did"

# The one place of these limits. Each is exact when it is set; lower it whenever the number has fallen.
CEILINGS = {
    "modules that the import loads": Ceiling(62, 75),
    "lines that the import loads": Ceiling(14_208, 14_500),
    "modules loaded after ten steps": Ceiling(82, 95),
    "lines loaded after ten steps": Ceiling(
        17_579, 17_000, f"{_MANY}; {_APART}; {_LEFT}; {_AHEAD}; {_OWNED}; {_ALL_AXES}"
    ),
    "files of a step": Ceiling(26, 24),
    "functions of a step": Ceiling(230, 210),
    "code lines of a step": Ceiling(2_110, 1_800, f"{_PLANNED}; {_AHEAD}"),
    "code lines of the core": Ceiling(
        12_631,
        9_700,
        f"{_PLANNED}; {_SUMMED}; {_MANY}; {_APART}; {_ORDERED}; {_LEFT}; {_HOSTS}; {_AHEAD}; {_STACKED}; "
        f"{_OWNED}",
    ),
    "code lines of src": Ceiling(
        43_003,
        33_200,
        f"{_PLANNED}; {_SUMMED}; {_MANY}; {_APART}; {_ORDERED}; {_LEFT}; {_HOSTS}; {_PUBLISHED}; {_AHEAD}; "
        f"{_MESHES}; {_STACKED}; {_OWNED}; {_ALL_AXES}",
    ),
    "code lines of tests": Ceiling(
        50_916,
        41_500,
        f"{_SIMULATED}; mutants of start-up and checkpoints: 290, of which 250 were paid; of the watch: 860; "
        "published weights: 700, vLLM 90; the simulated device: 200; shared sequences: 540; "
        "every mesh: 250; experts, recipes and plans of meshes: 600; stacked experts and torchao: 430; "
        "whole matrices and Muon: 900; the last meshes of recipes, plans, traces: 500",
    ),
    "words of README and docs": Ceiling(60_058, 60_000, "the page of long sequences and that of optimizers"),
    "mutable objects of modules": Ceiling(21, 20, "which context-parallel forward runs in a thread"),
}

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwright"
ROOMS = ("engine", "params", "schedule", "transport")
# The files that these rooms had when the limits were set, wherever they are now; and new files of the rooms.
CORE = {
    "": "setters",
    "engine": "asked costs gather_full listeners unit",
    "engine/building": "build checks clone deferred grouping torch_state",
    "engine/groups": "decoding gatherer gradient_state group reducer summed table",
    "engine/optimizers": "away guard in_backward registry",
    "engine/step": "backward batches consensus executor hooks runtime same_model",
    "params": """
        at_rest binding first_weights flat_param load_plain offload param placement ragged
        rows smaller_world subclass
    """,
    "quantized": "__init__ codec codecs module",
    "observe/memory": "accounts out_of_memory",
    "schedule": """
        balance check follower following grouping layout recorded schedule scheduler sync
    """,
    "transport": """
        attempt base channel collect custom device_times differences host_limits host_memory jobstore link
        liveness mesh process process_group recorder secret streams two_level watched
    """,
    "transport/cpu": """
        arena coder connection event_loop handshake message pages peers shm sockets transfer views
    """,
}

Counted = list[tuple[str, int]]
"""What a number is the sum of: names, and how much each counts for."""


def inside(path: Path) -> str:
    """The path as it is listed: from the package's folder, or from the repository's."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def each_once(names: Iterable[str]) -> Counted:
    return [(name, 1) for name in names]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


# ---- what the import loads, and a step runs


def loaded() -> Counted:
    """The modules of the package that this process has imported, and their lines."""
    names = sorted(name for name in sys.modules if name.split(".")[0] == "shardwright")
    return [(name, lines_of(Path(sys.modules[name].__file__ or ""))) for name in names]


def in_a_rank(rank: int, world: int) -> tuple[Counted, Counted, list[tuple[str, str, int]]]:
    """What is loaded by the import, and after ten steps; functions of a step, with file, name and lines."""
    for name, _ in loaded():
        del sys.modules[name]  # the server that ranks are forked from has imported it
    fully_shard = import_module("shardwright").fully_shard
    imported = loaded()
    size = Size(layers=2, width=64, vocab=64, sequence=16, batch=1)
    model, batch = build(size), tokens(size, rank, 0)
    for module in [*model.blocks, model]:
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(10):
        step()
    after_steps = loaded()
    runs = Counter()
    # Steps whose number is a power of two also look at what else is in memory: these are steps 11 to 15.
    for _ in range(5):
        # The pauses leave little to chance: in each step, what is done every few milliseconds is due, and
        # rank 0 has to wait for rank 1. Without them, between 266 and 273 functions ran.
        time.sleep(0.2 + 0.05 * rank)
        runs.update(set(count_calls(step, str(PACKAGE), {}).calls))
    functions = functions_run(code for code, number in runs.items() if number > 1)
    return imported, after_steps, [(inside(Path(file)), name, lines) for file, name, lines in functions]


def of_two_ranks() -> dict[str, Counted]:
    """Rank 0 of two on one host, which hence use shared memory."""
    imported, after_steps, functions = run_ranks(2, in_a_rank)[0]
    step = [(f"{file} {name}", lines) for file, name, lines in functions]
    return {
        "modules that the import loads": each_once(name for name, _ in imported),
        "lines that the import loads": imported,
        "modules loaded after ten steps": each_once(name for name, _ in after_steps),
        "lines loaded after ten steps": after_steps,
        "files of a step": each_once(sorted({file for file, _, _ in functions})),
        "functions of a step": each_once(name for name, _ in step),
        "code lines of a step": step,
    }


# ---- how much text there is, and what state modules have


def of_text() -> dict[str, Counted]:
    """Of the files that are there, whether they are committed or not."""
    package = {inside(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    src = [(name, len(code_lines(source))) for name, source in package.items()]
    core, tests = core_files(), sorted(ROOT.glob("tests/**/*.py"))
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return {
        "code lines of the core": [(name, lines) for name, lines in src if name in core],
        "code lines of src": src,
        "code lines of tests": [(inside(path), len(code_lines(path.read_text()))) for path in tests],
        "words of README and docs": [(inside(path), len(path.read_text().split())) for path in pages],
        "mutable objects of modules": each_once(mutable_objects(package)),
    }


def core_files() -> set[str]:
    """The files of CORE, as paths in the package."""
    return {f"{folder}/{name}.py".lstrip("/") for folder, names in CORE.items() for name in names.split()}


CONTAINERS = {"bytearray", "dict", "list", "set"}
KINDS = {"ContextVar", "Counter", "Lock", "OrderedDict", "RLock", "count", "defaultdict", "deque", "local"}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
CHANGES |= {"sort", "update"}


def mutable_objects(package: dict[str, str]) -> list[str]:
    """What modules bind to a name and change later, each as "file name".

    That is: names that a function binds anew (``global``); containers that are empty at first, or that some
    function changes; weak dictionaries, context variables, locks; instances of those classes of the package
    whose methods set attributes. A table that no function changes isn't counted. A ``functools.cache`` isn't
    either: nothing but its function writes into it, and without it the function returns the same.
    """
    trees = {path: ast.parse(source) for path, source in package.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    kinds = KINDS | {node.name for node in nodes if isinstance(node, ast.ClassDef) and has_state(node)}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    changed = {name for function in functions for node in ast.walk(function) for name in changed_by(node)}
    found = []
    for path, tree in trees.items():
        rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                if name in rebound or is_mutable(node.value, kinds, name in changed):
                    found.append(f"{path} {name}")
    return found


def has_state(node: ast.ClassDef) -> bool:
    """Whether methods of the class set attributes, or it is a container; a frozen one has none."""
    if any("frozen=True" in ast.unparse(each) for each in node.decorator_list):
        return False
    attributes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    sets = any(isinstance(each.ctx, ast.Store) and last_name(each.value) == "self" for each in attributes)
    return sets or any(last_name(base) in CONTAINERS | KINDS for base in node.bases)


def changed_by(node: ast.AST) -> Iterator[str]:
    """Names of containers that this changes: by a method, or by setting or deleting an item."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield last_name(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        yield last_name(node.func.value)


def is_mutable(value: ast.AST | None, kinds: set[str], changed: bool) -> bool:
    """Whether ``value`` makes what is counted; ``changed``: what it is bound to is changed by a function."""
    if isinstance(value, ast.Call):
        made, given = last_name(value.func), value.args or value.keywords
        return made in kinds or made.startswith("Weak") or (made in CONTAINERS and (changed or not given))
    if isinstance(value, ast.Dict | ast.List):
        return changed or not (value.keys if isinstance(value, ast.Dict) else value.elts)
    return changed and isinstance(value, ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def last_name(node: ast.AST) -> str:
    """``"c"`` of ``c`` and of ``a.b.c``."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


# ---- the tests


def report(what: str, counted: Counted) -> str:
    """The number, its limit, and all that was counted."""
    limit, plan, _ = CEILINGS[what]
    said = "".join(f"\n    {size:5} {name}" for name, size in counted)
    return f"{what}: {sum(size for _, size in counted)}, at most {limit} (planned: {plan}){said}"


REMEDY = """
To see what has grown, run `python -m tests.ranks.test_ceilings` here and on the commit before, and compare
both with diff. Take out as much as came in. Where mending a fault needs more, raise the limit in CEILINGS of
tests/ranks/test_ceilings.py, and write the reason beside it."""


@pytest.fixture(scope="module")
def found() -> dict[str, Counted]:
    return of_two_ranks() | of_text()


@pytest.mark.each_case
@pytest.mark.parametrize("what", CEILINGS)
def test_the_package_has_not_grown(what, found):
    number = sum(size for _, size in found[what])
    assert number, f"nothing was counted: {what}"
    if number > CEILINGS[what].limit:
        pytest.fail(f"{report(what, found[what])}\n{REMEDY}", pytrace=False)


def test_every_file_of_the_core_is_listed_wherever_it_is():
    gone = sorted(name for name in core_files() if not (PACKAGE / name).is_file())
    assert not gone, (
        f"CORE lists {gone}, not in src/shardwright. A file that has moved, to whichever folder, keeps its "
        "entry, with the new path. Take out the entry of one that was deleted, or merged into a listed file."
    )
    there = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    new = sorted({inside(path) for path in there if code_lines(path.read_text())} - core_files())
    assert not new, f"CORE lacks {new}, which are in {', '.join(ROOMS)}: add them, so that they are counted"


def test_lines_of_code_are_told_from_words():
    source = (
        '"""Words."""\n\n# words\nx = """a\n\nb"""  # words\ndef f():\n    """Words\n    """\n    return x\n'
    )
    assert code_lines(source) == {4, 5, 6, 7, 10}


def test_a_function_is_counted_without_its_lambdas_and_each_line_once():
    def outer():
        def inner():
            """Words."""
            return [(lambda: 1)() for _ in range(2)]

        return inner()

    functions = functions_run(count_calls(outer, str(ROOT / "tests"), {}).calls)
    assert [(each.name.split(".")[-1], each.num_lines) for each in functions] == [("outer", 4), ("inner", 0)]


def test_state_of_modules_is_told_from_tables():
    package = {
        "state.py": """
            empty: dict[str, int] = {}
            seen = set()
            known = WeakSet()
            table = {"a": 1}
            parts = [1]
            number = 0
            lock = threading.Lock()
            holder = other.Holder()
            def write():
                global number
                table["b"] = 2
                parts.append(2)
        """,
        "other.py": """
            class Holder:
                def __init__(self): self.held = None
            @dataclass(frozen=True)
            class Choice:
                def __post_init__(self): self.checked = True
            class Plain:
                def call(self): return 1
            TABLE = {"a": 1}
            NAMES = list("a")
            chosen = Choice()
            called = Plain()
            number = 0
            @cache
            def square(x): return x * x
        """,
    }
    found = mutable_objects({path: textwrap.dedent(source) for path, source in package.items()})
    names = ("empty", "seen", "known", "table", "parts", "number", "lock", "holder")
    assert found == [f"state.py {name}" for name in names]


if __name__ == "__main__":
    for what, counted in (of_two_ranks() | of_text()).items():
        print(report(what, counted))
