"""Text and records as windows to fine-tune on: what is learned, what sees what, and what is refused."""

import json

import numpy as np
import pytest
import torch

from shardwright.errors import DataError
from shardwright.finetune.records import Example, read_texts
from shardwright.finetune.windows import IGNORED, packed, stream
from shardwright.train.config import DataConfig


class Bytes:
    """A tokenizer whose tokens are bytes, with a template that repeats its messages."""

    bos_token, eos_token, bos_token_id, eos_token_id = "^", "$", ord("^"), ord("$")
    chat_template = "yes"

    def __init__(self, counts: bool = False) -> None:
        self.counts = counts  # how many messages there are is in the text: no begin of it stays as it is

    def __call__(self, text, **_):
        ids = [list(t.encode()) for t in ([text] if isinstance(text, str) else text)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        said = "".join(f"<{m['role'][0]}>{m['content']};" for m in messages)
        return (str(len(messages)) if self.counts else "") + said + ("<a>" if add_generation_prompt else "")


def write(folder, *lines, name="notes.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return DataConfig(path=str(path), heldout_share=0.01)


def shown(example):
    """The text, and that text with a dot for what isn't learned."""
    text = bytes(example.tokens.astype(np.uint8)).decode()
    return text, "".join(c if on else "." for c, on in zip(text, example.learned, strict=True))


def both(texts):
    return sorted(shown(example) for example in (*texts.train, *texts.heldout))


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "bye"},
]


def test_what_is_learned_of_each_kind_of_record(tmp_path):
    config = write(
        tmp_path, {"text": "abc"}, {"prompt": "2+2=", "completion": "4"}, "", {"messages": CHAT, "id": 7}
    )
    chat = "<u>hi;<a>ho;<u>so;<a>no;<u>bye;"
    assert both(read_texts(config, Bytes())) == [
        (chat, ".........ho;.........no;......."),
        ("^2+2=4$", ".....4$"),
        ("^abc$", ".abc$"),
    ]
    unmasked = both(read_texts(config.model_copy(update={"mask_prompts": False}), Bytes()))
    assert [learned for _, learned in unmasked] == [chat, ".2+2=4$", ".abc$"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"notes\.jsonl, line 3: not JSON \(.*\); each line is one object"),
        ("[1]", r"notes\.jsonl, line 3: got a list, expected an object"),
        ('{"txt": "a"}', r"line 3: got the keys \['txt'\], expected"),
        ('{"prompt": "", "completion": "b"}', r"line 3: 'prompt' is '', expected text"),
        ('{"text": 7}', r"line 3: 'text' is 7, expected text"),
        ('{"messages": "hi"}', r"line 3: 'messages' is 'hi', expected a list of {\"role\": text"),
        ('{"messages": []}', r"line 3: 'messages' is an empty list"),
        (
            '{"messages": [{"role": "user"}]}',
            r"line 3: 'messages'\[0\]\['content'\] is missing, expected text",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}',
            r"line 3: 'messages'\[1\]\['content'\] is None, expected text",
        ),
        ('{"messages": [{"role": 1, "content": "a"}]}', r"line 3: 'messages'\[0\]\['role'\] is 1, expected"),
        ('{"messages": ["hi"]}', r"line 3: 'messages'\[0\] is 'hi', expected {\"role\": text"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}',
            r"line 3: 'role' of 'messages' is \['bot', 'user'\], and none is \"assistant\"",
        ),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    config = write(tmp_path, {"text": "abc"}, {"text": "def"}, line, {"text": "ghi"})
    with pytest.raises(DataError, match=message):
        read_texts(config, Bytes())


def test_templates_that_cannot_be_cut_or_are_not_there_are_refused(tmp_path):
    config = write(tmp_path, {"text": "abc"}, {"messages": CHAT})
    with pytest.raises(DataError, match=r"line 2: the tokenizer's template writes message 1 in another way"):
        read_texts(config, Bytes(counts=True))
    bare = Bytes()
    bare.chat_template = None
    with pytest.raises(DataError, match=r"line 2: the tokenizer has no chat template"):
        read_texts(config, bare)


@pytest.mark.parametrize("name", ["notes.ndjson", "notes.json"])
def test_records_under_other_names_are_records(tmp_path, name):
    config = write(tmp_path, {"text": "abc"}, {"text": "def"}, name=name)
    assert both(read_texts(config, Bytes())) == [("^abc$", ".abc$"), ("^def$", ".def$")]
    (tmp_path / "b.json").write_text('{\n  "text": "abc"\n}\n')
    assert not read_texts(DataConfig(path=str(tmp_path / "b.json"), heldout_share=0.2), Bytes()).are_records


def test_one_record_and_mixed_files_are_refused(tmp_path):
    config = write(tmp_path, {"text": "abc"})
    with pytest.raises(DataError, match=r"1 record\(s\), expected 2"):
        read_texts(config, Bytes())
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"1 \.jsonl and 1 other files: choose with data\.suffixes"):
        read_texts(DataConfig(path=str(tmp_path)), Bytes())


def test_files_are_held_out_whole_and_begin_and_end_with_the_tokenizers_marks(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(str(i) * 10)
    texts = read_texts(DataConfig(path=str(tmp_path), heldout_share=0.2), Bytes())
    assert not texts.are_records
    assert (len(texts.train), len(texts.heldout)) == (8, 2)
    assert both(texts) == [(f"^{10 * str(i)}$", f".{10 * str(i)}$") for i in range(10)]


def example(length, first, unlearned=1):
    return Example(np.arange(first, first + length, dtype=np.int32), np.arange(length) >= unlearned)


def test_a_stream_learns_every_token_once_but_the_first_of_each_text():
    examples = [example(5, 10), example(1, 20), example(9, 30)]
    windows = stream(examples, 4)
    batch = windows.batch(range(len(windows)))
    assert batch.inputs.tolist() == [[10, 11, 12, 13], [14, 20, 30, 31], [32, 33, 34, 35]]
    assert batch.targets.tolist() == [[11, 12, 13, 14], [IGNORED, IGNORED, 31, 32], [33, 34, 35, 36]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 2, 3]]
    assert batch.num_targets == 10 == len(windows.targets())
    with pytest.raises(DataError, match="15 tokens hold no sequence of 20"):
        stream(examples, 20)


def test_records_are_packed_whole_and_padding_is_not_learned():
    examples = [
        example(3, 10),
        example(2, 20),
        example(6, 30, unlearned=4),
        example(9, 40),
        example(5, 50, 5),
    ]
    windows = packed(examples, 5, 0, several=True)
    batch = windows.batch([0, 1, 2])
    assert (windows.cut, windows.dropped, len(windows)) == (1, 1, 3)
    assert batch.inputs.tolist() == [[10, 11, 12, 20, 21], [30, 31, 32, 33, 34], [40, 41, 42, 43, 44]]
    no = IGNORED
    assert batch.targets.tolist() == [[11, 12, no, 21, no], [no, no, no, 34, 35], [41, 42, 43, 44, 45]]
    assert batch.positions is not None
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1]
    apart = packed(examples, 5, 0, several=False).batch([0, 1])
    assert apart.inputs.tolist() == [[10, 11, 12, 0, 0], [20, 21, 0, 0, 0]]
    assert apart.targets.tolist() == [[11, 12, no, no, no], [21, no, no, no, no]]
    with pytest.raises(DataError, match=r"none has anything to learn in its first 3 tokens"):
        packed([example(9, 0, unlearned=6)], 3, 0, several=True)


def test_windows_that_are_one_text_each_need_no_positions():
    assert stream([example(20, 0)], 4).batch([1, 2]).positions is None


def test_every_token_to_learn_is_a_target_whatever_the_packing():
    generator = np.random.default_rng(0)
    examples = [example(int(n), 100 * i + 1) for i, n in enumerate(generator.integers(2, 9, size=40))]
    wanted = sorted(int(t) for e in examples for t in e.tokens[1:])
    for several in (True, False):
        windows = packed(examples, 8, 0, several=several)
        assert sorted(windows.targets().tolist()) == wanted
        batch = windows.batch(range(len(windows)))
        assert torch.equal(torch.sort(batch.targets[batch.targets != IGNORED]).values, torch.tensor(wanted))
