"""Batches of sequences that ranks share: parts, labels and positions."""

import pytest
import torch

from shardwright.errors import InputError
from shardwright.parallel import document_positions, shift_labels
from shardwright.parallel.sequence import part_of


def test_parts_of_a_batch_put_together_are_the_batch_and_what_is_no_sequence_is_whole_in_each():
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6) + 1}
    others = {"weight": torch.ones(2), "mask": torch.ones(2, 1, 6, 6)}
    parts = [part_of(batch | others, rank, 3) for rank in range(3)]
    for name, whole in (batch | {"position_ids": torch.arange(6)[None]}).items():
        assert torch.equal(torch.cat([part[name] for part in parts], 1), whole)
    assert all(part["mask"] is others["mask"] and part["weight"] is others["weight"] for part in parts)
    given = torch.tensor([[0, 1, 0, 1, 2, 3]])
    assert part_of(batch | {"position_ids": given}, 1, 3)["position_ids"].tolist() == [[0, 1]]


def test_a_batch_that_ranks_can_not_share_says_how_long_it_must_be():
    with pytest.raises(InputError, match=r"'input_ids' has sequences of 7, which cp=4 .* pad them to 8"):
        part_of({"input_ids": torch.ones(1, 7)}, 0, 4)
    for bad in ({}, {"weight": torch.ones(2)}):
        with pytest.raises(InputError, match=r"expected tensors, the first of them \[batch, sequence"):
            part_of(bad, 0, 1)


def test_labels_are_shifted_across_borders_of_ranks_but_not_of_documents():
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    assert shift_labels(labels).tolist() == [[2, 3, 4, 5, -100]]
    positions = document_positions(torch.tensor([0, 2, 5], dtype=torch.int32))
    assert positions.tolist() == [[0, 1, 0, 1, 2]]
    assert shift_labels(labels, positions, ignore_index=-1).tolist() == [[2, -1, 4, 5, -1]]
