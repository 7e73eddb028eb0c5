"""The device path with one wait, record, release or kept reference left out; each in turn.

waits, releases: statements that only call ``wait``, ``land``, ``release``, ``free`` and the like. A loop
of nothing else, which would never end without it, ends in an error. Of a
``wait`` whose result is used: streams wait for nothing while it runs. Of ``changed=``, why a copy-in waits:
one reason.
records: ``Due(...)``; in its place comes one that was due long ago.
kept references: attributes that a ``wait`` empties are emptied at the end of ``__init__``; what another
method than ``wait`` has waited for is let go of at its end, and so is that of which a method keeps a part; of
what is added to ``kept``, or kept beside a record, a part is left out.
"""

import ast
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from tests.device.sim import without_waiting
from tests.replaced import PACKAGE, Site, replaced

KINDS_OF: dict[str, tuple[str, ...]] = {
    "ops/bucketer.py": ("sums in buckets",),
    "checkpoint/save.py": ("plain", "half"),
    "engine/optimizers/away.py": ("plain", "another dim", "offloaded optimizer", "state alone on the host"),
    "engine/step/backward.py": ("plain",),
    "engine/step/batches.py": ("plain", "hybrid, half", "different layers by rank, in a smaller world"),
    "engine/step/executor.py": (
        "plain",
        "hybrid",
        "hybrid, sharded over all",
        "smaller world",
        "offloaded",
        "steps in the backward, offloaded",
        "steps in the backward, state alone on the host",
    ),
    "engine/groups/gradient_state.py": (
        "plain",
        "offloaded",
        "steps in the backward, offloaded",
        "different layers by rank, offloaded",
    ),
    "engine/groups/group.py": (
        "plain",
        "another dim",
        "quantised",
        "quantised in a smaller world",
        "different quantised layers by rank",
    ),
    "engine/step/hooks.py": ("alone", "plain", "another dim", "hybrid", "groups cut in two"),
    "engine/optimizers/guard.py": (
        "offloaded",
        "offloaded, half",
        "offloaded in a smaller world",
        "different layers by rank, offloaded",
    ),
    "engine/groups/reducer.py": (
        "plain",
        "hybrid",
        "offloaded",
        "another dim",
        "steps in the backward, offloaded",
    ),
    "engine/step/runtime.py": ("plain", "half", "hybrid"),
    "module.py": ("plain", "half"),
    "params/binding.py": (
        "plain",
        "different layers by rank",
        "another dim",
        "another dim, in a smaller world",
    ),
    "engine/groups/decoding.py": (
        "quantised",
        "quantised in a smaller world",
        "different quantised layers by rank",
        "subclass",
    ),
    "params/rows.py": ("rows in use",),
    "params/smaller_world.py": ("smaller world",),
    "params/subclass.py": ("subclass", "subclass of two tensors"),
    "transport/base.py": ("plain", "hybrid", "different layers by rank"),
    "transport/collect.py": ("rows in use", "hybrid"),
    "transport/custom.py": ("custom collectives",),
    "transport/process_group.py": ("alone", "plain", "half", "hybrid", "rows in use"),
    "transport/streams.py": (
        "alone",
        "plain",
        "half",
        "hybrid",
        "offloaded",
        "gradients stay on the device",
        "state alone on the host",
        "steps in the backward, state alone on the host",
        "a hook on a stream",
    ),
    "transport/two_level.py": ("hybrid, sharded over all",),
}
"""By file the kinds of schedules that show what is left out of it; where a file isn't listed any may."""
ELSEWHERE = {
    "transport/cpu/": "moves bytes of hosts",
    "transport/device_times.py": "takes times, which nothing waits for",
    "transport/process.py": "ends connections of hosts",
    "transport/jobstore.py": "asks the store of the job, which is on a host",
    "observe/": "threads of the host that look at other ranks",
    "train/": "processes of the host, and the agreement of ranks before files are written",
    "plan/": "plans in numbers",
    "publishing/": "threads of the host; what it copies from a device, `wait_for_stream` waits for",
    "hf/": "agreement of ranks before files are read or written",
    "checkpoint/background.py": "a thread of the host",
    "checkpoint/remote.py": "a thread of the host",
    "checkpoint/load.py": "agreement of ranks before files are read",
    "checkpoint/shardfile.py": "removes copies on the host",
    "checkpoint/tools.py": "reads files, with no model",
}
"""Files and folders with such calls that aren't on the way of a device, with the reason."""
CALLS = {"wait", "wait_event", "wait_stream", "wait_on_host", "land", "release", "_release", "settle"}
CALLS |= {"filled", "forget_filled", "arrive", "forget", "give_up", "free", "_free", "synchronize"}


def sites(elsewhere: bool = False) -> list[Site]:
    """All of them, by file, in the order of the source. elsewhere: in files that no device has to do with."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
        if file.startswith(tuple(ELSEWHERE)) is not elsewhere:
            continue
        for number, (function, text, _) in enumerate(_places(tree)):
            found.append(Site(file, number, function, text))
    return found


@contextmanager
def left_out(site: Site) -> Iterator[None]:
    """Inside of it this process does without."""
    tree = ast.parse((PACKAGE / site.file).read_text())
    list(_places(tree))[site.number][2]()
    long_ago = SimpleNamespace(record_event=lambda _: SimpleNamespace(done=True), device=None)
    names = {
        "_due_long_ago": lambda: importlib.import_module("shardwright.transport.streams").Due(long_ago),
        "_without_waiting": without_waiting,
        "_never_ends": _never_ends,
    }
    with replaced(site.file, site.function, tree, names):
        yield


def _never_ends() -> None:
    raise AssertionError("a loop that never ends")


@contextmanager
def reached(sites: list[Site]) -> Iterator[set[tuple[str, str]]]:
    """What comes to hold ``(file, function)`` of those that are called inside."""
    found: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        for site in {(site.file, site.function): site for site in sites}.values():
            tree = ast.parse((PACKAGE / site.file).read_text())
            *path, name = site.function.split(".")
            body: Any = tree.body
            for part in (*path, name):
                [owner] = [node for node in body if getattr(node, "name", "") == part][:1]
                body = owner.body
            body.insert(0, ast.parse(f"_reached.add({(site.file, site.function)!r})").body[0])
            stack.enter_context(replaced(site.file, site.function, tree, {"_reached": found}))
        yield found


def _places(tree: ast.Module) -> Iterator[tuple[str, str, Any]]:
    """``(function, text, what leaves it out of the tree)``."""
    for owner in tree.body:
        if isinstance(owner, ast.FunctionDef):
            yield from _in_function(owner, owner.name)
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                yield from _in_function(method, f"{owner.name}.{method.name}")
        if isinstance(owner, ast.ClassDef):
            yield from _kept(owner)


def _in_function(function: ast.FunctionDef, name: str) -> Iterator[tuple[str, str, Any]]:
    alone = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    loops = [node.body for node in ast.walk(function) if isinstance(node, ast.While)]
    endless = {id(body[0]) for body in loops if len(body) == 1}
    for node in ast.walk(function):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _is_listed(call.func):
            fails = ast.parse("_never_ends()", mode="eval").body
            ends = id(node) not in endless or any(isinstance(n, ast.Call) for n in ast.walk(call.func.value))
            left = call.func.value if ends else fails
            yield name, ast.unparse(node), _setter(node, "value", left)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Due":
            yield name, ast.unparse(node), _becomes_long_ago(node)
        if isinstance(node, ast.Call) and id(node) not in alone:
            if isinstance(node.func, ast.Attribute) and node.func.attr == "wait":
                waiting = ast.Call(ast.Name("_without_waiting", ast.Load()), [node.func], [])
                yield name, ast.unparse(node), _setter(node, "func", waiting)
            for keyword in [keyword for keyword in node.keywords if keyword.arg == "changed"]:
                reasons = keyword.value.values if isinstance(keyword.value, ast.BoolOp) else [keyword.value]
                for place, reason in enumerate(reasons):
                    text = f"{ast.unparse(node)}, {ast.unparse(reason)}"
                    never, others = ast.Constant(False), [*reasons[:place], *reasons[place + 1 :]]
                    left = ast.BoolOp(ast.Or(), [never, *others]) if others else never
                    yield name, text, _setter(keyword, "value", left)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "kept":
            for side in ("left", "right") if isinstance(node.value, ast.BinOp) else ():
                text = f"{ast.unparse(getattr(node.value, side))}, kept"
                yield name, text, _setter(node.value, side, ast.List([], ast.Load()))
        if isinstance(node, ast.Assign) and _keeps_a_part(node):
            target = ast.unparse(node.targets[0])
            yield name, f"{target}, kept in part", _setter(node, "value", ast.Constant(None))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            parts = [ast.unparse(part) for part in node.value.elts]
            for place, text in enumerate(parts if parts and parts[0].startswith("Due(") else []):
                if place:
                    yield (
                        name,
                        f"{text}, kept",
                        _item_setter(node.value.elts, place, ast.List([], ast.Load())),
                    )


def _kept(owner: ast.ClassDef) -> Iterator[tuple[str, str, Any]]:
    methods = {method.name: method for method in owner.body if isinstance(method, ast.FunctionDef)}
    if not {"wait", "__init__"} <= methods.keys():
        return
    empty_anyway = {
        ast.unparse(node).split(":")[0].split(" = ")[0]
        for node in methods["__init__"].body
        if (isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).endswith((" = None", " = []")))
    }
    for method in (each for name, each in methods.items() if name != "wait"):
        for call in (node for node in ast.walk(method) if isinstance(node, ast.Call)):
            kept = ast.unparse(call.func).removesuffix(".wait")
            if (
                isinstance(call.func, ast.Attribute)
                and call.func.attr == "wait"
                and kept.startswith("self._")
            ):
                yield f"{owner.name}.{method.name}", f"{kept}, kept", _appender(method, f"{kept} = None")
    for node in ast.walk(methods["wait"]):
        text = ast.unparse(node)
        if text.startswith("self._") and text.endswith(_EMPTIED) and isinstance(node, ast.stmt):
            kept = text.removesuffix(".clear()").removesuffix(" = []").removesuffix(" = None")
            if kept not in empty_anyway:
                empties = f"{kept} = {'None' if text.endswith('None') else '[]'}"
                yield f"{owner.name}.__init__", f"{kept}, kept", _appender(methods["__init__"], empties)


def _keeps_a_part(node: ast.Assign) -> bool:
    """``self._x = (self._x[0], [])``: of what is in flight the rest is let go of."""
    target = ast.unparse(node.targets[0])
    parts = [ast.unparse(part) for part in node.value.elts] if isinstance(node.value, ast.Tuple) else []
    return target.startswith("self.") and f"{target}[0]" in parts


def _is_listed(method: ast.Attribute) -> bool:
    return method.attr in CALLS and not ast.unparse(method.value).endswith("_lock")  # of threads


_EMPTIED = (" = []", " = None", ".clear()")


def _setter(node: Any, field: str, value: ast.AST) -> Any:
    return lambda: setattr(node, field, value)


def _item_setter(items: list[Any], place: int, value: ast.AST) -> Any:
    return lambda: items.__setitem__(place, value)


def _appender(function: ast.FunctionDef, statement: str) -> Any:
    return lambda: function.body.extend(ast.parse(statement).body)


def _becomes_long_ago(node: ast.Call) -> Any:
    def change() -> None:
        node.func, node.args = ast.Name("_due_long_ago", ast.Load()), []

    return change
