"""Records as tokens, and which of them are learned.

    Text          all of it                                   Completion    the completion
    Chat          what the assistant says                     Preference    both answers, each an example

A whole text is tokenised at once, as a model reads it, and what is learned is found by its characters. Where
a token holds the end of a prompt and the beginning of its answer, both are tokenised apart, as they are when
a model is asked. A Text or Completion stands between the tokenizer's marks of begin and end; a Chat is what
the tokenizer's template writes, and one with tools is refused if the template leaves out a part of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from shardwright.data.formats import BadRecord, Chat, Completion, Instruction, Message, Record, Text
from shardwright.data.sources import TextPiece
from shardwright.files import reason_of

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LOST_SHOWN = 3
_ARGUMENTS = "the arguments of "


@dataclass(frozen=True)
class Example:
    """``tokens`` int32 (n,), and which of them are ``learned``, bool (n,): predicted from those before."""

    tokens: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class _Marked:
    """A text, which spans of its characters are learned, and whether it stands between begin and end."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = False


class Encoder:
    """Encodes records by a tokenizer of transformers. ``masked``: prompts are not learned."""

    def __init__(self, tokenizer: Any, *, masked: bool = True) -> None:
        self._tokenizer, self._masked = tokenizer, masked
        template = getattr(tokenizer, "chat_template", None)
        texts = template.values() if isinstance(template, dict) else [template or ""]
        self._template = bool(template)
        self._has_marks = all(_MARKS.search(text) for text in texts)
        self._lost: dict[int, Sequence[str]] = {}  # by the hash of a chat's form, see _form
        self.num_split = 0
        """Chats of which each answer became an example, since the template writes earlier turns in another
        way once more follow."""

    def encode(self, records: Sequence[Record]) -> list[list[Example] | BadRecord]:
        """The examples of each record, of which some templates need several; of a Preference two, what was
        chosen first. A record that can't be encoded is the error that says why."""
        marked: list[list[_Marked | Example] | BadRecord] = []
        for record in records:
            try:
                marked.append(_of_characters(self._marked(record)))
            except BadRecord as error:
                marked.append(error)
            except (RecursionError, UnicodeError) as error:
                marked.append(BadRecord(reason_of(error)))
        texts = [m for each in marked if isinstance(each, list) for m in each if isinstance(m, _Marked)]
        examples = iter(self._tokenised(texts))
        return [
            each
            if isinstance(each, BadRecord)
            else [next(examples) if isinstance(m, _Marked) else m for m in each]
            for each in marked
        ]

    def text(self, pieces: Sequence[TextPiece]) -> list[Example]:
        """Each piece of plain text by itself, all of it learned. The first of a file stands behind the mark
        of begin, the last before the mark of end, where that is another one."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        ids = self._ids([piece.text for piece in pieces])["input_ids"] if pieces else []
        return [
            self._framed(
                part, np.ones(len(part), bool), begins=piece.is_first, ends=piece.is_last and eos != bos
            )
            for part, piece in zip(ids, pieces, strict=True)
        ]

    def _marked(self, record: Record) -> list[_Marked | Example]:
        if isinstance(record, Instruction):
            record = record.chat() if self._template else record.completion()
        if isinstance(record, Text):
            return [_Marked(record.text, ((0, len(record.text)),), ends=True)]
        if isinstance(record, Completion):
            whole = record.prompt + record.completion
            begin = len(record.prompt) if self._masked else 0
            return [_Marked(whole, ((begin, len(whole)),), ends=True)]
        if isinstance(record, Chat):
            return self._chat(record, self._masked)
        found: list[_Marked | Example] = []
        for side in (record.chosen, record.rejected):
            parts = self._chat(side, True) if isinstance(side, Chat) else self._marked(side)
            if len(parts) != 1:
                raise BadRecord(
                    "the tokenizer's template writes earlier turns in another way once more follow, and the "
                    f"answer has {len(parts)} turns of the assistant: of a preference one is expected"
                )
            found += parts
        return found

    def _chat(self, chat: Chat, masked: bool) -> list[_Marked | Example]:
        if not self._template:
            raise BadRecord(
                "the tokenizer has no chat template: put one beside it (chat_template.jinja), or write "
                "records of prompt and completion"
            )
        self._check_written(chat)
        assistants = tuple(message["role"] == "assistant" for message in chat.messages)
        if masked and self._has_marks and chat.learned == assistants:
            return [self._by_its_own_mask(chat)]
        whole = self._render(chat, len(chat.messages))
        if not masked:
            return [_Marked(whole, ((0, len(whole)),))]
        answers = [self._answer(chat, i, whole) for i, learned in enumerate(chat.learned) if learned]
        begins = [begin for _, begin in answers]
        ends = [len(text) for text, _ in answers]
        fits = all(whole.startswith(text) for text, _ in answers)
        if fits and all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
            return [_Marked(whole, tuple(zip(begins, ends, strict=True)))]
        self.num_split += 1
        return [_Marked(text, ((begin, len(text)),)) for text, begin in answers]

    def _check_written(self, chat: Chat) -> None:
        """Raises: BadRecord where the template leaves out tools, calls, or what is said beside them: the
        model would be taught an empty answer. Looked at once for all chats of the same form."""
        if not chat.tools and not any("tool_calls" in message for message in chat.messages):
            return
        form = _form(chat)
        if form not in self._lost:
            self._lost[form] = self._left_out(chat)
        if lost := self._lost[form]:
            more = f" and {len(lost) - _LOST_SHOWN} more" if len(lost) > _LOST_SHOWN else ""
            raise BadRecord(
                f"the chat template of {getattr(self._tokenizer, 'name_or_path', '') or 'the tokenizer'} "
                f"doesn't write {', '.join(lost[:_LOST_SHOWN])}{more}: the model would learn to answer "
                "without it; give base.folder the tokenizer of a model whose template writes tools and their "
                "calls, take these fields out of the records, or leave such records out by data.on_bad = "
                '"skip"'
            )

    def _left_out(self, chat: Chat) -> Sequence[str]:
        """What of a chat with tools the template doesn't write, in words."""
        probe, places = _probe(chat)
        whole = self._render(probe, len(probe.messages))
        # Some templates write a part of a message only until more follow: then it is learned as the last.
        lost = [
            what
            for mark, (i, what) in places.items()
            if mark not in whole and mark not in self._render(probe, i + 1)
        ]
        calls = set(lost)  # a call that isn't written is named without its arguments
        return [what for what in lost if what.removeprefix(_ARGUMENTS) not in calls - {what}]

    def _answer(self, chat: Chat, i: int, whole: str) -> tuple[str, int]:
        """The chat up to and with message ``i``, and where that begins in it."""
        answered = whole if i + 1 == len(chat.messages) else self._render(chat, i + 1)
        asked = self._render(chat, i, asks=True)
        if answered.startswith(asked):
            return answered, len(asked)
        same = (a == b for a, b in zip(asked, answered, strict=False))
        begin = next((at for at, is_same in enumerate(same) if not is_same), min(len(asked), len(answered)))
        # The two differ at the end, as where a template asks with "<think>".
        if begin < len(self._render(chat, i)):
            raise BadRecord(
                f"the tokenizer's template writes what comes before message {i} in another way once it is "
                "answered, so it can't be told what the assistant says; set data.mask_prompts = false"
            )
        return answered, begin

    def _by_its_own_mask(self, chat: Chat) -> Example:
        given = self._written(
            chat, len(chat.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Example(
            np.asarray(given["input_ids"], np.int32), np.asarray(given["assistant_masks"], dtype=bool)
        )

    def _render(self, chat: Chat, count: int, asks: bool = False) -> str:
        return self._written(chat, count, tokenize=False, add_generation_prompt=asks) if count else ""

    def _written(self, chat: Chat, count: int, **options: Any) -> Any:
        tools = {"tools": list(chat.tools)} if chat.tools else {}
        try:
            return self._tokenizer.apply_chat_template(
                list(chat.messages[:count]), **tools, **options, **chat.template
            )
        except Exception as error:  # templates raise what they like, as of roles that don't alternate
            raise BadRecord(f"the tokenizer's chat template refuses it: {error}") from None

    def _ids(self, texts: Sequence[str]) -> Any:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return self._tokenizer(list(texts), **options)

    def _tokenised(self, marked: Sequence[_Marked]) -> list[Example]:
        if not marked:
            return []
        if not getattr(self._tokenizer, "is_fast", False):
            return [self._in_parts(each) for each in marked]
        batch, found = self._ids([each.text for each in marked]), []
        for i, each in enumerate(marked):
            ids = batch["input_ids"][i]
            learned = np.zeros(len(ids), dtype=bool)
            for begin, end in each.spans:
                first = _token_at(batch, i, begin, end)
                if first is None:
                    continue
                if begin and batch.token_to_chars(i, first).start < begin:
                    found.append(self._in_parts(each))
                    break
                after = _token_at(batch, i, end, len(each.text))
                if after is not None and batch.token_to_chars(i, after).start < end:
                    after += 1  # it begins as a part of the answer
                learned[first : len(ids) if after is None else after] = True
            else:
                found.append(self._framed(ids, learned, begins=each.ends, ends=each.ends))
        return found

    def _in_parts(self, marked: _Marked) -> Example:
        """Each span by itself: a prompt has the tokens that it would have without an answer."""
        cuts = sorted({0, len(marked.text), *(at for span in marked.spans for at in span)})
        parts = self._ids([marked.text[a:b] for a, b in pairwise(cuts)])["input_ids"]
        begins = {begin for begin, _ in marked.spans}
        ids: list[int] = []
        learned: list[bool] = []
        for begin, tokens in zip(cuts, parts, strict=False):
            ids += tokens
            learned += [begin in begins] * len(tokens)
        mask = np.asarray(learned, dtype=bool)
        return self._framed(ids, mask, begins=marked.ends, ends=marked.ends)

    def _framed(self, ids: Sequence[int], learned: np.ndarray, *, begins: bool, ends: bool) -> Example:
        """Between the tokenizer's marks, where it has them; the end is learned."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        begin = [] if bos is None or not begins else [bos]
        end = [] if eos is None or not ends else [eos]
        mask = np.concatenate([np.zeros(len(begin), bool), learned, np.ones(len(end), bool)])
        return Example(np.asarray([*begin, *ids, *end], dtype=np.int32), mask)


def _of_characters(marked: "list[_Marked | Example]") -> "list[_Marked | Example]":
    """The same. Raises: UnicodeEncodeError for half a surrogate pair, as JSON can have: tokenizers, given
    such a text, refuse all that they were given with it."""
    for each in marked:
        if isinstance(each, _Marked):
            each.text.encode()
    return marked


def _form(chat: Chat) -> int:
    """A hash of what a template may look at to choose what it writes, the texts left out."""
    messages = []
    for message in chat.messages:
        given = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        calls = [(type(arguments), bool(arguments)) for arguments in given]
        messages.append((message["role"], bool(message["content"].strip()), *calls, *message))
    tools = tuple(map(_key_of_name, chat.tools))
    return hash((tools, repr(chat.template), *messages))


def _key_of_name(tool: Message) -> str | None:
    """Where a JSON schema has the tool's name: below "function", as OpenAI's, or itself, ""; None: it has no
    name."""
    function = tool.get("function")
    if isinstance(function, dict) and "name" in function:
        return "function"
    return "" if "name" in tool else None


def _probe(chat: Chat) -> tuple[Chat, dict[str, tuple[int, str]]]:
    """``chat`` with a mark in place of each text that its template is expected to write: names of tools and
    of calls, arguments, and contents of the assistant and of tools; {mark: (message, what it stands for)}."""
    places: dict[str, tuple[int, str]] = {}

    def mark(i: int, what: str) -> str:
        places[found := f"shardwright{len(places):06d}"] = (i, what)
        return found

    def call(function: Message, i: int, what: str) -> Message:
        probe = {**function, "name": mark(i, what)}
        if arguments := function["arguments"]:
            text = mark(i, _ARGUMENTS + what)
            probe["arguments"] = {"argument": text} if isinstance(arguments, dict) else text
        return probe

    messages = []
    for i, message in enumerate(chat.messages):
        probe = dict(message)
        if message["role"] in ("assistant", "tool") and message["content"].strip():
            probe["content"] = mark(i, f"the content of message {i}")
        if "tool_calls" in message:
            probe["tool_calls"] = [
                {**each, "function": call(each["function"], i, f"'tool_calls'[{j}] of message {i}")}
                for j, each in enumerate(message["tool_calls"])
            ]
        messages.append(probe)
    tools, last = [], len(messages) - 1
    for j, tool in enumerate(chat.tools):
        key = _key_of_name(tool)
        name = {} if key is None else {"name": mark(last, f"'tools'[{j}]")}
        tools.append({**tool, key: {**tool[key], **name}} if key else {**tool, **name})
    return replace(chat, messages=tuple(messages), tools=tuple(tools)), places


def _token_at(batch: Any, i: int, at: int, limit: int) -> int | None:
    """The token of text ``i`` with the first character from ``at`` on, below ``limit``, that is in one."""
    return next((t for c in range(at, limit) if (t := batch.char_to_token(i, c)) is not None), None)
