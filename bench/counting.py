"""What a call makes the host do, counted: Python calls, frames above a collective, kernels launched."""

import ast
import gc
import inspect
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Way(NamedTuple):
    """Frames between the hook that torch calls and a collective, outermost first: ``(file, function)``."""

    frames: tuple[tuple[str, str], ...]

    @property
    def num_files(self) -> int:
        """Distinct files among them."""
        return len({file for file, _ in self.frames})


class Seen(NamedTuple):
    """calls: of each function of the package. ways: the longest one to each collective, by its name."""

    calls: Counter[CodeType]
    ways: dict[str, Way]


def count_calls(step: Callable[[], None], folder: str, collectives: Mapping[str, CodeType]) -> Seen:
    """Run ``step``; count Python calls of functions below ``folder``, and frames above ``collectives``."""
    seen = Seen(Counter(), {name: Way(()) for name in collectives})
    names = {code: name for name, code in collectives.items()}

    def notice(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(folder):
            seen.calls[code] += 1
        if code in names:
            seen.ways[names[code]] = max(seen.ways[names[code]], _way(frame), key=lambda way: len(way.frames))

    before = sys.getprofile()
    with _no_collection():
        sys.setprofile(notice)
        try:
            step()
        finally:
            sys.setprofile(before)
    return seen


def count_instructions(step: Callable[[], None], folder: str) -> Counter[str]:
    """Run ``step``; count the instructions of functions below ``folder``, by file and function. They show a
    loop over ranks that calls nothing."""
    seen: Counter[str] = Counter()

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            seen[f"{frame.f_code.co_filename[len(folder) :].lstrip('/')} {frame.f_code.co_qualname}"] += 1
        return inside

    def notice(frame: FrameType, _: str, __: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    with _no_collection():
        sys.settrace(notice)
        try:
            step()
        finally:
            sys.settrace(before)
    return seen


class Function(NamedTuple):
    """A function that was run, and how many lines of code it has."""

    file: str
    name: str
    num_lines: int


def functions_run(codes: Iterable[CodeType]) -> list[Function]:
    """The functions among ``codes``, in the order of their files. Comprehensions and lambdas belong to the
    functions that they stand in. The lines of a function inside another one are counted once."""
    found, counted, lines_of = [], set[tuple[str, int]](), dict[str, set[int]]()
    for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
        if code.co_name.startswith("<"):
            continue
        file = code.co_filename
        if file not in lines_of:
            lines_of[file] = code_lines(Path(file).read_text())
        text, first = inspect.getsourcelines(code)
        lines = {(file, line) for line in lines_of[file] if first <= line < first + len(text)}
        found.append(Function(file, code.co_qualname, len(lines - counted)))
        counted |= lines
    return found


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that hold code: neither blank, nor a comment alone, nor of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        said = node.value if isinstance(node, ast.Expr) else None
        if isinstance(said, ast.Constant) and isinstance(said.value, str):
            lines.difference_update(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    return lines


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in the block: when it comes, and calls the recorder, is chance."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _way(frame: FrameType) -> Way:
    found = []
    for outer in _outwards(frame.f_back):
        file = outer.f_code.co_filename
        if "/torch/nn/modules/" in file or "/torch/autograd/" in file:
            break
        if not file.endswith("/torch/distributed/c10d_logger.py"):  # around each of torch's collectives
            found.append((file, outer.f_code.co_name))
    return Way(tuple(reversed(found)))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class KernelCount(TorchDispatchMode):
    """Counts operations that would each be a kernel on a GPU, asked for by functions below ``folder``.

    Views, allocations and ``detach`` are none; neither is what touches no element. A foreach operation is one
    where CUDA has a kernel for its lists, else as many as it has tensors. Collectives are counted in
    ``collectives``. ``kernels``: how many, by (operation, file:line that asked for it).
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        site = self._site()
        if site is None or func.is_view or name.split("::")[1].startswith(FREE):
            return result
        if name.startswith("c10d::"):
            self.collectives[name] += 1
        elif number := _num_kernels(name, args, result):
            self.kernels[name, site] += number
        return result

    def _site(self) -> str | None:
        for frame in _outwards(sys._getframe(2)):
            file = frame.f_code.co_filename
            if file.startswith(self.folder) and not is_around_autograd(frame):
                return f"{file[len(self.folder) :].lstrip('/')}:{frame.f_lineno}"
            if "/torch/nn/modules/" in file:
                return None
        return None


def is_around_autograd(frame: FrameType) -> bool:
    """Whether it is our frame below the whole of a backward, whose kernels aren't ours
    (``torch_private.before_backwards``)."""
    return frame.f_code.co_name == "checked" and frame.f_code.co_filename.endswith("torch_private.py")


FREE = ("empty", "new_empty", "detach", "resize_", "set_", "alias", "_reshape_alias", "lift_fresh", "item")
"""Beginnings of names of operations that launch nothing."""


def _num_kernels(name: str, args: Sequence[Any], result: Any) -> int:
    if "_foreach_" in name:
        lists = [each for each in args if isinstance(each, (list, tuple)) and _all_tensors(each)]
        return 1 if _is_fast(lists, mixed="copy" in name) else max(map(len, lists))
    touched = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
    return int(any(tensor.numel() for tensor in touched))


def _all_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(each, torch.Tensor) for each in values)


def _is_fast(lists: Sequence[Sequence[torch.Tensor]], mixed: bool) -> bool:
    """Whether CUDA has one kernel for these lists; ``mixed``: the lists may differ in dtype."""
    tensors = [tensor for each in lists for tensor in each]
    kinds = [{tensor.dtype for tensor in each} for each in lists]
    return (
        len({tensor.device for tensor in tensors}) == 1
        and all(tensor.layout is torch.strided for tensor in tensors)
        and all(torch.ops.aten.is_non_overlapping_and_dense(tensor) for tensor in tensors)
        and all(len(kind) == 1 for kind in kinds)
        and (mixed or len(set.union(*kinds)) == 1)
        and all(len({(t.shape, t.stride()) for t in row}) == 1 for row in zip(*lists, strict=True))
    )
