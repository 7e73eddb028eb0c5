"""The pure rooms with one comparison, constant or return turned; each in turn, beside the tests that hold it.

    python -m tests.pure.mutants                    all of them; prints those that no test sees
    python -m tests.pure.mutants schedule/check.py  those of some files
    python -m tests.pure.mutants --each 40          the first of every 40

orders: ``<`` becomes ``<=`` and the like, so what is just equal goes the other way.
numbers: one more; twice as much, of a float. Those of constants of the module, too.
decisions: ``==`` and ``!=``, ``is`` and ``is not``, ``in`` and ``not in``, ``and`` and ``or``, ``True`` and
``False`` change places, a ``not`` is left out, and what is asked by itself is asked the other way round.
returns: nothing is returned.
steps: a statement that only calls, or that empties something, is left out; what is done under a lock, or any
other ``with``, is done without it.
keys: of a key that is put together of parts (an f-string with a ``/``) one part is left out.

What is only words (f-strings, what is raised) and ``assert`` are left as they are. Tests are collected once;
each mutant has a fork of that process, in which its function has other code. What fails, ends or hangs there
has been seen.
"""

import argparse
import ast
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from tests.replaced import PACKAGE, Site, function_of, module_of, replaced

ORDERS = frozenset({"orders", "numbers"})
ALL = ORDERS | {"decisions", "returns"}
STEPS = ALL | {"steps", "keys"}


class Held(NamedTuple):
    """Files whose mutants of these kinds the tests see. but: words of names of tests that take too long."""

    files: tuple[str, ...]
    kinds: frozenset[str]
    tests: tuple[str, ...]
    but: tuple[str, ...] = ()


HELD = (
    Held(
        (
            "schedule/check.py",
            "schedule/follower.py",
            "schedule/following.py",
            "schedule/scheduler.py",
            "schedule/recorded.py",
            "schedule/schedule.py",
            "schedule/sync.py",
        ),
        ALL,
        ("test_follower_steps.py", "test_schedule.py", "../storm/test_steps.py", "test_exposed.py"),
        ("fresh", "in_every_process", "larger_jobs", "every_way"),
    ),
    Held(("schedule/layout.py",), ALL, ("test_layout.py",)),
    Held(("schedule/grouping.py",), ALL, ("test_grouping.py",)),
    Held(
        (
            "observe/ledger/late.py",
            "observe/ledger/lateness.py",
            "observe/watch/waits.py",
            "observe/ledger/ledger.py",
            "observe/ledger/slices.py",
            "observe/ledger/slow_links.py",
        ),
        ORDERS,
        ("test_late.py", "test_ledger_written.py", "test_ledger.py", "test_lateness.py"),
        ("of_200_random_jobs", "in_95_of_100_windows", "take_turns_besides"),
    ),
    Held(
        ("observe/watch/diagnosis.py", "observe/watch/findings.py", "observe/watch/table.py"),
        ORDERS,
        ("test_diagnosis.py",),
    ),
    Held(
        ("engine/step/consensus.py",),
        STEPS,
        ("../storm/test_steps.py", "../storm/test_nights.py"),
        ("fresh", "in_every_process", "larger_jobs", "every_way", "goes_dark"),
    ),
    Held(
        ("transport/attempt.py",),
        STEPS,
        ("test_attempt.py", "test_welcome.py", "../storm/test_nights.py"),
        ("fresh", "in_every_process", "same_nights", "found_a_fault", "goes_dark", "flips"),
    ),
    Held(("transport/jobstore.py",), STEPS, ("test_jobstore.py",)),
    Held(("observe/watch/status_exchange.py",), STEPS, ("test_status_exchange.py",)),
    Held(("observe/watch/watchdog.py",), STEPS, ("test_watchdog.py",)),
    Held(
        ("checkpoint/folder.py", "checkpoint/writer.py"),
        STEPS,
        (
            "../storm/test_checkpoints.py",
            "../ranks/test_checkpoint_lines.py",
            "test_foreign_files.py::test_another_steps_files_in_a_step_folder_are_refused_and_a_copy_named_best_loads",
            "test_foreign_files.py::test_an_argument_of_save_that_is_wrong_is_named_before_anything_is_written",
            "test_foreign_files.py::test_integers_of_numpy_and_torch_are_integers",
            "test_foreign_files.py::test_a_manifest_that_is_none_is_refused_with_its_name",
        ),
        ("new_nights", "extra_object", "two_ranks", "kill-1]", "cut-1]", "EIO-1]", "ENOSPC-1]", "EACCES-1]"),
    ),
    Held(("plan/simulate.py",), ORDERS, ("test_simulate_written.py",)),
    Held(
        ("plan/search.py",),
        frozenset({"orders"}),
        ("test_plan_search.py",),
        (
            "greedy_is_within",
            "search_reshards",
            "what_was_found",
            "smaller_budget",
            "the_front_is",
            "search_keeps",
        ),
    ),
)


def mutants(files: Sequence[str] = ()) -> list[Site]:
    """All of them, of all files or of these, in the order of the source. Those of the same text in one
    function are numbered."""
    found: list[Site] = []
    seen: dict[str, int] = defaultdict(int)
    for held in HELD:
        for file in held.files:
            if files and file not in files:
                continue
            tree = ast.parse((PACKAGE / file).read_text())
            for number, place in enumerate(_places(tree, held.kinds)):
                mutant = Site(file, number, place.function, place.text)
                seen[str(mutant)] += 1
                times = seen[str(mutant)]
                found.append(mutant._replace(text=f"{place.text} ({times})") if times > 1 else mutant)
    return found


@contextmanager
def turned(mutant: Site) -> Iterator[None]:
    """Inside of it this process runs the mutant."""
    [held] = [held for held in HELD if mutant.file in held.files]
    tree = ast.parse((PACKAGE / mutant.file).read_text())
    place = list(_places(tree, held.kinds))[mutant.number]
    place.turn()
    if not mutant.function:
        _set_constant(mutant.file, place.statement)
        yield
    elif isinstance(place.statement, ast.arguments):
        function, own = function_of(mutant.file, mutant.function), place.statement
        values = [_value_of(each, function.__globals__) for each in own.defaults]
        named = zip(own.kwonlyargs, own.kw_defaults, strict=True)
        function.__defaults__ = tuple(values)
        function.__kwdefaults__ = {a.arg: _value_of(d, function.__globals__) for a, d in named if d}
        yield
    else:
        with replaced(mutant.file, mutant.function, tree, {}):
            yield


def _value_of(expression: ast.expr, names: dict[str, Any]) -> Any:
    return eval(ast.unparse(expression), names)


def _set_constant(file: str, statement: Any) -> None:
    """In its module, and in those that have imported it."""
    module = module_of(file)
    [target] = statement.targets
    before = vars(module)[target.id]
    after = _value_of(statement.value, vars(module))
    for other in [*sys.modules.values()]:
        if getattr(other, "__name__", "").startswith(("shardwright", "tests")):
            for name in [
                name for name, value in vars(other).items() if value is before and name == target.id
            ]:
                setattr(other, name, after)


# ---- places


class _Place(NamedTuple):
    function: str
    text: str
    turn: Callable[[], None]
    statement: Any = None


_OPPOSITE: dict[type, tuple[str, type]] = {
    ast.Lt: ("orders", ast.LtE),
    ast.LtE: ("orders", ast.Lt),
    ast.Gt: ("orders", ast.GtE),
    ast.GtE: ("orders", ast.Gt),
    ast.Eq: ("decisions", ast.NotEq),
    ast.NotEq: ("decisions", ast.Eq),
    ast.Is: ("decisions", ast.IsNot),
    ast.IsNot: ("decisions", ast.Is),
    ast.In: ("decisions", ast.NotIn),
    ast.NotIn: ("decisions", ast.In),
    ast.And: ("decisions", ast.Or),
    ast.Or: ("decisions", ast.And),
}


def _places(tree: ast.Module, kinds: frozenset[str]) -> Iterator[_Place]:
    for owner in tree.body:
        if isinstance(owner, ast.Assign) and isinstance(owner.targets[0], ast.Name):
            values = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple)
            for place in _within(owner, "", kinds) if isinstance(owner.value, values) else ():
                yield place._replace(statement=owner)
        functions = owner.body if isinstance(owner, ast.ClassDef) else [owner]
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for function in functions:
            if isinstance(function, ast.FunctionDef):
                own = prefix + function.name
                for place in _within(function.args, own, kinds):
                    yield place._replace(statement=function.args)
                for number, statement in enumerate(function.body):
                    if not isinstance(statement, _LEFT):
                        yield from _without(statement, _putter(function.body, number), own, kinds)
                        yield from _within(statement, own, kinds)


_LEFT = (ast.JoinedStr, ast.Raise, ast.Assert)


def _without(
    node: ast.AST, put: Callable[[Any], None], function: str, kinds: frozenset[str]
) -> Iterator[_Place]:
    """A statement that is left out, and what stands in its place."""
    if "steps" not in kinds:
        return
    if isinstance(node, ast.With):
        items = ", ".join(map(_said, node.items))
        alike = ast.If(ast.Constant(True), node.body, [])
        if all(item.optional_vars is None for item in node.items):
            yield _Place(function, f"with {items}: without", lambda: put(alike))
        return
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    empties = isinstance(node, ast.Assign) and ast.unparse(node.value) in _EMPTY
    if (calls or empties) and not ast.unparse(node).startswith(_TELLS):
        yield _Place(function, f"{_said(node)}: left out", lambda: put(ast.Pass()))


_EMPTY = ("None", "False", "0", "''", "()", "[]", "{}", "set()", "b''", "float('inf')")
_TELLS = ("logger.", "warnings.", "warn(")


def _parts(node: ast.JoinedStr, function: str) -> Iterator[_Place]:
    if any(isinstance(part, ast.Constant) and "/" in str(part.value) for part in node.values):
        for place, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                put = _putter(node.values, place)
                text = f"{_said(node)}: without {ast.unparse(part.value)}"
                yield _Place(function, text, lambda put=put: put(ast.Constant("")))


def _within(node: Any, function: str, kinds: frozenset[str]) -> Iterator[_Place]:
    for kind, text, turn in _turns(node):
        if kind in kinds:
            yield _Place(function, text, turn)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment") or getattr(node, "arg", "") == "strict":
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.JoinedStr) and "keys" in kinds:
                yield from _parts(child, function)
            if not isinstance(child, ast.AST) or isinstance(child, _LEFT):
                continue
            put = _putter(value, place) if isinstance(value, list) else _setter(node, field)
            yield from _without(child, put, function, kinds)
            for kind, text, other in _others(child, node):
                if kind in kinds:
                    yield _Place(function, text, lambda put=put, other=other: put(other))
            yield from _within(child, function, kinds)


def _turns(node: Any) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Of a node that stays where it is: (kind, in words, what turns it)."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            kind, opposite = _OPPOSITE[type(operator)]
            yield (
                kind,
                f"{_said(node)}: {_sign(opposite)}",
                lambda p=place, o=opposite: _put(node.ops, p, o()),
            )
    if isinstance(node, ast.BoolOp):
        kind, opposite = _OPPOSITE[type(node.op)]
        yield kind, f"{_said(node)}: {_sign(opposite)}", lambda: setattr(node, "op", opposite())
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) not in _NOTHING:
        yield "returns", f"{_said(node)}: None", lambda: setattr(node, "value", ast.Constant(None))
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for place, test in enumerate(tests if isinstance(node, _ASKS) else ()):
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            negated = ast.UnaryOp(ast.Not(), test)
            put = _putter(node.ifs, place) if isinstance(node, ast.comprehension) else _setter(node, "test")
            yield "decisions", f"if {_said(test)}: if not", lambda put=put, negated=negated: put(negated)


_ASKS = (ast.If, ast.IfExp, ast.While, ast.comprehension)
_NOTHING = ("None", "False")


def _others(node: Any, parent: Any) -> Iterator[tuple[str, str, ast.expr]]:
    """What may stand in the place of a node: (kind, in words, that)."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "decisions", f"{_said(node)}: without not", node.operand
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        yield "decisions", f"{_said(parent)}: {not value}", ast.Constant(not value)
    elif isinstance(value, int | float):
        more = value + 1 if isinstance(value, int) else 2 * value or 1.0
        yield "numbers", f"{_said(parent)}: {value} is {more}", ast.Constant(more)


def _said(node: Any) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 72 else f"{text[:56]} ... {text[-11:]}"


def _sign(operator: type) -> str:
    compared = ast.BoolOp(operator(), [ast.Name("a"), ast.Name("b")])
    if not issubclass(operator, ast.boolop):
        compared = ast.Compare(ast.Name("a"), [operator()], [ast.Name("b")])
    return ast.unparse(compared)[2:-2]


def _put(items: list[Any], place: int, value: Any) -> None:
    items[place] = value


def _putter(items: list[Any], place: int) -> Callable[[Any], None]:
    return lambda value: _put(items, place, value)


def _setter(node: Any, field: str) -> Callable[[Any], None]:
    return lambda value: setattr(node, field, value)


# ---- running


class _Reached(NamedTuple):
    """Of a test as it is: processor seconds, and the functions ``(file, function)`` that it came to."""

    seconds: float
    functions: frozenset[tuple[str, str]]


class Runner:
    """Has the place of pytest's loop over tests. found: by mutant the test that saw it; "" where none did."""

    def __init__(self, held: Held, chosen: Sequence[Site], tell: Callable[[Site, str], None]) -> None:
        self.held, self.chosen, self.tell = held, chosen, tell

    def pytest_configure(self) -> None:
        """Every test gives the same examples in each fork, and says no more than that it failed."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutants", deadline=None, derandomize=True, database=None, phases=phases
        )
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            test = getattr(item, "obj", None)
            if hasattr(test, _SETTINGS):
                setattr(
                    test, _SETTINGS, hypothesis.settings(getattr(test, _SETTINGS), max_examples=_EXAMPLES)
                )
        gc.collect()
        gc.freeze()
        reached = [_forked(lambda item=item: self._reach(item)) for item in session.items]
        reached = [_Reached(found[0], frozenset(map(tuple, found[1]))) for found in reached if found]
        assert len(reached) == len(session.items), "a test fails without a mutant"
        lately: list[int] = []
        for mutant in self.chosen:
            place = (mutant.file, mutant.function)
            may = [n for n, each in enumerate(reached) if place in each.functions or not mutant.function]
            may.sort(key=lambda n: (n not in lately[-3:], reached[n].seconds))
            limits_s = {n: _LEAST_S + _TIMES * reached[n].seconds for n in may}
            number = _forked(lambda m=mutant, limits_s=limits_s: self._see(m, limits_s, session.items))
            seen = "it ended or hung" if number is None else ""
            if number is not None and number >= 0:
                seen = session.items[number].name
                lately = [n for n in lately if n != number] + [number]
            self.tell(mutant, seen)
        return True

    def _reach(self, item: pytest.Item) -> Any:
        found = set()
        files = {str(PACKAGE / file): file for file in self.held.files}

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename in files:
                name = frame.f_code.co_qualname.partition(".<locals>")[0]
                found.add((files[frame.f_code.co_filename], name))

        threading.setprofile(note)
        sys.setprofile(note)
        passed = _passes(item)
        sys.setprofile(None)
        return [time.process_time(), sorted(found)] if passed else []

    def _see(self, mutant: Site, limits_s: dict[int, float], items: Sequence[pytest.Item]) -> int:
        with turned(mutant):
            for number, limit_s in limits_s.items():
                signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)  # ends the process
                if not _passes(items[number]):
                    return number
        return -1


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


_EXAMPLES = 10
_SETTINGS = "_hypothesis_internal_use_settings"
_MEMORY_NBYTES = 3 << 30
_IDLE_S = 20.0
_LEAST_S, _TIMES = (
    1.0,
    4.0,
)  # processor time of a test beside a mutant: so much, and so often what it takes else


def _forked(call: Callable[[], Any]) -> Any:
    """What it returns, in a fork of this process; None where that ends, hangs or takes too much memory."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_NBYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            os.write(write, json.dumps(call()).encode())
        finally:
            os._exit(0)
    os.close(write)
    _end_if_idle(pid)
    with open(read, "rb") as told:
        text = told.read()
    return json.loads(text) if text else None


def _end_if_idle(pid: int) -> None:
    """Wait until it ends; end it where it has done nothing for long."""
    used, since, pause = -1, time.monotonic(), 0.005
    while not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        now = sum(map(int, _stat(Path(f"/proc/{pid}"))[11:13]))
        # One that waits for a core, beside others, isn't idle.
        if now != used or any(_stat(task)[0] == "R" for task in Path(f"/proc/{pid}/task").iterdir()):
            used, since = now, time.monotonic()
        elif time.monotonic() - since > _IDLE_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return


def _stat(of: Path) -> list[str]:
    try:
        return (of / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # a thread that has just ended
        return ["R"]


def run(chosen: Sequence[Site], tell: Callable[[Site, str], None]) -> None:
    """Tell of each mutant which test has seen it ("": none). In this process, which must have no threads."""
    for held in HELD:
        own = [mutant for mutant in chosen if mutant.file in held.files]
        tests = [f"tests/pure/{name}" for name in held.tests]
        if own:
            arguments = ["-o", "addopts=", "-s", "-p", "no:cacheprovider", "-p", "no:terminal", *tests]
            arguments += ["-k", " and ".join(f"not {word}" for word in held.but)] if held.but else []
            code = pytest.main(arguments, plugins=[Runner(held, own, tell)])
            assert code == 0, f"pytest ended with {code}"


def main() -> None:
    """The command (see above)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--only", default="", help="those whose text has it")
    parser.add_argument("--json", action="store_true", help="a line for each")
    options = parser.parse_args()
    count = [0, 0]

    def tell(mutant: Site, seen: str) -> None:
        count[bool(seen)] += 1
        if options.json:
            print(json.dumps([str(mutant), seen]), flush=True)
        elif not seen:
            print(mutant, flush=True)

    chosen = [mutant for mutant in mutants(options.files) if options.only in str(mutant)]
    run(chosen[:: options.each], tell)
    if not options.json:
        print(f"{sum(count)} mutants, {count[1]} seen, {count[0]} not")


if __name__ == "__main__":
    main()
