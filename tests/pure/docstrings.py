"""What the docstrings of public functions must say, read from source text alone.

A name is public if a module of ``PUBLIC`` exports it; of a class its methods are, and those that it inherits
from classes of this package. The rules:

- ``Args:`` names each parameter, in the order of the signature, and no other. Of a class that is a dataclass
  or has an ``__init__`` these are its fields or parameters; ``Attributes:`` may stand in its place.
- ``Returns:`` or ``Yields:`` stands where the annotation isn't ``None``; a property needs its sentence only.
- A function that is given a model, and each method of one, says who must call it: which ranks, or that it is
  local. Plans are left out, for which no ranks are needed.
- ``Raises:`` names each exception that the function raises itself, or by a function or constructor that it
  calls by name: one of its own file is followed, of one of another file the docstring is believed. What an
  ``except`` around the call takes doesn't count. A base class stands for its subclasses.
- Of a tensor that is taken or returned the shape and the dtype are said, or that any will do; seconds and
  bytes are called so where the name ends in ``_s``, ``_nbytes`` and the like.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
PACKAGE = "shardwright"
CHECKPOINTS = ("checkpoint", "checkpoint.convert", "checkpoint.tools", "checkpoint.xla")
LIBRARIES = ("xla", "xla.checkpoint", "xla.files", "hf", "clients.fabric", "clients.lightning")
OTHERS = ("wrapper", "parallel", "plan", "plan.cluster", "lora", "quantized.nf4", "quantized.interchange")
PUBLIC = ("public", "optim", "publishing.engines", *CHECKPOINTS, *LIBRARIES, *OTHERS)
"""Modules whose names are for users; `shardwright` itself gives out the names of `public`."""

CANNOT_RAISE = {
    "_unit": "refuses modules that aren't sharded; one with FSDPModule's methods is",
    "memory_of": "the same",
}
"""Function or method -> why what it raises can't be raised where public functions call it."""

NEVER_RAISES = {
    "wrapper.fsdp1: FullyShardedDataParallel.apply": ("InputError", "for arguments that it leaves out"),
    "wrapper.fsdp1: FullyShardedDataParallel.clip_grad_norm_": ("RuntimeError", "leaves the option out"),
    "parallel.mesh: mesh": ("RuntimeError TypeError", "joins axes of one mesh, which have names"),
    "hf.load: load": ("ConfigError StageError", "of a plan, and of a model that is running"),
    "hf.load: shard": ("ConfigError StageError", "of a plan"),
    "hf.load: read_weights": ("StageError", "of a model that is running"),
    "hf.trainer: ShardedTrainer.save_model": ("InputError", "of a model without shards or adapters"),
    "clients.lightning: TrainerStrategy.setup": ("ConfigError StageError", "of a plan"),
    "clients.fabric: ShardwrightStrategy.setup_module": ("ConfigError StageError", "of a plan"),
    "clients.fabric: ShardwrightStrategy.setup_module_and_optimizers": (
        "ConfigError StageError",
        "of a plan",
    ),
}
"""Public function -> exceptions that what it calls can raise, and why not here."""

MADE_BY = {
    "Publisher": "publish",
    "Receiver": "receive",
    "ReduceScatterHandle": "reduce_scatter_async",
    "TrainStep": "make_train_step",
}
"""Class -> the public function that makes its instances; the docstring names it in place of Args."""

NO_SHAPE = {
    "wrapper.fsdp1: FullyShardedDataParallel.named_buffers": "the model's own buffers, as torch gives them"
}
"""Public function -> why nothing is to be said of its tensors' shapes and dtypes."""

SHAPE = re.compile(r"\[[^\]]*\]|\b(shapes?|scalar|\d-d|\d-D|one element|logical|parameters?)\b|\b[Aa]s ``")
DTYPE = re.compile(
    r"\b(dtypes?|u?int\d+|fp\d+|bfloat16|float\d+|floating point|unchanged|parameters?)\b|\b[Aa]s ``"
)
"""What says the shape of a tensor, and its dtype; parameters are what the model has."""
UNITS = {
    re.compile(r"_s$|_seconds$|timeout$"): re.compile(r"\b[Ss]econds?\b"),
    re.compile(r"_nbytes$|_mb$|budget$|(^|_)memory$|bandwidth$"): re.compile(r"\b([Bb]ytes?|[KMGT]iB)\b"),
}
"""Name of a number -> what must say its unit."""

SAYS_WHO = re.compile(r"\b(ranks?|process(es)?|thread|Local|Trainer calls)\b|[Nn]o communication")
HAS_NO_EFFECT = re.compile(r"^(Accepted|Symmetric memory isn't supported)")
MODELS = ("FSDPModule", "FullyShardedDataParallel")

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples", "Warns")
HEADER = re.compile(rf"^({'|'.join(SECTIONS)}):$")
ITEM = re.compile(r"^    (\*{0,2}[\w.]+): \S")


@dataclass(frozen=True)
class Documented:
    """A public function or class: ``node`` of ``module``; ``owner`` is the class of a method."""

    name: str
    module: str
    node: AnyFunction | ast.ClassDef
    owner: ast.ClassDef | None = None


class Package:
    """The sources of a package, ``{"plan/search.py": source}``, and where each name is from."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {_module_name(path): ast.parse(source) for path, source in sources.items()}
        self._found: dict[tuple[str, str], tuple[str, ast.stmt] | None] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The module that defines a function or class which ``module`` calls so, and its definition."""
        if (module, name) not in self._found:
            self._found[module, name] = self._find(module, name)
        return self._found[module, name]

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        for node in reversed(self.trees[module].body):
            if isinstance(node, AnyFunction | ast.ClassDef) and node.name == name:
                return module, node
            if (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
            ):  # FSDP = FullySharded...
                return self.find(module, node.value.id) if isinstance(node.value, ast.Name) else None
        source, theirs = self._imported(module).get(name, ("", ""))
        return self.find(source, theirs) if source in self.trees and theirs else None

    def _imported(self, module: str) -> dict[str, tuple[str, str]]:
        """Name in a module -> the module of this package that it is imported from, and its name there."""
        if module not in self._imports:
            self._imports[module] = {
                alias.asname or alias.name: ((node.module or "")[len(PACKAGE) + 1 :], alias.name)
                for node in ast.walk(self.trees[module])
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
                for alias in node.names
            }
        return self._imports[module]

    def exported(self, module: str) -> list[str]:
        """What ``__all__`` lists; without one, every function and class without an underscore."""
        body = self.trees[module].body
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return ast.literal_eval(node.value)
        return [n.name for n in body if isinstance(n, AnyFunction | ast.ClassDef) and n.name[0] != "_"]

    def documented(self) -> list[Documented]:
        """All that must have a docstring, each once."""
        found: dict[int, Documented] = {}
        for module in PUBLIC:
            for name in self.exported(module):
                place = self.find(module, name)
                if place is None:
                    assert name in self.trees, f"{module}.{name} was not found"
                    continue
                home, node = place
                assert isinstance(node, AnyFunction | ast.ClassDef)
                found.setdefault(id(node), Documented(name, home, node))
                if isinstance(node, ast.ClassDef):
                    for where, owner in self.lineage(home, node):
                        for method in methods_of(owner):
                            if method.name[0] != "_":
                                label = f"{node.name}.{method.name}"
                                found.setdefault(id(method), Documented(label, where, method, owner))
        return list(found.values())

    def lineage(self, module: str, cls: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, as far as they are of this package."""
        yield module, cls
        for base in cls.bases:
            place = self.find(module, ast.unparse(base).partition("[")[0])
            if place is not None and isinstance(place[1], ast.ClassDef):
                yield from self.lineage(place[0], place[1])

    @cached_property
    def parents(self) -> dict[str, set[str]]:
        """Exception -> its bases, near and far."""
        bases = {
            node.name: [ast.unparse(base) for base in node.bases]
            for tree in self.trees.values()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }

        def above(name: str) -> set[str]:
            if name in bases:
                return {name}.union(*map(above, bases[name]))
            builtin = getattr(builtins, name.rpartition(".")[2], None)
            return {name, *(cls.__name__ for cls in getattr(builtin, "__mro__", ()))}

        return {name: above(name) for name in {*bases, *dir(builtins)}}

    def is_kind_of(self, error: str, names: set[str]) -> bool:
        """Whether an exception is one of these, or derived from one."""
        return bool(self.parents.get(error, {error}) & names)

    # ---- what is raised

    def raised(self, item: Documented) -> set[str]:
        """What a function raises, by the rule above; of a class, what making an instance does."""
        if isinstance(item.node, ast.ClassDef):
            return self._of_class(item.module, item.node, set())
        return self._of_function(item.module, item.node, item.owner, set())

    def _of_class(self, module: str, cls: ast.ClassDef, seen: set[int]) -> set[str]:
        raised: set[str] = set()
        for where, owner in self.lineage(module, cls):
            for method in methods_of(owner):
                if method.name in ("__init__", "__post_init__", "__new__"):
                    raised |= self._of_function(where, method, owner, seen)
        return raised

    def _of_function(
        self, module: str, function: AnyFunction, owner: ast.ClassDef | None, seen: set[int]
    ) -> set[str]:
        if id(function) in seen:  # it calls itself
            return set()
        return self._in_block(function.body, module, owner, seen | {id(function)})

    def _in_block(
        self, nodes: list[ast.stmt], module: str, owner: ast.ClassDef | None, seen: set[int]
    ) -> set[str]:
        raised: set[str] = set()
        for node in nodes:
            raised |= self._in_node(node, module, owner, seen)
        return raised

    def _in_node(self, node: ast.AST, module: str, owner: ast.ClassDef | None, seen: set[int]) -> set[str]:
        raised: set[str] = set()
        if isinstance(node, ast.Try):
            inside = self._in_block(node.body, module, owner, seen)
            for handler in node.handlers:
                taken = _caught(handler)
                inside = {error for error in inside if not self.is_kind_of(error, taken)}
                raised |= self._in_block(handler.body, module, owner, seen)
            return raised | inside | self._in_block([*node.orelse, *node.finalbody], module, owner, seen)
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(error).rpartition(".")[2]
            if self.is_kind_of(name, {"BaseException"}):
                raised.add(name)
        if isinstance(node, ast.Call):
            raised |= self._by_call(node.func, module, owner, seen)
        for child in ast.iter_child_nodes(node):
            raised |= self._in_node(child, module, owner, seen)
        return raised

    def _by_call(self, called: ast.expr, module: str, owner: ast.ClassDef | None, seen: set[int]) -> set[str]:
        if ast.unparse(called).rpartition(".")[2] in CANNOT_RAISE:
            return set()
        if isinstance(called, ast.Attribute):
            return self._by_attribute(called, module, owner, seen)
        place = self.find(module, called.id) if isinstance(called, ast.Name) else None
        if place is None:
            return set()
        where, node = place
        if where != module:
            return self._told(node)
        if isinstance(node, ast.ClassDef):
            return self._of_class(where, node, seen)
        return self._of_function(where, node, None, seen) if isinstance(node, AnyFunction) else set()

    def _by_attribute(
        self, called: ast.Attribute, module: str, owner: ast.ClassDef | None, seen: set[int]
    ) -> set[str]:
        """Of ``self.method``, ``Class.method``, ``file.function``; of other objects the class isn't known."""
        named = ast.unparse(called.value)
        place = (module, owner) if named in ("self", "cls") else self.find(module, named)
        if place is not None and isinstance(place[1], ast.ClassDef):
            for where, cls in self.lineage(*place):
                for method in methods_of(cls):
                    if method.name == called.attr:
                        return self._of_function(where, method, cls, seen)
        file = ".".join(part for part in self._imported(module).get(named, ()) if part)
        found = self.find(file, called.attr) if file in self.trees else None
        return self._told(found[1]) if found is not None else set()

    def _told(self, node: ast.AST) -> set[str]:
        return {name for name in told_to_raise(node) if self.is_kind_of(name, {"BaseException"})}

    # ---- what is missing

    def complaints(self, item: Documented) -> list[str]:
        """What the docstring of a public function or class lacks, or says too much."""
        said, doc = sections(item.node), ast.get_docstring(item.node) or ""
        place = f"{item.module or PACKAGE}: {item.name}"
        if said is None:
            return [f"{place}: has no docstring"]
        found = []
        wanted, given = self.parameters(item), [*said.get("Args", {}), *said.get("Attributes", {})]
        if given != wanted:
            found.append(f"{place}: Args are {given}, expected {wanted}")
        if returns_something(item.node) and not {"Returns", "Yields"} & said.keys():
            found.append(f"{place}: has no Returns")
        told = {*raises_of(said), *NEVER_RAISES.get(place, ("", ""))[0].split()}
        missing = {error for error in self.raised(item) if not self.is_kind_of(error, told)}
        if missing:
            found.append(f"{place}: Raises lacks {sorted(missing)}")
        if self.is_given_a_model(item) and not SAYS_WHO.search(doc) and not HAS_NO_EFFECT.match(doc):
            found.append(f"{place}: doesn't say who must call it")
        found += [f"{place}: {complaint}" for complaint in self._unsaid(item, said, place)]
        if "Raises" not in said and re.search(r"\bRaises: ", doc):
            found.append(f"{place}: Raises is no section")
        return found

    def _unsaid(self, item: Documented, said: dict[str, dict[str, str]], place: str) -> Iterator[str]:
        """What isn't said of shapes, dtypes and units."""
        texts = {**said.get("Args", {}), **said.get("Attributes", {})}
        given = {name: (kind, texts.get(name, "")) for name, kind in self.annotations(item).items()}
        if isinstance(item.node, AnyFunction) and item.node.returns is not None:
            returned = {**said.get("Returns", {}), **said.get("Yields", {})}.get("")
            text = returned or (ast.get_docstring(item.node) or "").partition("\n\n")[0]
            given[item.node.name] = (ast.unparse(item.node.returns), text)
        for name, (kind, text) in given.items():
            if re.search(r"\bTensor\b", kind) and "Callable" not in kind and place not in NO_SHAPE:
                lacks = [what for what, says in (("shape", SHAPE), ("dtype", DTYPE)) if not says.search(text)]
                if lacks:
                    yield f"{name} is a tensor, and nothing says its {' and '.join(lacks)}"
            for of_names, says in UNITS.items():
                number = re.search(r"\b(float|int)\b", kind)
                if number and of_names.search(name) and not says.search(text):
                    yield f"{name} has a unit, and nothing says it"

    def annotations(self, item: Documented) -> dict[str, str]:
        """Parameter or field -> its annotation, of those that have one."""
        wanted, node = self.parameters(item), item.node
        lineage = self.lineage(item.module, node) if isinstance(node, ast.ClassDef) else []
        owners = [owner for _, owner in lineage]
        made = [method for owner in owners for method in methods_of(owner) if method.name == "__init__"]
        found: dict[str, str] = {}
        for function in [node] if isinstance(node, AnyFunction) else made:
            spec = function.args
            given = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
            found = {arg.arg: ast.unparse(arg.annotation) for arg in given if arg.annotation} | found
        for owner in owners:
            fields = [field for field in owner.body if isinstance(field, ast.AnnAssign)]
            found = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields} | found
        return {name: kind for name, kind in found.items() if name in wanted}

    def is_given_a_model(self, item: Documented) -> bool:
        """Whether it is a method of a sharded model, or a function with a parameter of that name."""
        if isinstance(item.node, ast.ClassDef) or is_property(item.node) or item.module.startswith("plan"):
            return False
        return item.name.partition(".")[0] in MODELS or "model" in _parameters(item.node)

    def parameters(self, item: Documented) -> list[str]:
        """The names that Args has to list; none of a class without fields and ``__init__``, as an enum is."""
        node = item.node
        if isinstance(node, ast.ClassDef):
            if f"``{MADE_BY.get(node.name)}``" in (ast.get_docstring(node) or ""):
                return []
            for _, owner in self.lineage(item.module, node):
                fields = [
                    statement.target.id
                    for statement in owner.body
                    if isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and statement.target.id[0] != "_"
                    and "ClassVar" not in ast.unparse(statement.annotation)
                ]
                if any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list):
                    return fields
                made = [method for method in methods_of(owner) if method.name == "__init__"]
                if made:
                    return _parameters(made[0])
            return []
        return [] if is_property(node) else _parameters(node)


def sections(node: ast.AST) -> dict[str, dict[str, str]] | None:
    """Section -> item -> its text, of a docstring; None without one. Of Returns the item is ""."""
    doc = ast.get_docstring(node) if isinstance(node, AnyFunction | ast.ClassDef | ast.Module) else None
    if doc is None:
        return None
    found: dict[str, dict[str, str]] = {}
    items: dict[str, str] | None = None
    name, above = "", ""
    for line in doc.splitlines():
        header = None if above else HEADER.match(line)  # what reads them wants a blank line above
        above = line
        if header:
            items, name = found.setdefault(header[1], {}), ""
        elif line and line[0] != " ":
            items = None
        elif items is not None and line:
            item = ITEM.match(line)
            if item and [*found][-1] not in ("Returns", "Yields", "Examples"):
                name = item[1]
            items[name] = items.get(name, "") + line.strip() + " "
    return found


def raises_of(said: dict[str, dict[str, str]] | None) -> list[str]:
    return [name for name in (said or {}).get("Raises", {}) if name]


def told_to_raise(node: ast.AST) -> set[str]:
    """The names after "Raises:" in the docstring of any function, whether it is public or not."""
    doc = ast.get_docstring(node) if isinstance(node, AnyFunction | ast.ClassDef) else None
    return set(re.findall(r"\b[A-Z]\w+", (doc or "").partition("Raises:")[2]))


def methods_of(cls: ast.ClassDef) -> list[AnyFunction]:
    return [node for node in cls.body if isinstance(node, AnyFunction)]


def is_property(node: AnyFunction) -> bool:
    return any(ast.unparse(d).endswith(("property", ".setter")) for d in node.decorator_list)


def returns_something(node: AnyFunction | ast.ClassDef) -> bool:
    if isinstance(node, ast.ClassDef) or is_property(node) or node.returns is None:
        return False
    return ast.unparse(node.returns) not in ("None", "NoReturn", "Iterator[None]")


def _parameters(function: AnyFunction) -> list[str]:
    spec = function.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args) if arg.arg not in ("self", "cls")]
    if spec.vararg:
        names.append(f"*{spec.vararg.arg}")
    names += [arg.arg for arg in spec.kwonlyargs]
    return [*names, f"**{spec.kwarg.arg}"] if spec.kwarg else names


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds}


def _module_name(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_at(root: Path) -> Package:
    """The package of which the folder ``root`` holds the sources."""
    paths = sorted(root.rglob("*.py"))
    return Package({path.relative_to(root).as_posix(): path.read_text() for path in paths})
