"""Records of the formats that people have, known by their fields, as one of four values.

    {"text"}                                                   Text
    {"prompt", "completion"}                                   Completion, or Chat where they hold messages
    {"messages", "tools"?}                                     Chat, of OpenAI; parts, tool calls, weights
    {"conversations"}                                          Chat, of ShareGPT
    {"instruction", "input"?, "output"}                        Instruction, of Alpaca
    {"chosen", "rejected", "prompt"?}                          Preference, of TRL, Alpaca or ShareGPT
    {"input", "preferred_output", "non_preferred_output"}      Preference, of OpenAI

Fields that hold null count as missing: tables (Parquet, Arrow) have every field in every row.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.files import parsed, reason_of

Message = dict[str, Any]
"""``{"role": text, "content": text}``, and what a chat template may read besides, as ``tool_calls``."""

EXPECTED = (
    '{"text"}, {"prompt", "completion"}, {"messages"}, {"conversations"}, {"instruction", "output"} or '
    '{"chosen", "rejected"}'
)
_MESSAGE = '{"role": text, "content": text}'
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "developer": "system",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|from|content|value)"')
_TURNS = re.compile(r"\n\n(Human|Assistant):")


class BadRecord(ValueError):
    """A record that is of no known format; says which field, what it is and what was expected."""


@dataclass(frozen=True)
class Text:
    """All of it is learned."""

    text: str


@dataclass(frozen=True)
class Completion:
    """The completion is learned, and the end of the text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages as chat templates read them. ``learned``, one for each: those of the assistant that are to be
    learned. ``tools``: JSON schemas, for the template; ``template``: more that it is given."""

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Instruction:
    """An instruction of Alpaca, what it is about, and its answer, which is learned."""

    instruction: str
    input: str
    output: str
    system: str = ""

    def chat(self) -> Chat:
        """As the messages of user and assistant, for a tokenizer that has a chat template."""
        asked = f"{self.instruction}\n\n{self.input}" if self.input else self.instruction
        messages = [("system", self.system)] if self.system else []
        messages += [("user", asked), ("assistant", self.output)]
        return chat_of([{"role": role, "content": content} for role, content in messages])

    def completion(self) -> Completion:
        """In the words of Stanford's Alpaca (github.com/tatsu-lab/stanford_alpaca), for one that has none."""
        about = ", paired with an input that provides further context" if self.input else ""
        head = self.system or (
            f"Below is an instruction that describes a task{about}. "
            "Write a response that appropriately completes the request."
        )
        given = f"### Input:\n{self.input}\n\n" if self.input else ""
        return Completion(
            f"{head}\n\n### Instruction:\n{self.instruction}\n\n{given}### Response:\n", self.output
        )


Answered = Completion | Chat | Instruction


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, of which ``chosen`` is the better one; both are of the same kind. Only what
    comes after the prompt is learned."""

    chosen: Answered
    rejected: Answered


Record = Text | Completion | Chat | Instruction | Preference


def parse(record: Any) -> Record:
    """One record of any of the formats above.

    Raises: BadRecord with the field, what it is, and what was expected.
    """
    try:
        return _parsed(record)
    except RecursionError as error:
        raise BadRecord(reason_of(error)) from None


def _parsed(record: Any) -> Record:
    if not isinstance(record, dict):
        raise BadRecord(f"got {_shown(record)}, expected an object: {EXPECTED}")
    fields = {name: _as_messages(value) for name, value in _without_null(record).items()}
    read = reader_of(fields)
    if read is None:
        raise BadRecord(
            f"got the fields {sorted(fields)}, expected {EXPECTED}; if yours have other names, give them in "
            'data.columns, as {prompt = "question", completion = "answer"}'
        )
    return read(fields)


def reader_of(fields: Mapping[str, Any]) -> Callable[[dict[str, Any]], Record] | None:
    """What reads a record with these fields; None: nothing does."""
    return next((read for keys, read in _READERS if keys <= fields.keys()), None)


def chat_of(
    messages: Any, tools: Any = None, *, name: str = "messages", begin: int = 0, template: Any = None
) -> Chat:
    """Messages of OpenAI or ShareGPT, of which those from ``begin`` on may be learned.

    Raises: BadRecord.
    """
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRecord(f"{name!r} is {_shown(messages)}, expected a list of {_MESSAGE}")
    found = [_message(each, f"{name!r}[{i}]") for i, each in enumerate(messages)]
    weights = [message.pop("weight", 1) for message in found]
    learned = [
        message["role"] == "assistant" and i >= begin and weight != 0
        for i, (message, weight) in enumerate(zip(found, weights, strict=True))
    ]
    return Chat(tuple(found), tuple(learned), _tools(tools), template or {})


def _completion(fields: dict[str, Any]) -> Record:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(_string(fields, "prompt"), _string(fields, "completion"))
    return _answered(prompt, completion, fields, "completion")


def _chat(fields: dict[str, Any]) -> Chat:
    chat = chat_of(fields["messages"], _tools_of(fields), template=_template_of(fields))
    return _with_an_answer(chat, "messages")


def _sharegpt(fields: dict[str, Any]) -> Chat:
    messages = fields["conversations"]
    if isinstance(fields.get("system"), str) and isinstance(messages, Sequence) and fields["system"]:
        messages = [{"role": "system", "content": fields["system"]}, *messages]
    return _with_an_answer(chat_of(messages, _tools_of(fields), name="conversations"), "conversations")


def _instruction(fields: dict[str, Any], answer: str = "output") -> Instruction:
    given = {name: fields.get(name, "") for name in ("input", "system")}
    for name, value in given.items():
        if not isinstance(value, str):
            raise BadRecord(f"{name!r} is {_shown(value)}, expected text")
    return Instruction(
        _string(fields, "instruction"), given["input"], _string(fields, answer), given["system"]
    )


def _preference(fields: dict[str, Any]) -> Preference:
    chosen, rejected = fields["chosen"], fields["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRecord(
            f"'chosen' is {_shown(chosen)} and 'rejected' is {_shown(rejected)}, expected two texts or two "
            "lists of messages"
        )
    if isinstance(chosen, str):
        return _preferred_text(fields)
    prompt = fields.get("prompt", fields.get("conversations"))
    return _apart(*(_answered(prompt, fields[name], fields, name) for name in ("chosen", "rejected")))


def _preferred_text(fields: dict[str, Any]) -> Preference:
    names = ("chosen", "rejected")
    if isinstance(fields.get("prompt"), str):
        prompt = _string(fields, "prompt")
        return Preference(*(Completion(prompt, _string(fields, name)) for name in names))
    if "instruction" in fields:
        return Preference(*(_instruction(fields, name) for name in names))
    if "prompt" in fields:
        return _apart(*(_answered(fields["prompt"], fields[name], fields, name) for name in names))
    if all(_TURNS.match(fields[name]) for name in names):
        return _apart(*(chat_of(_turns(fields[name]), name=name) for name in names))
    raise BadRecord(
        "'chosen' and 'rejected' are texts without a 'prompt': expected that, too, or lists of messages, or "
        'the text of a dialogue that begins with "\\n\\nHuman:"'
    )


def _openai_preference(fields: dict[str, Any]) -> Preference:
    given = fields["input"]
    if not isinstance(given, dict) or "messages" not in given:
        raise BadRecord(f"'input' is {_shown(given)}, expected an object with messages")
    names = ("preferred_output", "non_preferred_output")
    return _apart(*(_answered(given["messages"], fields[name], given, name) for name in names))


def _answered(prompt: Any, answer: Any, fields: dict[str, Any], name: str) -> Chat:
    """The chat of a prompt (text, messages, or None where the answer has it) and what answers it."""
    after = _messages(answer, "assistant", name)
    before = [] if prompt is None else _messages(prompt, "user", "prompt")
    if isinstance(prompt, str) and after[0]["role"] != "assistant":
        before = []  # the answer repeats the prompt, as a message
    chat = chat_of([*before, *after], _tools_of(fields), begin=len(before), template=_template_of(fields))
    return _with_an_answer(chat, name)


def _messages(value: Any, role: str, name: str) -> list[Message]:
    """Messages; a text is one message of ``role``."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    chat = chat_of(value, name=name)
    weights = (
        {"weight": 0} if m["role"] == "assistant" and not on else {}
        for m, on in zip(chat.messages, chat.learned, strict=True)
    )
    return [{**message, **weight} for message, weight in zip(chat.messages, weights, strict=True)]


def _apart(chosen: Chat, rejected: Chat) -> Preference:
    """Only what comes after the messages that both begin with is learned."""
    pairs = zip(chosen.messages[:-1], rejected.messages[:-1], strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    begin = min(len(chosen.messages), len(rejected.messages)) - 1 if same is None else same
    both = [
        replace(chat, learned=tuple(on and i >= begin for i, on in enumerate(chat.learned)))
        for chat in (chosen, rejected)
    ]
    return Preference(*both)


def _with_an_answer(chat: Chat, name: str) -> Chat:
    roles = sorted({message["role"] for message in chat.messages})
    if "assistant" not in roles:
        raise BadRecord(f"'role' of {name!r} is {roles}, and none is \"assistant\", so nothing is learned")
    return chat


def _turns(text: str) -> list[Message]:
    """A dialogue as Anthropic's HH-RLHF writes it."""
    _, *parts = _TURNS.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise BadRecord(f"{where} is {_shown(given)}, expected {_MESSAGE}")
    message = dict(given)
    role_name = "from" if "from" in message and "role" not in message else "role"
    content_name = "value" if "value" in message and "content" not in message else "content"
    role, content = message.pop(role_name, None), message.pop(content_name, None)
    if not isinstance(role, str) or not role:
        raise BadRecord(f"{where}[{role_name!r}] is {_shown(role)}, expected text")
    if role == "function_call":
        message["tool_calls"], content = [_decoded(content)], None
    if "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    if calls := _decoded(message.pop("tool_calls", None)):
        message["tool_calls"] = _calls(calls, where)
    content = message.pop("refusal", None) if content is None else content
    if content is None and "tool_calls" in message:
        content = ""
    content = _content(content, f"{where}[{content_name!r}]")
    return {"role": _ROLES.get(role, role), "content": content, **message}


def _content(content: Any, where: str) -> str:
    """Text, or the parts of OpenAI as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"{where} is {_shown(content)}, expected text")
    texts = []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, dict) else ""
        text = part if isinstance(part, str) else part.get(_TEXT_PARTS.get(kind)) if kind else None
        if not isinstance(text, str):
            raise BadRecord(
                f"{where} has a part {kind or _shown(part)!r}, expected text: "
                "pictures, sound and files can't be learned"
            )
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as chat templates read them: arguments as an object, where OpenAI has it as text."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRecord(
                f'{where}[\'tool_calls\'] has {_shown(call)}, expected {{"function": {{"name"}}}}'
            )
        arguments = _decoded(function.get("arguments", {}))
        head = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        of = {"name": function["name"], "arguments": arguments}
        found.append({**head, "type": "function", "function": of})
    return found


def _tools_of(fields: Mapping[str, Any]) -> Any:
    functions = _decoded(fields.get("functions")) or []
    if "tools" in fields:
        return fields["tools"]
    if not isinstance(functions, list) or not all(isinstance(each, dict) for each in functions):
        raise BadRecord(f"'functions' is {_shown(functions)}, expected a list of JSON schemas")
    return [{"type": "function", "function": each} for each in functions]


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    tools = _decoded(tools)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord(f"'tools' is {_shown(tools)}, expected a list of JSON schemas")
    return tuple(tools)


def _template_of(fields: Mapping[str, Any]) -> Any:
    given = fields.get("chat_template_kwargs")
    return given if isinstance(given, dict) else None


def _decoded(value: Any) -> Any:
    """What the text ``value`` holds, where it is JSON of a list or an object: tables keep it so."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parsed(json.loads, value)
        except ValueError:
            return value
    return value


def _as_messages(value: Any) -> Any:
    """Messages, where ``value`` is the text of their JSON, which tables have in a column."""
    return _decoded(value) if isinstance(value, str) and _MESSAGES.match(value) else value


def _without_null(value: Any) -> Any:
    """``value`` without the fields that hold null, however deep."""
    if isinstance(value, dict):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list | tuple) else value


def _string(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(fields[name], str) or not fields[name]:
        raise BadRecord(f"{name!r} is {_shown(fields[name])}, expected text")
    return fields[name]


def _shown(value: Any) -> str:
    return f"{value!r:.80}" if value is not None else "missing"


_READERS: tuple[tuple[frozenset[str], Callable[[dict[str, Any]], Record]], ...] = (
    (frozenset({"input", "preferred_output", "non_preferred_output"}), _openai_preference),
    (frozenset({"chosen", "rejected"}), _preference),
    (frozenset({"messages"}), _chat),
    (frozenset({"conversations"}), _sharegpt),
    (frozenset({"prompt", "completion"}), _completion),
    (frozenset({"instruction", "output"}), _instruction),
    (frozenset({"text"}), lambda fields: Text(_string(fields, "text"))),
)
