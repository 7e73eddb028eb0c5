"""Groups from what a model says of itself."""

from shardwright.plan.grouping import Hints, groups_from_hints

LLAMA = {
    "model": "LlamaModel", "model.embed_tokens": "Embedding", "model.layers": "ModuleList",
    "model.layers.0": "LlamaDecoderLayer", "model.layers.0.mlp": "LlamaMLP",
    "model.layers.1": "LlamaDecoderLayer", "model.norm": "LlamaRMSNorm", "lm_head": "Linear",
}  # fmt: skip
PLAN = {
    "lm_head": "keep_full_weight", "model.embed_tokens": "free_full_weight",
    "model.layers.*": "free_full_weight", "model.norm": "keep_full_weight",
}  # fmt: skip


def test_a_group_per_block_one_for_the_embedding_and_one_for_norm_and_head():
    groups = groups_from_hints(LLAMA, Hints({"LlamaDecoderLayer"}, PLAN, "model.embed_tokens", "lm_head"))
    assert set(groups.apart) == {"model.layers.0", "model.layers.1", "model.embed_tokens"}
    assert groups.last == ("model.norm", "lm_head")


def test_a_plan_for_modules_that_are_not_there_is_passed_over():
    classes = {
        "transformer.wte": "Embedding",
        "transformer.h.0": "GPT2Block",
        "transformer.ln_f": "LayerNorm",
    }
    plan = {"transformer.embed_tokens": "free_full_weight", "transformer.layers.*": "free_full_weight"}
    groups = groups_from_hints(classes, Hints({"GPT2Block"}, plan, "transformer.wte"))
    assert set(groups.apart) == {"transformer.h.0", "transformer.wte"}
    assert groups.last == ()


def test_a_star_stands_for_one_part_of_a_name():
    groups = groups_from_hints(LLAMA, Hints((), PLAN))
    assert "model.layers.0.mlp" not in groups.apart


def test_inner_modules_come_before_those_around_them():
    classes = {"a": "Outer", "a.b": "Mid", "a.b.c": "Inner"}
    assert groups_from_hints(classes, Hints({"Outer", "Inner"}, {})).apart == ("a.b.c", "a")
