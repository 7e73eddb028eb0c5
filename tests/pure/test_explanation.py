"""What ``explain`` advises on exposed bytes would change something, or it says that nothing does.

This process plays rank 0 of two (``bench/rankzero.py``); steps are recorded as they are on ranks.
"""

import pytest
import torch
from torch import nn

from bench.rankzero import rank_zero_of
from shardwright import SchedulePolicy, explain, fully_shard
from shardwright.engine.unit import unit_of
from shardwright.transport.differences import Sends

WIDTH, VOCAB, BLOCK = 264, 1001, 1000  # each end, and each half of a block, is larger than a MiB
NOTHING = "no fully_shard call hides it"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, BLOCK), nn.Linear(BLOCK, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """``head_first``: the head is set before the blocks, so that it isn't known to be read last."""

    def __init__(self, head_first=False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(WIDTH, VOCAB)
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        if not head_first:
            self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def explained(by_themselves, policy=None, sends=None, whole=False, **options):
    """Modules of each group -> what is said to be exposed; after steps of a model of which these modules are
    groups by themselves, besides its blocks. whole: the first block isn't cut, as something is asked of it.
    """
    with rank_zero_of(2):
        model = Model(**options)
        for name in by_themselves:
            fully_shard(model.get_submodule(name))
        for block in model.blocks:
            fully_shard(block)
        if whole:
            model.blocks[0].set_gradient_divide_factor(1.0)
        fully_shard(model)
        model.set_schedule_policy(policy or SchedulePolicy(bucket_cap_mb=0))
        for _ in range(3):
            model(torch.arange(6).view(2, 3)).sum().backward()
        if sends is not None:
            for group in unit_of(model).runtime.groups:
                group.gatherer.sends = sends
        explanation = explain(model)
    return {"+".join(row.modules): row.exposed for row in explanation.groups}, str(explanation)


def test_an_embedding_that_moves_rows_in_use_already_is_told_that_nothing_hides_it():
    rows, _ = explained(["embedding"], SchedulePolicy(bucket_cap_mb=0, row_wise=True))
    assert "row_wise" not in rows["embedding"] and NOTHING in rows["embedding"]


def test_an_embedding_that_moves_all_rows_is_told_which_call_is_missing():
    rows, _ = explained(["embedding"])
    assert "take SchedulePolicy(row_wise=True)" in rows["embedding"]
    assert "call fully_shard" not in rows["embedding"]
    rows, _ = explained([])
    assert "call fully_shard on embedding by itself, with SchedulePolicy(row_wise=True)" in rows[""]


def test_a_small_table_of_positions_is_not_taken_for_the_embedding():
    rows, _ = explained(["embedding"], SchedulePolicy(row_wise=True))
    (exposed,) = (text for name, text in rows.items() if name in ("", "position"))
    assert exposed and "row_wise" not in exposed and NOTHING in exposed


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_block_that_is_two_groups_is_not_told_to_be_halved(by_hand):
    rows, _ = explained(["blocks.0.down"] if by_hand else [])
    assert rows["blocks.0"] and "half" not in rows["blocks.0"] and NOTHING in rows["blocks.0"]


def test_a_block_that_is_one_group_is_told_which_half_of_it_to_take():
    rows, _ = explained([], whole=True)
    assert "call fully_shard([blocks.0.down]) before" in rows["blocks.0"]


def test_where_nothing_is_gathered_ahead_by_policy_that_is_what_to_change():
    rows, _ = explained([], SchedulePolicy(bucket_cap_mb=0, depth=0))
    assert all("depth and prefetch of SchedulePolicy" in text for text in rows.values() if text)


def test_a_root_of_norm_and_head_is_told_to_take_the_head_by_itself():
    rows, _ = explained(["embedding", "position"], head_first=True)
    assert "half" not in rows[""] and "call fully_shard on head by itself, before" in rows[""]
    hidden, _ = explained(["embedding", "position", "head"], head_first=True)
    assert hidden["head"] == ""


@pytest.mark.parametrize("codes", [False, True])
def test_exposed_bytes_are_said_to_be_uncoded_where_less_is_sent(codes):
    rows, plain = explained([])
    assert "uncoded" not in plain + rows[""]
    rows, text = explained([], sends=Sends(changes=True, codes=codes, gradients=codes))
    gathered, reduced = rows[""].split(", reduce-scatter ")
    assert "iB, uncoded)" in gathered and ("iB, uncoded)" in reduced) is codes
    assert "iB, uncoded, a step are received" in text
    assert ("row_wise=True" in text) is not codes  # what has changed of it is less than its rows in use
