"""Records as people have them: what each format becomes, and what is said of one that is none."""

import json

import pytest

from shardwright.data.formats import BadRecord, Chat, Completion, Instruction, Preference, Text, parse

USER, BOT = {"role": "user", "content": "Weather in Oslo?"}, {"role": "assistant", "content": "Rain."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def deep(levels):
    found = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def call(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    made = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [made], **more}


def test_messages_of_openai_with_calls_parts_and_weights():
    parts = [{"type": "text", "text": text} for text in ("Weather ", "in Oslo?")]
    record = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            call('{"city": "Oslo", "unit": null}', content=None),
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
            {"role": "assistant", "content": "Rain.", "weight": 0},
            {"role": "user", "content": "How do I break in?"},
            {"role": "assistant", "content": None, "refusal": "I can't help with that."},
        ],
        "tools": TOOLS,
        "parallel_tool_calls": False,
    }
    chat = parse(record)
    assert isinstance(chat, Chat)
    said = ["Be brief.", "Weather in Oslo?", "", "rain", "Rain.", "How do I break in?"]
    assert [m["content"] for m in chat.messages] == [*said, "I can't help with that."]
    assert chat.messages[0]["role"] == "system"
    assert chat.messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "unit": None}
    assert chat.learned == (False, False, True, False, False, False, True)
    assert chat.tools == tuple(TOOLS)


def test_functions_as_openai_had_them_before_tools():
    record = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
            {"role": "function", "name": "weather", "content": "rain"},
            BOT,
        ],
        "functions": [TOOLS[0]["function"]],
    }
    chat = parse(record)
    assert chat.tools == tuple(TOOLS)
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}


def test_rows_of_tables_have_every_field_and_nested_values_as_json():
    row = {
        "messages": [
            {**USER, "tool_calls": None, "name": None},
            call({"city": "Oslo", "depth": None}, content=None, name=None),
            {"role": "tool", "content": "rain", "tool_calls": None},
            {**BOT, "tool_calls": []},
        ],
        "tools": json.dumps(TOOLS),
        "prompt": "Weather in Oslo?",
        "conversations": None,
    }
    chat = parse(row)
    assert chat.messages[0] == USER and chat.messages[3] == BOT
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert chat.tools == tuple(TOOLS)
    assert parse({"messages": json.dumps([USER, BOT])}) == parse({"messages": [USER, BOT]})


def test_conversations_of_sharegpt():
    turns = [
        {"from": "human", "value": "Weather in Oslo?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain.", "weight": None},
    ]
    chat = parse({"id": "identity_0", "system": "Be brief.", "conversations": turns, "tools": "[]"})
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert chat.learned == (False, False, True, False, True)
    assert parse({"conversations": [USER, BOT]}) == parse({"messages": [USER, BOT]})


def test_instructions_of_alpaca_are_a_chat_or_stanfords_text():
    record = parse({"instruction": "Add.", "input": "2, 2", "output": "4", "text": "all of it"})
    assert record == Instruction("Add.", "2, 2", "4")
    asked, answered = record.chat().messages
    assert asked == {"role": "user", "content": "Add.\n\n2, 2"}
    assert answered == {"role": "assistant", "content": "4"}
    assert record.completion() == Completion(
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
        "### Input:\n2, 2\n\n### Response:\n",
        "4",
    )
    assert "### Input" not in parse({"instruction": "Hi", "input": "", "output": "Ho"}).completion().prompt


def test_text_and_completions_also_of_messages():
    assert parse({"text": "abc", "meta": {"source": "web"}}) == Text("abc")
    assert parse({"prompt": "2+2=", "completion": "4"}) == Completion("2+2=", "4")
    chat = parse({"prompt": [USER, BOT, USER], "completion": [BOT]})
    assert chat.messages == (USER, BOT, USER, BOT) and chat.learned == (False, False, False, True)


CHATS = Chat((USER, BOT), (False, True)), Chat((USER, {**BOT, "content": "Sun."}), (False, True))
SUN = {"role": "assistant", "content": "Sun."}
HH = "\n\nHuman: Weather in Oslo?\n\nAssistant: "


WEATHER = USER["content"]
GPT = {answer: {"from": "gpt", "value": answer} for answer in ("Rain.", "Sun.")}
INPUT = {"input": {"messages": [USER], "tools": None}}
HUMAN = {"conversations": [{"from": "human", "value": WEATHER}]}
PREFERENCES = {
    "trl": {"prompt": [USER], "chosen": [BOT], "rejected": [SUN]},
    "whole": {"chosen": [USER, BOT], "rejected": [USER, SUN]},
    "ultrafeedback": {"prompt": WEATHER, "chosen": [USER, BOT], "rejected": [USER, SUN], "score_chosen": 8.0},
    "text-prompt": {"prompt": WEATHER, "chosen": [BOT], "rejected": [SUN]},
    "text-answers": {"prompt": [USER], "chosen": "Rain.", "rejected": "Sun."},
    "json": {key: json.dumps([m]) for key, m in (("prompt", USER), ("chosen", BOT), ("rejected", SUN))},
    "hh-rlhf": {"chosen": f"{HH}Rain.", "rejected": f"{HH}Sun."},
    "openai": {**INPUT, "preferred_output": [BOT], "non_preferred_output": [SUN]},
    "sharegpt": {**HUMAN, "chosen": GPT["Rain."], "rejected": GPT["Sun."]},
}


@pytest.mark.parametrize("record", PREFERENCES.values(), ids=PREFERENCES)
def test_preferences_of_each_kind_are_two_chats_of_which_the_answer_is_learned(record):
    assert parse(record) == Preference(*CHATS)


def test_preferences_of_text_and_of_alpaca():
    pair = {"chosen": "4", "rejected": "5"}
    assert parse({"prompt": "2+2=", **pair}) == Preference(Completion("2+2=", "4"), Completion("2+2=", "5"))
    both = (Instruction("Add.", "2, 2", answer) for answer in "45")
    assert parse({"instruction": "Add.", "input": "2, 2", **pair}) == Preference(*both)


def test_turns_that_both_answers_share_are_not_learned():
    more = [USER, BOT, USER]
    pair = parse({"chosen": [*more, BOT], "rejected": [*more, SUN, USER, BOT]})
    assert pair.chosen.learned == (False, False, False, True)
    assert pair.rejected.learned == (False, False, False, True, False, True)


def asked(*parts):
    """An answer to a question of these parts."""
    return {"messages": [{"role": "user", "content": [*parts]}, BOT]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], r"got \[1\], expected an object: {\"text\"}"),
        ({"question": "a", "answer": "b"}, r"got the fields \['answer', 'question'\].*data\.columns"),
        ({"text": 7}, r"'text' is 7, expected text"),
        ({"prompt": "", "completion": "b"}, r"'prompt' is '', expected text"),
        ({"messages": "hi"}, r"'messages' is 'hi', expected a list of {\"role\""),
        ({"messages": []}, r"'messages' is \[\], expected a list"),
        ({"messages": ["hi"]}, r"'messages'\[0\] is 'hi', expected {\"role\""),
        ({"messages": [{"role": 1, "content": "a"}]}, r"'messages'\[0\]\['role'\] is 1, expected text"),
        ({"messages": [USER, {"role": "assistant"}]}, r"'messages'\[1\]\['content'\] is missing, expected"),
        ({"messages": [USER]}, r"'role' of 'messages' is \['user'\], and none is \"assistant\""),
        ({"conversations": [{"from": "gpt"}]}, r"'conversations'\[0\]\['content'\] is missing"),
        (asked({"type": "image_url"}), r"'messages'\[0\]\['content'\] has a part 'image_url', expected text"),
        ({"messages": [USER, call("{}") | {"tool_calls": [7]}]}, r"\['tool_calls'\] has 7, expected"),
        ({"messages": [USER, BOT], "tools": "weather"}, r"'tools' is 'weather', expected a list of JSON"),
        ({"messages": [USER, BOT], "functions": 1}, r"'functions' is 1, expected a list of JSON schemas"),
        ({"messages": [USER, BOT], "functions": "rain"}, r"'functions' is 'rain', expected a list"),
        ({"messages": [USER, BOT], "functions": ["rain"]}, r"'functions' is \['rain'\], expected a list"),
        (asked({"type": ["text"]}), r"a part \"\['text'\]\", exp"),
        ({"messages": [deep(2_000)]}, r"it is nested too deeply"),
        ({"chosen": "a", "rejected": [BOT]}, r"'chosen' is 'a' and 'rejected' is \[.*two texts or two lists"),
        ({"chosen": "a", "rejected": "b"}, r"are texts without a 'prompt'"),
        ({"instruction": "a", "input": 4, "output": "b"}, r"'input' is 4, expected text"),
        ({"input": "a", "preferred_output": [], "non_preferred_output": []}, r"'input' is 'a', expected an"),
    ],
)
def test_what_is_no_record_is_told_by_its_field(record, message):
    with pytest.raises(BadRecord, match=message):
        parse(record)
