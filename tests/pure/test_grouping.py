"""Groups from what a model says of itself."""

import pytest

from shardwright.schedule.grouping import Hints, Node, groups_from_hints, joined, leftovers, repeated

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
    classes = {"wte": "Embedding", "h.0": "GPT2Block", "ln_f": "LayerNorm"}
    classes = {f"transformer.{name}": kind for name, kind in classes.items()}
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


@pytest.mark.parametrize(("head", "last"), [(None, ()), ("lm_head", ("lm_head",)), ("score", ())])
def test_a_head_that_is_not_there_is_in_no_group(head, last):
    assert groups_from_hints(LLAMA, Hints((), {}, head=head)).last == last


def list_of(name, kinds, nbytes=10):
    members = tuple(Node(f"{name}.{i}", kind, nbytes, True) for i, kind in enumerate(kinds))
    return Node(name, "ModuleList", nbytes * len(kinds), False, members)


def test_the_members_of_a_list_of_one_class_are_groups_the_outermost_lists_only():
    inner = Node("h.0", "Block", 10, True, (list_of("h.0.experts", ["Expert", "Expert"]),))
    outer = Node("h", "ModuleList", 20, False, (inner, Node("h.1", "Block", 10, True)))
    members = (Node("mlp.0", "Linear", 9, True), Node("mlp.1", "ReLU", 0, True))
    mixed = Node("mlp", "Sequential", 20, True, members)
    assert repeated(Node("", "Model", 60, True, (mixed, outer))) == ["h.0", "h.1"]
    assert repeated(list_of("", ["Block"])) == []


def sequential(*members):
    """Of (kind, bytes, whether it has a forward)."""
    nodes = tuple(Node(f"s.{place}", *member) for place, member in enumerate(members))
    return Node("s", "Sequential", sum(node.nbytes for node in nodes), True, nodes)


@pytest.mark.parametrize(
    ("members", "mixed", "found"),
    [
        ([("Block", 10, True), ("Block", 10, True)], False, ["s.0", "s.1"]),
        ([("Linear", 10, True), ("Block", 10, True)], False, []),
        ([("Linear", 10, True), ("Block", 10, True)], True, ["s.0", "s.1"]),
        ([("Linear", 10, True), ("ReLU", 0, True)], True, []),
        ([("Linear", 10, True), ("ReLU", 0, True), ("Block", 10, True)], True, ["s.0", "s.2"]),
        ([("Block", 10, True), ("Block", 0, True), ("Block", 10, False)], False, ["s.0"]),
    ],
)
def test_the_members_of_a_sequence_are_groups_those_of_several_classes_where_that_is_asked_for(
    members, mixed, found
):
    assert repeated(sequential(*members), mixed) == found
    assert mixed or repeated(sequential(*members)) == found
    alike = Node("s", "Model", 20, True, sequential(*members).children)
    assert repeated(alike, mixed) == []


def test_leftovers_are_runs_of_neighbours_that_a_grouped_module_ends():
    root = Node(
        "",
        "Model",
        99,
        True,
        (
            Node("embedding", "Embedding", 5, True),
            Node("dropout", "Dropout", 0, True),
            Node("positions", "Embedding", 5, True),
            list_of("h", ["Block", "Block"]),
            list_of("extra", ["Norm", "Scale"]),
            Node("head", "Linear", 5, True, (Node("head.inner", "Linear", 5, True),)),
        ),
    )
    runs = [[node.name for node in run] for run in leftovers(root, {"h.0", "h.1"})]
    assert runs == [["embedding", "positions"], ["extra.0", "extra.1", "head"]]
    # Around a grouped module only what lies beside it is left: its parent's own forward reads the rest.
    runs = [[node.name for node in run] for run in leftovers(root, {"h.1", "head.inner"})]
    assert runs == [["embedding", "positions", "h.0"], ["extra.0", "extra.1"]]
    runs = [[node.name for node in run] for run in leftovers(root, ())]
    assert runs == [["embedding", "positions", "h.0", "h.1", "extra.0", "extra.1", "head"]]


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (0, ["a", "b", "c", "d"]),
        (10, ["a", "b", "c", "d"]),
        (15, ["ab", "cd"]),
        (20, ["ab", "cd"]),
        (25, ["abcd"]),
        (30, ["abcd"]),
        (99, ["abcd"]),
    ],
)
def test_small_neighbours_are_joined_until_they_are_large_enough(least, expected):
    nodes = [Node(name, "Block", 10, True) for name in "abcd"]
    assert ["".join(group) for group in joined(nodes, least)] == expected
