"""Text and records as windows to fine-tune on: what is learned, what sees what, and what is refused."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from shardwright.data import sources, store
from shardwright.data.encode import Example
from shardwright.data.mixture import MixedOrder, Mixture
from shardwright.data.store import Examples, tokenised
from shardwright.data.text import Order, Share
from shardwright.data.windows import IGNORED, packed, paired, stream
from shardwright.errors import DataError
from shardwright.recipe.config import DataConfig


class Bytes:
    """A tokenizer whose tokens are bytes, with a template that repeats its messages."""

    bos_token_id, eos_token_id = ord("^"), ord("$")
    chat_template = "yes"

    def __init__(self, counts: bool = False, thinks: bool = False, leaves_out: str = "") -> None:
        self.counts = counts  # how many messages there are is in the text: no begin of it stays as it is
        self.thinks = thinks  # the last answer is written in another way, as by Qwen 3
        self.leaves_out = leaves_out  # a part of records with tools that the template doesn't write
        self.asked = self.rendered = 0

    def __call__(self, texts, **_):
        self.asked += 1
        return {"input_ids": [list(text.encode()) for text in texts]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, tools=()):
        assert not tokenize
        self.rendered += 1
        if messages[0]["role"] == "assistant":
            raise ValueError("roles must alternate")
        tools = () if self.leaves_out == "tools" else tools
        said = [f"<{m['role'][0]}>{self.content(m)}{self.calls(m)};" for m in messages]
        if self.thinks and messages[-1]["role"] == "assistant":
            said[-1] = f"<a>~{messages[-1]['content']};"
        told = "".join(f"[{t.get('function', t)['name']}]" for t in tools)
        head = str(len(messages)) if self.counts else told
        return head + "".join(said) + ("<a>" if add_generation_prompt else "")

    def content(self, message):
        is_result = message["role"] == "tool"
        out = {"results": is_result, "content beside calls": "tool_calls" in message}
        return "" if out.get(self.leaves_out) else message["content"]

    def calls(self, message):
        calls = message.get("tool_calls", [])
        if self.leaves_out == "arguments":
            calls = [{"function": {"name": call["function"]["name"]}} for call in calls]
        kept = {"tool_calls": 0, "all calls but the first": 1}.get(self.leaves_out, len(calls))
        return json.dumps(calls[:kept])[1:-1]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where tokens are kept: of this test alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "shardwright" / "data"


def write(folder, *lines, name="notes.jsonl", **config):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return DataConfig(path=str(path), **{"heldout_share": 0.01, **config})


def read(config, tokenizer=None):
    """The data of ``config``; its folder stands for that of a tokenizer, too."""
    empty = store.Path(os.environ["XDG_CACHE_HOME"]) / "tokenizer"
    empty.mkdir(parents=True, exist_ok=True)
    return tokenised(config, tokenizer or Bytes(), empty)


def shown(example):
    """The text, and that text with a dot for what isn't learned."""
    text = bytes(example.tokens.astype(np.uint8)).decode()
    return text, "".join(c if on else "." for c, on in zip(text, example.learned, strict=True))


def all_of(data):
    return [shown(data.examples.example(i)) for i in range(len(data.examples))]


TURNS = zip(["user", "assistant"] * 3, ["hi", "ho", "so", "no", "bye"], strict=False)
CHAT = [{"role": role, "content": said} for role, said in TURNS]


# ---- what is learned


def test_what_is_learned_of_each_kind_of_record(tmp_path):
    config = write(
        tmp_path,
        {"text": "abc"},
        {"prompt": "2+2=", "completion": "4"},
        "",
        {"messages": CHAT, "id": 7},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
    )
    chat = "<u>hi;<a>ho;<u>so;<a>no;<u>bye;"
    assert all_of(read(config)) == [
        ("^abc$", ".abc$"),
        ("^2+2=4$", ".....4$"),
        (chat, ".........ho;.........no;......."),
        ("<u>hi;<a>ho;", ".........ho;"),
        ("<u>Add.\n\n2, 2;<a>4;", "." * 17 + "4;"),
    ]
    unmasked = all_of(read(config.model_copy(update={"mask_prompts": False})))
    assert [learned for _, learned in unmasked[:3]] == [".abc$", ".2+2=4$", chat]


def test_calls_of_tools_are_learned_and_the_tools_are_told(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": "{}"}}
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    config = write(tmp_path, {"messages": messages, "tools": [{"name": "rain"}]}, {"text": "abc"})
    text, learned = all_of(read(config))[0]
    assert text.startswith("[rain]<u>hi;<a>")
    assert '"arguments": {}' in learned and not learned.strip(".").startswith("<a>")


FUNCTIONS = [{"name": name, "arguments": '{"city": "Oslo"}'} for name in ("rain", "wind")]
CALLS = [{"type": "function", "function": function} for function in FUNCTIONS]
WITH_TOOLS = {
    "messages": [
        CHAT[0],
        {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
        {"role": "tool", "content": "dry"},
        {"role": "assistant", "content": "It is dry."},
    ],
    "tools": [{"type": "function", "function": {"name": "rain"}}, {"name": "wind"}],
}


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("tool_calls", r"'tool_calls'\[0\] of message 1, 'tool_calls'\[1\] of message 1"),
        ("all calls but the first", r"'tool_calls'\[1\] of message 1"),
        ("arguments", r"the arguments of 'tool_calls'\[0\] of message 1"),
        ("tools", r"'tools'\[0\], 'tools'\[1\]"),
        ("content beside calls", r"the content of message 1"),
        ("results", r"the content of message 2"),
    ],
)
@pytest.mark.parametrize("mask_prompts", [True, False])
def test_what_the_template_leaves_out_of_a_record_with_tools_is_never_lost_silently(
    tmp_path, part, named, mask_prompts
):
    lines = {"text": "abc"}, WITH_TOOLS, {"text": "def"}
    assert len(all_of(read(write(tmp_path, *lines)))) == 3
    tokenizer = Bytes(leaves_out=part)
    tokenizer.name_or_path = "models/small"
    message = rf"line 2: the chat template of models/small doesn't write {named}[,:].*whose template writes"
    with pytest.raises(DataError, match=message):
        read(write(tmp_path, *lines, mask_prompts=mask_prompts), tokenizer)
    data = read(write(tmp_path, *lines, mask_prompts=mask_prompts, on_bad="skip"), tokenizer)
    assert [text for text, _ in all_of(data)] == ["^abc$", "^def$"]
    assert data.skipped == 1 and "models/small doesn't write" in data.reasons[0]


def test_calls_that_are_written_only_while_they_are_the_answer_are_not_lost(tmp_path):
    class Last(Bytes):
        """Writes calls and what is said beside them only at the end, as gpt-oss writes thoughts."""

        def apply_chat_template(self, messages, **options):
            earlier = [{**m, "content": "", "tool_calls": []} if "tool_calls" in m else m for m in messages]
            return super().apply_chat_template([*earlier[:-1], messages[-1]], **options)

    data = read(write(tmp_path, WITH_TOOLS, {"text": "abc"}), Last())
    assert data.num_split == 1 and "I look." in all_of(data)[0][1] and "wind" in all_of(data)[0][1]


def test_whether_a_template_writes_calls_is_looked_at_once_for_records_of_one_form(tmp_path):
    counts = []
    for number in (2, 12):
        tokenizer = Bytes()
        read(write(tmp_path, *[WITH_TOOLS] * number), tokenizer)
        counts.append(tokenizer.rendered)
    assert counts[1] - counts[0] == 10 * 4  # the whole chat, each of two questions, and the first answer
    plain = Bytes()
    read(write(tmp_path, *[{"messages": CHAT[:2]}] * 5), plain)
    assert plain.rendered == 5 * 2


def test_an_instruction_is_stanfords_text_where_there_is_no_chat_template(tmp_path):
    bare = Bytes()
    bare.chat_template = None
    config = write(tmp_path, {"instruction": "Add.", "input": "", "output": "4"}, {"text": "abc"})
    text, learned = all_of(read(config, bare))[0]
    assert text.endswith("### Instruction:\nAdd.\n\n### Response:\n4$")
    assert learned.strip(".") == "4$"


def test_where_a_template_rewrites_earlier_turns_each_answer_is_a_record(tmp_path):
    config = write(tmp_path, {"messages": CHAT}, {"text": "abc"})
    data = read(config, Bytes(thinks=True))
    first, second = all_of(data)[:2]
    assert first == ("<u>hi;<a>~ho;", ".........~ho;")
    assert second == ("<u>hi;<a>ho;<u>so;<a>~no;", "." * 21 + "~no;")
    assert data.num_split == 1 and data.num == 2
    assert data.heldout[0] == data.heldout[1]  # of one record, neither is held out from the other


def test_pairs_are_two_examples_whose_answers_are_learned(tmp_path):
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "22"}
    other = {"prompt": CHAT[:3], "chosen": CHAT[3:4], "rejected": [{"role": "assistant", "content": "yes"}]}
    data = read(write(tmp_path, pair, other, pair))
    assert data.kind == "pairs" and data.num == 3
    head = "<u>hi;<a>ho;<u>so;<a>"
    assert all_of(data)[:4] == [
        ("^2+2=4$", ".....4$"),
        ("^2+2=22$", ".....22$"),
        (f"{head}no;", "." * 21 + "no;"),
        (f"{head}yes;", "." * 21 + "yes;"),
    ]
    assert data.heldout.reshape(-1, 2).sum(axis=1).tolist().count(2) == 1
    with pytest.raises(DataError, match=r"line 2: of a data set either all records are preferences"):
        read(write(tmp_path, pair, {"text": "a"}, pair))


# ---- what is refused, or skipped


def chat_of(*roles):
    return json.dumps({"messages": [{"role": role, "content": "a"} for role in roles]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"not JSON \(.*\); each line is one object"),
        ("[1]", r"got \[1\], expected an object"),
        ('{"txt": "a"}', r"got the fields \['txt'\], expected"),
        ('{"messages": [{"role": "user"}]}', r"'messages'\[0\]\['content'\] is missing, expected text"),
        (chat_of("user", "bot"), r"'role' of 'messages' is \['bot', 'user'\], and none is \"assistant\""),
        (chat_of("assistant"), r"the tokenizer's chat template refuses it: roles must alternate"),
        pytest.param("[" * 10_000 + "]" * 10_000, r"not JSON \(it is nested too deeply\)", id="nested"),
        ('{"text": "half of a pair: \\ud800"}', r"it is no text in UTF-8"),
    ],
)
def test_a_line_that_is_no_record_is_named_or_skipped(tmp_path, cache, line, message):
    lines = ({"text": "abc"}, {"text": "def"}, line, {"text": "ghi"})
    config = write(tmp_path, *lines)
    with pytest.raises(DataError, match=rf"notes\.jsonl, line 3: {message}"):
        read(config)
    assert not list(cache.glob("*/data"))
    data = read(write(tmp_path, *lines, *[line] * 4, on_bad="skip"))
    assert [text for text, _ in all_of(data)] == ["^abc$", "^def$", "^ghi$"]
    assert data.skipped == 5 and len(data.reasons) == 3 and "line 3" in data.reasons[0]


def test_templates_that_cannot_be_cut_or_are_not_there_are_refused(tmp_path):
    config = write(tmp_path, {"text": "abc"}, {"messages": CHAT})
    says = r"line 2: the tokenizer's template writes what comes before message 1"
    with pytest.raises(DataError, match=says):
        read(config, Bytes(counts=True))
    bare = Bytes()
    bare.chat_template = None
    with pytest.raises(DataError, match=r"line 2: the tokenizer has no chat template"):
        read(config, bare)


def test_too_few_records_and_mixed_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"1 record\(s\), expected 2"):
        read(write(tmp_path, {"text": "abc"}))
    with pytest.raises(DataError, match=r"0 record\(s\), expected 2.*\n.*left out: .*line 1"):
        read(write(tmp_path, {"txt": "abc"}, {"txt": "abc"}, on_bad="skip"))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"1 files of records and 1 of text.*choose with data\.suffixes"):
        read(DataConfig(path=str(tmp_path)))


# ---- where it comes from


def texts_of(config):
    examples = read(config).examples
    return [examples.example(i).tokens.astype(np.uint8).tobytes().decode() for i in range(len(examples))]


@pytest.mark.parametrize("name", ["notes.ndjson", "notes.json", "notes.txt"])
def test_records_under_other_names_are_records(tmp_path, name):
    assert texts_of(write(tmp_path, {"text": "abc"}, {"text": "def"}, name=name)) == ["^abc$", "^def$"]
    (tmp_path / "b.json").write_text('{\n  "text": "abc"\n}\n')
    assert read(DataConfig(path=str(tmp_path / "b.json"), heldout_share=0.2)).kind == "text"


@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_are_decoded_one_element_after_another(tmp_path, monkeypatch, indent):
    monkeypatch.setattr(sources, "_BLOCK_NBYTES", 7)
    records = [{"text": f"é{i}] , [" * 3} for i in range(9)]
    (tmp_path / "a.json").write_text("﻿" + json.dumps(records, indent=indent, ensure_ascii=False) + "\n")
    config = DataConfig(path=str(tmp_path / "a.json"))
    assert texts_of(config) == [f"^{record['text']}$" for record in records]


AFTER = r"after the end of its array \(el"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}, {"text"', "element 2: not JSON"),
        ('[{"text": "a"} {"text": "b"}]', "element 1: got '{' after it, expected a comma"),
        ('[{"text": "a"}', "element 1: got '' after it"),
        ('[{"text": "a"}]\n {"text": "b"}', r"a\.json: got '{\"text\": \"b\"}' " + AFTER),
        ('[{"text": "a"}, {"text": "b"}][]', rf"got '\[\]' {AFTER}ement 2\), expected"),
        pytest.param('[{"text": "a"}, {"x": ' + "[" * 10_000, "element 2: not JSON", id="nested"),
    ],
)
def test_an_array_that_is_cut_is_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read(DataConfig(path=str(tmp_path / "a.json"), on_bad="skip"))


@pytest.mark.parametrize("block", [7, 2**20])
def test_an_element_that_is_nested_too_deeply_is_skipped_and_the_next_one_read(block, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK_NBYTES", block)
    deep = '{"text": "]}\\"]}", "x": ' + "[" * 3_000 + '"[\\\\"' + "]" * 3_000 + "}"
    (tmp_path / "a.json").write_text(f'[{{"text": "a"}}, {deep}, {{"text": "b"}}]')
    data = read(DataConfig(path=str(tmp_path / "a.json"), on_bad="skip"))
    assert [text for text, _ in all_of(data)] == ["^a$", "^b$"]
    assert data.reasons == ("a.json, element 2: not JSON that can be used: it is nested too deeply",)


def test_a_folder_as_the_hub_has_it_gives_one_split_and_no_pages(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        (tmp_path / "data" / "set").mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": f"{split}{i}"}) for i in range(count)]
        (tmp_path / "data" / "set" / f"{split}-00000-of-00001.jsonl").write_text("\n".join(lines))
    (tmp_path / "data" / "README.md").write_text("# A data set")
    config = DataConfig(path=str(tmp_path / "data"), heldout_share=0.4)
    data = read(config)
    assert data.num == 3 and "left out, as they are not of the split 'train'" in data.left_out[0]
    assert texts_of(config.model_copy(update={"split": "test"})) == ["^test0$", "^test1$"]


def test_fields_of_other_names_are_given(tmp_path):
    lines = [{"question": "2+2=", "answer": "4"}] * 2
    config = write(tmp_path, *lines, columns={"prompt": "question", "completion": "answer"})
    assert texts_of(config) == ["^2+2=4$"] * 2


def test_files_are_held_out_whole_and_begin_and_end_with_the_tokenizers_marks(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text(str(i) * 10)
    data = read(DataConfig(path=str(tmp_path / "text"), heldout_share=0.2))
    assert data.kind == "text" and data.heldout.sum() == 2
    assert all_of(data) == [(f"^{10 * str(i)}$", f".{10 * str(i)}$") for i in range(10)]


def test_a_long_text_is_read_in_pieces_and_its_end_is_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK_NBYTES", 50)
    text = "".join(f"line {i} é\n" for i in range(40))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = Bytes()
    data = read(DataConfig(path=str(tmp_path / "a.txt"), heldout_share=0.25), tokenizer)
    cut = len(text.encode()) * 3 // 4
    train, heldout = (data.examples.example(i).tokens.astype(np.uint8).tobytes() for i in range(2))
    assert train == b"^" + text.encode()[:cut].decode(errors="replace").encode() + b"$"
    assert len(heldout) >= len(text.encode()) // 4
    assert data.heldout.tolist() == [False, True]


# ---- kept


def test_the_next_start_finds_what_was_tokenised_until_something_changes(tmp_path, cache):
    config = write(tmp_path, {"text": "abc"}, {"prompt": "a", "completion": "b"}, {"text": "ghi"})
    tokenizer = Bytes()
    first = read(config, tokenizer)
    asked = tokenizer.asked
    assert first.seconds > 0 and asked
    second = read(config, tokenizer)
    assert second.seconds == 0 and tokenizer.asked == asked
    assert all_of(second) == all_of(first)
    assert second.sha256 == first.sha256 and second.heldout.tolist() == first.heldout.tolist()
    others = [config.model_copy(update={"mask_prompts": False}), config.model_copy(update={"on_bad": "skip"})]
    (cache.parent.parent / "tokenizer" / "tokenizer.json").write_text("another")
    for count, other in enumerate([config, *others], 2):
        read(other, tokenizer)
        assert tokenizer.asked == count * asked
    write(tmp_path, {"text": "abd"}, {"prompt": "a", "completion": "b"}, {"text": "ghi"})
    assert read(config, tokenizer).sha256 != first.sha256
    assert tokenizer.asked == 5 * asked


def test_what_is_damaged_is_built_again(tmp_path, cache):
    config = write(tmp_path, {"text": "abc"}, {"text": "def"})
    wanted = all_of(read(config))
    (tokens,) = cache.glob("*/data/tokens")
    os.truncate(tokens, 8)
    assert all_of(read(config)) == wanted


class Slow(Bytes):
    """Takes its time, and notes who asked."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __call__(self, texts, **options):
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return super().__call__(texts, **options)


def one_process(config, log, queue):
    queue.put(all_of(read(config, Slow(log))))


def test_of_several_processes_one_builds_and_if_it_is_killed_another(tmp_path, cache):
    config, log = write(tmp_path, {"text": "abc"}, {"text": "def"}), tmp_path / "log"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=one_process, args=(config, log, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    limit = time.monotonic() + 20
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    (killed,) = {int(pid) for pid in log.read_text().split()}
    os.kill(killed, signal.SIGKILL)
    assert [queue.get(timeout=20) for _ in range(2)] == [[("^abc$", ".abc$"), ("^def$", ".def$")]] * 2
    for process in processes:
        process.join(20)
    assert len(set(log.read_text().split())) == 2  # processes that tokenised
    assert [path.name for path in sorted(next(cache.iterdir()).iterdir())] == [".lock", "data"]


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = write(tmp_path, {"text": "abc"}, {"text": "def"}, cache=str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"tokenised data can't be kept there.*data\.cache"):
        read(config)


# ---- windows


def example(length, first, unlearned=1):
    return Example(np.arange(first, first + length, dtype=np.int32), np.arange(length) >= unlearned)


def laid(examples, make, *args, **options):
    """Windows of all of them."""
    return make(Examples.of(examples), np.arange(len(examples)), *args, **options)


def test_a_stream_learns_every_token_once_but_the_first_of_each_text():
    examples = [example(5, 10), example(1, 20), example(0, 1), example(9, 30)]
    windows = laid(examples, stream, 4)
    batch = windows.batch(range(len(windows)))
    assert batch.inputs.tolist() == [[10, 11, 12, 13], [14, 20, 30, 31], [32, 33, 34, 35]]
    assert batch.targets.tolist() == [[11, 12, 13, 14], [IGNORED, IGNORED, 31, 32], [33, 34, 35, 36]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 2, 3]]
    assert batch.num_targets == 10 == windows.num_targets
    with pytest.raises(DataError, match="15 tokens hold no sequence of 20"):
        laid(examples, stream, 20)


def test_a_stream_of_some_examples_is_that_of_them_alone():
    generator = np.random.default_rng(0)
    examples = [example(int(n), 100 * i + 1, 0) for i, n in enumerate(generator.integers(0, 30, size=50))]
    chosen = np.flatnonzero(generator.random(50) < 0.5)
    windows = stream(Examples.of(examples), chosen, 7)
    alone = np.concatenate([examples[i].tokens for i in chosen])
    assert len(windows) == (len(alone) - 1) // 7
    for number in range(len(windows)):
        coded, starts = windows.row(number)
        assert coded.tolist() == alone[number * 7 : number * 7 + 8].tolist()
        assert starts.tolist() == [token % 100 == 1 for token in coded]
    assert windows.num_targets == windows.batch(range(len(windows))).num_targets


def test_records_are_packed_whole_and_padding_is_not_learned():
    examples = [example(3, 10), example(2, 20), example(6, 30, 4), example(9, 40), example(5, 50, 5)]
    windows = laid(examples, packed, 5, 0, several=True)
    batch = windows.batch([0, 1, 2])
    assert (windows.cut, windows.dropped, len(windows)) == (1, 1, 3)
    assert batch.inputs.tolist() == [[30, 31, 32, 33, 34], [40, 41, 42, 43, 44], [10, 11, 12, 20, 21]]
    no = IGNORED
    assert batch.targets.tolist() == [[no, no, no, 34, 35], [41, 42, 43, 44, 45], [11, 12, no, 21, no]]
    assert batch.positions is not None
    assert batch.positions[2].tolist() == [0, 1, 2, 0, 1]
    assert batch.num_targets == windows.num_targets == 10
    apart = laid(examples, packed, 5, 0, several=False).batch([0, 1])
    assert apart.inputs.tolist() == [[10, 11, 12, 0, 0], [20, 21, 0, 0, 0]]
    assert apart.targets.tolist() == [[11, 12, no, no, no], [21, no, no, no, no]]
    short = laid(examples, packed, 50, 7, several=False).batch([0, 1])
    assert short.inputs.tolist() == [[10, 11, 12, *[7] * 5], [20, 21, *[7] * 6]]
    assert short.positions is not None and short.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"none has anything to learn in its first 3 tokens"):
        laid([example(9, 0, unlearned=6)], packed, 3, 0, several=True)


def test_a_batch_has_the_positions_of_its_longest_record_and_only_its_own_tokens_are_counted():
    lengths = np.random.default_rng(0).integers(60, 100, size=400)
    examples = [example(int(n), 0) for n in lengths]
    for several, most in ((False, 1.05), (True, 1.15)):  # a row of the packed ones is left half empty
        windows = laid(examples, packed, 2048, 0, several=several)
        mixture = Mixture((windows,))
        one_by_one = [mixture.batch([row]).inputs.numel() for row in range(len(windows))]
        assert one_by_one == [-(-own // 8) * 8 for own in mixture.inputs.tolist()]
        assert lengths.sum() - 400 <= sum(one_by_one) <= most * lengths.sum() < 2048 * 400 / 20
        assert mixture.batch([0, 1, 2]).inputs.shape == (3, max(one_by_one[:3]))
    pairs = Mixture((laid(examples, paired, 2048, 0),), per=2)
    assert pairs.inputs.tolist() == (lengths.reshape(-1, 2).sum(axis=1) - 2).tolist()


def test_the_windows_of_all_ranks_are_those_that_each_takes_at_its_place():
    shares = [Share(rank, 3, 2) for rank in range(3)]
    ranks = [Order(11, share, seed=1) for share in shares]
    own = [number for position in range(0, 60, 6) for order in ranks for number in order.at(position)]
    assert ranks[0].between(0, 60).tolist() == own
    assert ranks[0].between(7, 40).tolist() == own[7:40]
    assert ranks[0].between(5, 5).tolist() == []


def test_windows_that_are_one_text_each_need_no_positions():
    assert laid([example(20, 0)], stream, 4).batch([1, 2]).positions is None


def test_every_token_to_learn_is_a_target_whatever_the_packing():
    generator = np.random.default_rng(0)
    examples = [example(int(n), 100 * i + 1) for i, n in enumerate(generator.integers(2, 9, size=40))]
    wanted = sorted(int(t) for e in examples for t in e.tokens[1:])
    for several in (True, False):
        windows = laid(examples, packed, 8, 0, several=several)
        batch = windows.batch(range(len(windows)))
        assert torch.equal(torch.sort(batch.targets[batch.targets != IGNORED]).values, torch.tensor(wanted))
        assert windows.num_targets == len(wanted)


def test_packing_leaves_little_room():
    lengths = np.random.default_rng(0).integers(10, 600, size=3000)
    windows = laid([example(int(n), 0) for n in lengths], packed, 1023, 0, several=True)
    assert windows.length.sum() / (len(windows) * windows.width) > 0.98


def test_a_batch_of_pairs_is_what_was_chosen_then_what_was_rejected():
    unlearned = [1, 1, 3, 1, 1, 1]  # of what was chosen in the second pair nothing is learned
    examples = [example(3, 10 * i, count) for i, count in enumerate(unlearned)]
    pairs = Mixture((laid(examples, paired, 4, 0),), per=2)
    assert len(pairs) == 2
    assert pairs.batch([1, 0]).inputs[:, 0].tolist() == [40, 0, 50, 10]


# ---- mixing


def test_a_mixture_has_its_shares_in_every_epoch_and_goes_on_from_any_position():
    sizes, weights = [10, 50], [3.0, 1.0]
    order = MixedOrder(sizes, weights, Share(0, 1, 4), seed=7)
    assert order.num_windows == 60
    numbers = [number for position in range(0, 240, 4) for number in order.at(position)]
    for epoch in range(4):
        own = numbers[60 * epoch : 60 * epoch + 60]
        assert sum(number < 10 for number in own) == 45
        assert epoch == 3 or len({number for number in own if number >= 10}) == 15
    small, large = ([n for n in numbers if (n < 10) == is_small] for is_small in (True, False))
    assert np.bincount(small).tolist() == [18] * 10
    assert sorted(np.bincount(large)[10:])[0] >= 1 and len(large) == 60
    again = MixedOrder(sizes, weights, Share(0, 1, 4), seed=7)
    assert again.at(132) == numbers[132:136]
    halves = [MixedOrder(sizes, weights, Share(rank, 2, 2), seed=7).at(132) for rank in range(2)]
    assert [*halves[0], *halves[1]] == numbers[132:136]


def test_windows_of_several_sources_are_numbered_one_after_the_other():
    parts = [laid([example(9, first, 0)], stream, 4) for first in (0, 100)]
    mixture = Mixture(tuple(parts))
    assert len(mixture) == 4
    assert mixture.batch([3, 0]).inputs[:, 0].tolist() == [104, 0]
    assert mixture.num_targets == sum(part.num_targets for part in parts) == 16
    assert replace(mixture, per=2).batch([1]).inputs[:, 0].tolist() == [100, 104]


def test_sources_have_weights_all_or_none():
    both = [{"path": "a"}, {"path": "b", "weight": 2.0}]
    with pytest.raises(ValueError, match=r"weights \[0\.0, 2\.0\] of the sources: give each of them one"):
        DataConfig.model_validate({"sources": both})
    with pytest.raises(ValueError, match=r"path and sources: give one of the two"):
        DataConfig.model_validate({"sources": [{"path": "a"}], "path": "b"})
    one, two = DataConfig.model_validate({"sources": [{"path": "a", "split": "x"}, {"path": "b"}]}).each()
    assert (one.path, one.split, two.path, two.split) == ("a", "x", "b", "train")
