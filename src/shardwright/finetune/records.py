"""Text and JSONL as examples: tokens, and which of them are learned.

    {"text": ...}                                    all of it is learned
    {"prompt": ..., "completion": ...}               the completion, and the end of the text
    {"messages": [{"role": ..., "content": ...}]}    what the assistant says; needs a chat template

Text that is no JSONL is one example per file. Every rank reads all of it, and raises the same errors.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.errors import DataError
from shardwright.train.config import DataConfig
from shardwright.train.data import corpus_files, hash_of, heldout_indices, hold_out

_AT_ONCE = 64  # texts given to the tokenizer: what it returns is large
_KINDS = '{"text"}, {"prompt", "completion"} or {"messages"}'
Segment = tuple[str, bool]


@dataclass(frozen=True)
class Example:
    """``tokens`` int32 (n,), and which of them are ``learned``, bool (n,): predicted from those before."""

    tokens: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class Texts:
    """Examples to train on and held out; ``are_records``: of JSONL; number and hash of what was read, and
    what was left out, as a line to show."""

    train: list[Example]
    heldout: list[Example]
    are_records: bool
    num: int
    sha256: str
    left_out: tuple[str, ...] = ()


def read_texts(config: DataConfig, tokenizer: Any) -> Texts:
    """Read and tokenise the corpus; whole files or records are held out, of a single text its end.

    Raises:
        DataError: no such path, no text in it, data that isn't text, or a line of JSONL that is no
            record, by file and line.
    """
    files, left_out = corpus_files(config)
    records = [_holds_records(name, content) for name, content in files]
    if all(records):
        return replace(_read_records(files, config, tokenizer), left_out=left_out)
    if any(records):
        raise DataError(
            f"data.path = {config.path!r} holds {sum(records)} .jsonl and {len(files) - sum(records)} other "
            'files: choose with data.suffixes, as [".jsonl"]'
        )
    train, heldout = (_of_texts(contents, tokenizer) for contents in hold_out(files, config.heldout_share))
    return Texts(train, heldout, False, len(files), hash_of(files), left_out)


def _holds_records(name: str, content: bytes) -> bool:
    """By the name; .json, as others name such files, where the first line is a record already."""
    if not name.endswith(".json"):
        return name.endswith((".jsonl", ".ndjson"))
    try:
        first = json.loads(content.lstrip().partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(first, dict) and _kind(first) is not None


def _kind(record: dict[str, Any]) -> tuple[str, ...] | None:
    return next((k for k in (("text",), ("prompt", "completion"), ("messages",)) if {*k} <= {*record}), None)


def _of_texts(contents: Sequence[bytes], tokenizer: Any) -> list[Example]:
    texts = [content.decode("utf-8", errors="replace") for content in contents]
    found: list[Example] = []
    for first in range(0, len(texts), _AT_ONCE):
        ids = tokenizer(texts[first : first + _AT_ONCE], add_special_tokens=False, verbose=False)["input_ids"]
        found += [_example([(part, True)], tokenizer) for part in ids]
    return found


def _read_records(files: Sequence[tuple[str, bytes]], config: DataConfig, tokenizer: Any) -> Texts:
    lines: list[tuple[str, bytes]] = []
    parsed: list[list[Segment]] = []
    for name, content in files:
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                where = f"{name}, line {number}"
                lines.append((where, line))
                parsed.append(_segments(where, line, config.mask_prompts, tokenizer))
    if len(lines) < 2:
        raise DataError(
            f"data.path = {config.path!r}: {len(lines)} record(s), expected 2 or more to hold one out"
        )
    total = sum(len(line) for _, line in lines)
    heldout = heldout_indices([(where, len(line)) for where, line in lines], total * config.heldout_share)
    examples = [_encoded(segments, tokenizer) for segments in parsed]
    train = [example for i, example in enumerate(examples) if i not in heldout]
    return Texts(train, [examples[i] for i in sorted(heldout)], True, len(lines), hash_of(files))


def _segments(where: str, line: bytes, masked: bool, tokenizer: Any) -> list[Segment]:
    """The text of one record, cut where learning begins and ends."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); each line is one object: {_KINDS}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: got a {type(record).__name__}, expected an object: {_KINDS}")
    kind = _kind(record)
    if kind is None:
        raise DataError(f"{where}: got the keys {sorted(record)}, expected {_KINDS}")
    if kind == ("messages",):
        return _chat(where, record["messages"], masked, tokenizer)
    wrong = [key for key in kind if not isinstance(record[key], str) or not record[key]]
    if wrong:
        raise DataError(f"{where}: {wrong[0]!r} is {record[wrong[0]]!r:.80}, expected text")
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
    if kind == ("text",):
        return [(bos, False), (record["text"] + eos, True)]
    return [(bos, False), (record["prompt"], not masked), (record["completion"] + eos, True)]


def _wrong_field(messages: Any) -> str:
    """Which part of a chat isn't as it should be, what it is, and what was expected; "" where all is."""
    message = '{"role": text, "content": text}'
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else f"{messages!r:.80}"
        return f"'messages' is {got}, expected a list of {message}"
    for i, each in enumerate(messages):
        if not isinstance(each, dict):
            return f"'messages'[{i}] is {each!r:.80}, expected {message}"
        for field in ("role", "content"):
            if not isinstance(each.get(field), str):
                got = f"{each[field]!r:.80}" if field in each else "missing"
                return f"'messages'[{i}]['{field}'] is {got}, expected text"
    return ""


def _chat(where: str, messages: Any, masked: bool, tokenizer: Any) -> list[Segment]:
    wrong = _wrong_field(messages)
    if wrong:
        raise DataError(f"{where}: {wrong}")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where}: the tokenizer has no chat template: put one beside it (chat_template.jinja), or write "
            "records of prompt and completion"
        )
    roles = sorted({message["role"] for message in messages})
    if "assistant" not in roles:
        raise DataError(
            f"{where}: 'role' of 'messages' is {roles}, and none is \"assistant\", so nothing is learned "
            "from it"
        )

    def text(count: int, asks: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asks)

    whole = text(len(messages))
    if not masked:
        return [(whole, True)]
    segments, at = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = text(i, asks=True), text(i + 1)
        if not (whole.startswith(asked) and whole.startswith(answered) and at <= len(asked) <= len(answered)):
            raise DataError(
                f"{where}: the tokenizer's template writes message {i} in another way once more follow, so "
                "it can't be told what the assistant says; cut the conversation there, or set "
                "data.mask_prompts = false"
            )
        segments += [(whole[at : len(asked)], False), (whole[len(asked) : len(answered)], True)]
        at = len(answered)
    return [*segments, (whole[at:], False)]


def _encoded(segments: Sequence[Segment], tokenizer: Any) -> Example:
    """Each segment by itself: a prompt has the tokens that it would have without an answer."""
    parts = [
        (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], learned)
        for text, learned in segments
        if text
    ]
    return _joined(parts)


def _example(parts: list[tuple[list[int], bool]], tokenizer: Any) -> Example:
    """A text between the tokenizer's marks of its begin and, where that is another one, its end."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin = [] if bos is None else [([bos], False)]
    return _joined([*begin, *parts, *([] if eos in (None, bos) else [([eos], True)])])


def _joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Example:
    tokens = [np.asarray(ids, dtype=np.int32) for ids, _ in parts]
    learned = [np.full(len(ids), is_learned) for ids, is_learned in parts]
    return Example(
        np.concatenate([np.empty(0, np.int32), *tokens]), np.concatenate([np.empty(0, bool), *learned])
    )
