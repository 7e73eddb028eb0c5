"""Fine-tuning on data as people have it: formats, tables, data sets and mixtures, tokenised once per host."""

import json
import logging
import re
import shutil

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
pytest.importorskip("datasets", reason="needs the extra: pip install 'shardwright[finetune]'")

import datasets
import torch
import transformers
from pyarrow import parquet

from bench import tokenise as bench_tokenise
from shardwright.data.encode import Encoder
from shardwright.data.feed import feed_of
from shardwright.data.formats import chat_of
from shardwright.data.sources import find
from shardwright.data.store import tokenised
from shardwright.data.text import Share
from shardwright.errors import DataError
from shardwright.finetune.apart import keeps_apart
from shardwright.hf import library
from shardwright.recipe.config import DataConfig
from tests.hf.test_finetune import losses, place, recipe_of, tune  # noqa: F401
from tests.ranks.pool import run_ranks

CHATS = [(f"{i} + 1?", str(i + 1)) for i in range(60)]
ROLES = ("user", "assistant")
MESSAGES = [
    {"messages": [{"role": r, "content": c} for r, c in zip(ROLES, chat, strict=True)]} for chat in CHATS
]


def sources_of(root):
    """The same chats in every format and kind of source: {name: path}."""
    turns = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in CHATS]
    messages = [each["messages"] for each in MESSAGES]
    rows = {
        "messages.jsonl": MESSAGES,
        "sharegpt.json": [{"conversations": each} for each in turns],
        "alpaca.jsonl": [{"instruction": q, "input": "", "output": a} for q, a in CHATS],
        "conversational.jsonl": [{"prompt": each[:1], "completion": each[1:]} for each in messages],
    }
    for name, records in rows.items():
        lines = [json.dumps(record) for record in records]
        text = f"[{', '.join(lines)}]" if name.endswith(".json") else "\n".join(lines)
        (root / name).write_text(text)
    table = datasets.Dataset.from_list(MESSAGES)
    table.to_parquet(root / "messages.parquet")
    parts = {"train": table, "test": table.select(range(3))}
    datasets.DatasetDict(parts).save_to_disk(root / "saved")
    table.save_to_disk(root / "saved_alone", num_shards=2)
    files = {"train": str(root / "messages.parquet")}
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(root / "cached"))
    names = [*rows, "messages.parquet", "saved", "saved_alone", "cached"]
    return {name: str(root / name) for name in names}


def trained(rank, world, base, root, paths):
    """Runs on each; per run how many of its sources this rank has built."""
    built = []
    for name, path in paths.items():
        data = {"path": path, "cache": str(root / "tokens")}
        recipe = recipe_of(base, root / "runs" / name, data=data, training={"epochs": 1, "batch_size": 4})
        tokenizer = library.tokenizer(base / "llama")
        built.append(sum(s.seconds > 0 for s in feed_of(recipe, tokenizer, Share(rank, world, 4)).sources))
        tune(rank, world, recipe)
    return built


def test_the_same_chats_in_every_format_and_source_are_trained_on_alike(place, tmp_path):  # noqa: F811
    paths = sources_of(tmp_path)
    built = run_ranks(2, trained, place, tmp_path, paths)
    assert [sum(counts) for counts in zip(*built, strict=True)] == [1] * len(paths)  # by one of the ranks
    tokenizer, found = library.tokenizer(place / "llama"), set()
    for name, path in paths.items():
        config = DataConfig(path=path, cache=str(tmp_path / "tokens"), heldout_share=0.1)
        data = tokenised(config, tokenizer, place / "llama")
        assert data.seconds == 0 and data.kind == "records"
        found.add(data.examples.tokens.tobytes())
        heldout = losses(tmp_path / "runs" / name, "heldout_loss")
        assert heldout[max(heldout)] < heldout[0]
    assert len(found) == 1


def test_a_name_on_the_hub_is_asked_for_its_subset_and_split_alone(monkeypatch, tmp_path):
    asked = []
    table = datasets.Dataset.from_list(MESSAGES)

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = find(DataConfig(path="someone/chats", subset="en", split="train[:10]"))
    find(DataConfig(path="someone/chats"))
    whole = {"split": "train"}
    assert asked == [(("someone/chats", "en"), {"split": "train[:10]"}), (("someone/chats", None), whole)]
    assert [row for _, row in source.table.rows()] == MESSAGES


def test_what_datasets_loads_by_a_name_is_read_and_a_missing_split_is_told(monkeypatch, tmp_path):
    table = datasets.Dataset.from_list(MESSAGES)
    (tmp_path / "chats").mkdir()
    table.to_parquet(tmp_path / "chats" / "train-00000-of-00001.parquet")
    load = datasets.load_dataset
    folders = {"cache_dir": str(tmp_path / "cache")}

    def from_the_cache(name, subset, split):
        return load(str(tmp_path / name.split("/")[1]), subset, split=split, **folders)

    monkeypatch.setattr(datasets, "load_dataset", from_the_cache)
    source = find(DataConfig(path="someone/chats", split="train"))
    assert [row for _, row in source.table.rows()] == MESSAGES
    with pytest.raises(DataError, match=r"someone/chats has no split 'test' .*'train'.*: set data\.split"):
        find(DataConfig(path="someone/chats", split="test"))


def test_data_that_is_not_there_is_told_without_a_network(place, tmp_path):  # noqa: F811
    tokenizer = library.tokenizer(place / "llama")
    given = {
        "someone/no-such-set": r"and the Hugging Face Hub gives no data set of this name",
        "nothing.jsonl": r"no such file or folder; give an existing one",
        str(tmp_path / "saved"): r"no split 'train'; there is test: set data\.split",
    }
    datasets.DatasetDict({"test": datasets.Dataset.from_list(MESSAGES)}).save_to_disk(tmp_path / "saved")
    for path, message in given.items():
        with pytest.raises(DataError, match=message):
            tokenised(DataConfig(path=path), tokenizer, place / "llama")
    parquet.write_table(datasets.Dataset.from_list(MESSAGES).data.table, tmp_path / "cut.parquet")
    content = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"cut\.parquet is damaged"):
        tokenised(DataConfig(path=str(tmp_path / "cut.parquet")), tokenizer, place / "llama")


def test_sources_are_mixed_by_weight_and_bad_records_are_counted(place, tmp_path):  # noqa: F811
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, MESSAGES), '{"messages": []}', "{"]))
    (tmp_path / "b.txt").write_text("Text of another kind. " * 200)
    weights = {"a.jsonl": 1.0, "b.txt": 3.0}
    sources = [{"path": str(tmp_path / name), "weight": weight} for name, weight in weights.items()]
    data = {"path": "stdlib", "sources": sources, "on_bad": "skip"}
    recipe = recipe_of(place, tmp_path / "run", data=data, training={"epochs": 1, "batch_size": 4})
    run_ranks(2, tune, recipe)
    heldout = losses(tmp_path / "run", "heldout_loss")
    assert heldout[max(heldout)] < heldout[0]
    feed = feed_of(recipe, library.tokenizer(place / "llama"), Share(0, 1, 4))
    assert feed.order.counts == [round(feed.epoch / 4), round(3 * feed.epoch / 4)]
    told = "\n".join(feed.opening(recipe))
    assert "left out 2 of 62 records, which can't be used: a.jsonl, line 61: 'messages' is []" in told
    assert f"b.txt: {feed.order.counts[1]:,} of {feed.epoch:,} sequences of an epoch" in told


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {% generation %}{{ m['content'] }}\n"
    "{% endgeneration %}{% else %}U: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)


def test_a_template_that_marks_the_assistant_gives_the_mask_that_is_found_without(place):  # noqa: F811
    chats = [chat_of(m["messages"] * 2) for m in MESSAGES[:5]]
    masks = []
    for template in (MARKED, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        tokenizer = library.tokenizer(place / "llama")
        tokenizer.chat_template = template
        masks.append([(e.tokens.tolist(), e.learned.tolist()) for (e,) in Encoder(tokenizer).encode(chats)])
    assert masks[0] == masks[1]
    assert any(masks[0][0][1])


HERMES = (
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}{% for c in m['tool_calls'] %}{{ c['function'] | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = HERMES.replace("{{ m['content'] }}", "{% if not m['tool_calls'] %}{{ m['content'] }}{% endif %}")


def test_templates_that_leave_out_calls_or_what_is_said_beside_them_are_refused(place):  # noqa: F811
    call = {"function": {"name": "rain", "arguments": {"city": "Oslo"}}}
    asked, said = {"role": "user", "content": "Rain?"}, {"role": "assistant", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "rain", "parameters": {}}}]
    alone = chat_of([asked, {**said, "content": ""}], tools)
    beside = chat_of([asked, {**said, "content": "I look."}], tools)
    found = {}
    for name, template in {"hermes": HERMES, "llama": LLAMA, "chatml": bench_tokenise.TEMPLATE}.items():
        tokenizer = library.tokenizer(place / "llama")
        tokenizer.chat_template = template
        found[name] = Encoder(tokenizer).encode([alone, beside])
    assert all(isinstance(each, list) for each in [*found["hermes"], found["llama"][0]])
    learned = [bytes(e.tokens[e.learned].tolist()).decode() for each in found["hermes"] for e in each]
    assert [text.partition("{")[0] for text in learned] == ["", "I look."] and "Oslo" in learned[0]
    folder = re.escape(str(place / "llama"))
    assert re.match(f"the chat template of {folder} doesn't write the content", str(found["llama"][1]))
    for each in found["chatml"]:
        assert re.search(r"write 'tool_calls'\[0\] of message 1, 'tools'\[0\]: the model", str(each))


def bloom(folder, llama):
    """A model that knows no positions, with the tokenizer of bytes."""
    config = transformers.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=2)
    torch.manual_seed(0)
    transformers.BloomForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(llama / name, folder / name)


def without_positions(rank, world, recipe):
    said = []
    logging.getLogger("shardwright.finetune.job").addFilter(lambda record: said.append(record.getMessage()))
    tune(rank, world, recipe)
    return said


def test_a_model_that_lets_packed_records_see_each_other_has_one_in_each_and_says_so(place, tmp_path):  # noqa: F811
    llama = transformers.AutoModelForCausalLM.from_pretrained(place / "llama")
    assert keeps_apart(llama, llama.config.vocab_size, torch.device("cpu"))
    bloom(tmp_path / "bloom", place / "llama")
    base = {"folder": str(tmp_path / "bloom"), "quantise": "none"}
    adapter, sample = {"targets": ["query_key_value"]}, {"num_bytes": 1}
    more = {"training": {"epochs": 1}, "adapter": adapter, "sample": sample}
    recipe = recipe_of(place, tmp_path / "run", base=base, **more)
    ((said,),) = run_ranks(1, without_positions, recipe)
    says = r"\w+ lets records that share a sequence see each other.* own: 5\d, and an epoch is \d"
    assert re.match(says, said)
    assert max(losses(tmp_path / "run")) == 9
    heldout = losses(tmp_path / "run", "heldout_loss")
    assert heldout[max(heldout)] < heldout[0]
