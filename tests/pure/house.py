"""The rules of the house, read from source text alone: who may import whom, and how large things may grow.

Each rule takes the package as ``{"schedule/layout.py": source, ...}`` and returns its complaints, so that
test_house.py can also feed it bad sources. Optional extras have an adapter file of their own and are imported
at its top, hence the rule against imports inside functions has no exception.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

PACKAGE = "shardwright"

_parsed = cache(ast.parse)  # of each file once: a rule reads all of them

FLOORS = {
    "__main__": 17,
    "cli": 16,
    "": 15,  # the package itself: gives out the names of `public`
    "lightning": 14,  # another name, as those of fabric, bucketer, interchange and nf4 are
    "fabric": 14,
    "clients": 13,
    "finetune": 14,
    "hf": 13,
    "public": 14,
    "publishing": 12,
    "plan": 10,
    "plan.file": 3,
    "train": 12,
    "data": 11,
    "recipe": 10,
    "lora": 9,
    "optim": 10,
    "wrapper": 12,
    "api": 11,
    "module": 8,
    "ops": 8,
    "parallel": 8,
    "setters": 7,
    "quantize": 9,
    "engine": 6,
    "checkpoint": 6,
    "params": 5,
    "bucketer": 9,
    "transport": 4,
    "observe": 7,
    "xla": 8,
    "checkpoint.xla": 9,  # gives out the names of `xla.saving`
    "xla.files": 4,  # with torch alone: what checkpoints read and write of them
    "xla.placeholder": 4,  # what a parameter is known by
    "schedule": 3,
    "interchange": 5,
    "nf4": 5,
    "quantized": 2,
    "policy": 2,
    "checkpoint.url": 3,
    "extras": 2,
    "checksum": 0,
    "clock": 0,
    "files": 0,
    "columns": 0,
    "torch_fsdp": 1,
    "torch_private": 0,
    "mesh_sizes": 1,
    "options": 0,
    "errors": -1,
}
"""Room (top folder or file of the package, or one file of a folder) -> floor. A room imports only from lower
floors and itself."""

BANNED_NAMES = {"utils", "util", "common", "helper", "helpers", "manager", "context", "misc"}
BRIDGES = {
    "torchax": "xla/torch_bridge.py",
    "transformers": "hf/library.py",
    "datasets": "data/tables.py",
    "pyarrow": "data/tables.py",
}
CORE = {"engine", "params", "schedule", "transport", "wrapper", "checkpoint"}
DEVICE_TYPE = re.compile(r"(?<!torch\.)\b(cuda|rocm|hip|xpu|mps|hpu|npu)\b")
"""Names in a text; ``torch.cuda.graph`` is one of torch's own functions, of which a message may speak."""
# Of a step; of one that is traced; functions of their own, with their gradients. And of loads: of a module
# whose keys are renamed first; of what a load says.
HOOKS_FILES = (
    "engine/step/hooks.py",
    "plan/events.py",
    "ops/linear_loss.py",
    "parallel/exchange.py",
    "params/load_plain.py",
    "params/ragged.py",
    "wrapper/saving.py",
)
STAGES_FILE = "engine/groups/group.py"
KINDS = ("Buffer", "Comm", "ShardedParam")
"""What the house knows of buffers, transports and parameters; who inherits from them is a kind of them."""
FSDP_FILE = "torch_fsdp.py"
PRIVATE_FILE = "torch_private.py"
# Of optimizers, neither of modules nor of autograd; it stands below engine/, and refuses theirs.
OPTIMIZER_HOOK = ("xla/placeholder.py", "torch.optim.optimizer.register_optimizer_step_pre_hook")
STREAMS_FILE = "transport/streams.py"
OF_STREAMS = re.compile(
    r"torch\b.*\.(Stream|Event|StreamContext|stream|current_stream|set_stream|synchronize)"
    r"|.*\.(synchronize|record_stream|record_event|wait_event|wait_stream)"
)
"""Names by which a device's streams are made, ordered and waited for."""
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Edge:
    """Module ``source`` imports ``target`` (dotted, inside the package, "" is the package) at ``line``."""

    source: str
    target: str
    line: int


def module_name(path: str) -> str:
    """``"schedule/layout.py"`` -> ``"schedule.layout"``; ``"schedule/__init__.py"`` -> ``"schedule"``."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def edges(package: dict[str, str]) -> list[Edge]:
    """Every import of one module of the package by another."""
    modules = {module_name(path) for path in package}
    found = []
    for path, source in package.items():
        here = module_name(path)
        folder = here if path.endswith("__init__.py") else here.rpartition(".")[0]
        for node in ast.walk(_parsed(source)):
            for target in _targets(node, folder, modules):
                found.append(Edge(here, target, node.lineno))  # type: ignore[attr-defined]
    return found


def _targets(node: ast.AST, folder: str, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                yield alias.name[len(PACKAGE) + 1 :]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = f"{PACKAGE}.{folder}".rstrip(".").split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        if base.split(".")[0] != PACKAGE:
            return
        base = base[len(PACKAGE) + 1 :]
        for alias in node.names:
            inner = f"{base}.{alias.name}".lstrip(".")
            yield inner if inner in modules else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        name = str(getattr(node.args[0], "value", ""))
        if name.startswith(f"{PACKAGE}."):
            yield name[len(PACKAGE) + 1 :]


def room_of(module: str) -> str:
    """Its own, where it has a floor of its own, else its top folder or file."""
    return module if module in FLOORS else module.split(".")[0]


def arrows_up(package: dict[str, str]) -> list[str]:
    """Imports that run up the floors, or sideways into another room; rooms without a floor."""
    complaints = []
    rooms = {module_name(path).split(".")[0] for path in package}
    for room in sorted(rooms - FLOORS.keys()):
        complaints.append(f"{room or PACKAGE}: has no floor; add it to FLOORS")
    for edge in edges(package):
        source, target = room_of(edge.source), room_of(edge.target)
        if source != target and FLOORS.get(target, 99) >= FLOORS.get(source, 0):
            complaints.append(
                f"{edge.source or PACKAGE}:{edge.line}: imports {edge.target or PACKAGE}, floor "
                f"{FLOORS.get(target)} from floor {FLOORS.get(source)}; imports run down only"
            )
    return complaints


def circles(package: dict[str, str]) -> list[str]:
    """Import circles, each named once."""
    graph: dict[str, set[str]] = {module_name(path): set() for path in package}
    for edge in edges(package):
        if edge.target in graph and edge.target != edge.source:
            graph[edge.source].add(edge.target)
    complaints, finished = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            complaints.append("import circle: " + " -> ".join([*trail[trail.index(module) :], module]))
        elif module not in finished:
            for target in sorted(graph[module]):
                visit(target, [*trail, module])
            finished.add(module)

    for module in sorted(graph):
        visit(module, [])
    return complaints


def stray_bridges(package: dict[str, str]) -> list[str]:
    """Imports of a library that one file is there to keep replaceable."""
    complaints = []
    for path, source in package.items():
        for node in ast.walk(_parsed(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for library in {name.partition(".")[0] for name in names} & BRIDGES.keys():
                if path != BRIDGES[library]:
                    complaints.append(
                        f"{path}:{node.lineno}: imports {library}; only {BRIDGES[library]} does"
                    )  # type: ignore[attr-defined]
    return complaints


LOADED_WHEN_USED = re.compile(r"  # noqa: PLC0415 \w+ \w+")


def local_imports(package: dict[str, str]) -> list[str]:
    """Imports inside a function, but for those that say beside them what the import at the top would load."""
    complaints = set()
    for path, source in package.items():
        lines = source.splitlines()
        for function in _functions(_parsed(source)):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom) and not LOADED_WHEN_USED.search(
                    lines[node.lineno - 1]
                ):
                    complaints.add(f"{path}:{node.lineno}: import inside {function.name}; move it to the top")
    return sorted(complaints)


def bad_names(package: dict[str, str]) -> list[str]:
    """Modules and folders whose name says nothing."""
    return [
        f"{path}: {part!r} says nothing about what lives there"
        for path in package
        for part in path.removesuffix(".py").split("/")
        if part.lstrip("_") in BANNED_NAMES
    ]


def foreign_runtime(package: dict[str, str]) -> list[str]:
    """Imports of ``torch.distributed.fsdp`` but by one file, for its names: the runtime is written here."""
    complaints = []
    for path, source in package.items():
        if path in (FSDP_FILE, PRIVATE_FILE):
            continue
        for node in ast.walk(_parsed(source)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                names = [node.value]  # importlib.import_module("torch.distributed.fsdp")
            if any((name + ".").startswith("torch.distributed.fsdp.") for name in names):
                complaints.append(f"{path}:{getattr(node, 'lineno', 0)}: uses torch.distributed.fsdp")
    return complaints


def stray_hooks(package: dict[str, str]) -> list[str]:
    """Module, tensor or autograd hooks outside the one file that may set them."""
    complaints = []
    for path, source in package.items():
        if path in HOOKS_FILES:
            continue
        for node in ast.walk(_parsed(source)):
            name = ""
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                name = " ".join(found for found in names if (path, found) != OPTIMIZER_HOOK)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                name = f".{node.value}"  # getattr(module, "register_forward_hook")
            if re.search(r"\.register_\w*hook\b|\bautograd\.(function\.)?Function\b", name):
                complaints.append(
                    f"{path}:{getattr(node, 'lineno', 0)}: {name}; only {HOOKS_FILES[0]} sets hooks"
                )
    return complaints


def stray_streams(package: dict[str, str]) -> list[str]:
    """Streams and events of a device, and waits of the host for it, outside the one file that orders them."""
    complaints = []
    for path, source in package.items():
        if path == STREAMS_FILE:
            continue
        for node in ast.walk(_parsed(source)):
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in filter(OF_STREAMS.fullmatch, names):
                complaints.append(f"{path}:{getattr(node, 'lineno', 0)}: {name}; only {STREAMS_FILE} does")
    return complaints


def private_names(source: str) -> set[str]:
    """The private attributes that a file reads of whatever objects, by name or by string."""
    found = set()
    for node in ast.walk(_parsed(source)):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name):
            found.add(name)
    return found


def stray_private_names(package: dict[str, str], of_torch: set[str]) -> list[str]:
    """Private names of torch outside of the one file that may have them.

    of_torch: private attributes of torch's objects. An override may call what it overrides, by ``super()``.
    """
    complaints = []
    for path, source in package.items():
        if path == PRIVATE_FILE:
            continue
        tree = _parsed(source)
        inherited = {
            id(node)
            for function in _functions(tree)
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and node.attr == function.name
            and ast.unparse(node.value).startswith("super(")
        }
        bound: dict[str, str] = {}
        for node in ast.walk(tree):
            bound |= _bound_to_torch(node, bound)
        for node in ast.walk(tree):
            names = [*_bound_to_torch(node, bound).values()]
            if isinstance(node, ast.Attribute) and id(node) not in inherited:
                root, dot, rest = ast.unparse(node).partition(".")
                names = [bound.get(root, root) + dot + rest if node.attr.startswith("_") else ""]
                names += [f"torch.{node.attr}"] if node.attr in of_torch else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [f"torch.{node.value}" if node.value in of_torch else node.value]
            private = [name for name in names if re.fullmatch(r"torch(\.\w+)*\.\*?_[a-zA-Z][\w.]*", name)]
            if private:
                where = f"{path}:{getattr(node, 'lineno', 0)}"
                complaints.append(f"{where}: {private[0]} is private to torch; only {PRIVATE_FILE} has such")
    return complaints


def _bound_to_torch(node: ast.AST, bound: dict[str, str]) -> dict[str, str]:
    """What names stand for that this imports of torch, or assigns."""
    if isinstance(node, ast.Import):
        found = {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and not node.level:
        found = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
        root, dot, rest = ast.unparse(node.value).partition(".")
        value = bound.get(root, root) + dot + rest
        found = {target.id: value for target in node.targets if isinstance(target, ast.Name)}
    else:
        return {}
    return {name: value for name, value in found.items() if (value + ".").startswith("torch.")}


def stray_stages(package: dict[str, str]) -> list[str]:
    """Places that set the stage of a group past its setter, which knows what may follow what."""
    complaints = []
    for path, source in package.items():
        for function in _functions(_parsed(source)):
            if path == STAGES_FILE and function.name in ("__init__", "_move"):
                continue
            for node in ast.walk(function):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
                named = isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func)
                if (stored and node.attr == "stage") or (named and "'stage'" in ast.unparse(node)):
                    complaints.append(f"{path}:{node.lineno}: {ast.unparse(node)}; only _move sets a stage")
    return complaints


def device_types(package: dict[str, str]) -> list[str]:
    """Kinds of accelerators spelled out in the core: ``torch.accelerator`` knows which one there is. "cpu" is
    the host everywhere."""
    complaints = []
    for path, source in package.items():
        if path.partition("/")[0] not in CORE:
            continue
        tree = _parsed(source)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            said = node.value if isinstance(node, ast.Constant) and id(node) not in docs else ""
            said = node.attr.removeprefix("is_") if isinstance(node, ast.Attribute) else said
            if isinstance(said, str) and (found := DEVICE_TYPE.search(said)):
                complaints.append(f"{path}:{node.lineno} says {found[0]!r}: ask torch.accelerator")  # type: ignore[attr-defined]
    return complaints


def stray_kind_tests(package: dict[str, str]) -> list[str]:
    """Tests of which kind of buffer, transport or parameter something is, outside of the file of that kind.

    Elsewhere a property or a method of what they all are says what the caller needs to know.
    """
    trees = {path: _parsed(source) for path, source in package.items()}
    classes = [
        (path, node) for path in trees for node in ast.walk(trees[path]) if isinstance(node, ast.ClassDef)
    ]
    homes = {node.name: path for path, node in classes if node.name in KINDS}
    num_before = -1
    while len(homes) > num_before:  # until no class is added that inherits from one of them
        num_before = len(homes)
        homes |= {
            n.name: path for path, n in classes if homes.keys() & {_last_name(base) for base in n.bases}
        }
    complaints = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if any(homes[name] != path for name in _kinds_asked(node) & homes.keys()):
                line = getattr(node, "lineno", 0)
                complaints.append(f"{path}:{line}: {ast.unparse(node)}; ask for the fact, not for the kind")
    return complaints


def _kinds_asked(node: ast.AST) -> set[str]:
    """The names of the classes that this compares the class of an object with."""
    asked: list[ast.AST] = []
    if isinstance(node, ast.Call) and _last_name(node.func) in ("isinstance", "issubclass"):
        asked = list(node.args[1:])
    elif isinstance(node, ast.Compare) and re.search(r"\btype\(|\b__class__\b", ast.unparse(node)):
        asked = [node]
    elif isinstance(node, ast.MatchClass):
        asked = [node.cls]
    return {_last_name(each) for part in asked for each in ast.walk(part)}


def _last_name(node: ast.AST) -> str:
    """``"C"`` of ``C``, ``module.C`` and ``"C"``."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", getattr(node, "value", ""))
    return name if isinstance(name, str) else ""


def unbounded_groups(package: dict[str, str]) -> list[str]:
    """Process groups made without a time limit: torch's own is 10 or 30 minutes, whatever the job's is."""
    complaints = []
    for path, source in package.items():
        for node in ast.walk(_parsed(source)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            given = {keyword.arg for keyword in node.keywords}
            positional = len(node.args) > 1 and name == "new_group"
            if name in ("new_group", "init_process_group") and "timeout" not in given and not positional:
                complaints.append(f"{path}:{node.lineno}: {name} without a timeout")
    return complaints


SENDS_PICKLES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "self.broadcast"),  # the last one is Lightning's
}
READS_PICKLES = {"load", "loads", "Unpickler"}
UNPICKLES = {
    "checkpoint/dcpfile.py": "a file of others, by an Unpickler that makes nothing but its own descriptions",
    "checkpoint/torchfile.py": "a file of others, with weights_only=True",
    "xla/files.py": "a file of others, with weights_only=True",
    "clients/fabric.py": "what a checkpoint has beside the model, as weights_only= of Fabric.load says",
    "clients/lightning.py": "what a checkpoint has beside the model, as weights_only= of Trainer.fit says",
    "clients/strategies.py": "a file, as weights_only= of Fabric.load or Trainer.fit says",
    "torch_private.py": "torch's flight recorder of this very process",
}
"""Files that may read a pickle, none of which another rank has sent, and what they read."""


def pickles_between_ranks(package: dict[str, str]) -> list[str]:
    """Calls that have a rank unpickle what another one sent: who speaks in its place would run code there."""
    complaints = []
    for path, source in package.items():
        for node in ast.walk(_parsed(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
                if names & SENDS_PICKLES:
                    complaints.append(f"{path}:{node.lineno}: imports what pickles between ranks")
            name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
            owner, _, last = name.rpartition(".")
            if name in SENDS_PICKLES or last in SENDS_PICKLES:
                complaints.append(f"{path}:{node.lineno}: {name} pickles between ranks: send JSON")
            elif owner in ("pickle", "torch") and last in READS_PICKLES and path not in UNPICKLES:
                complaints.append(f"{path}:{node.lineno}: {name} reads a pickle")
    return complaints


def _functions(tree: ast.AST) -> Iterator[AnyFunction]:
    return (node for node in ast.walk(tree) if isinstance(node, AnyFunction))
