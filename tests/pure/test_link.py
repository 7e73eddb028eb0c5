"""What ``wire="auto"`` decides from a link's speed, and the host memory that copies may take."""

import pytest

from shardwright.transport import link as links
from shardwright.transport.base import LinkSpeed
from shardwright.transport.link import free_nbytes, what_pays


class Ranks:
    """A transport of which only words are exchanged: of each rank its host, and its free bytes a rank."""

    free_nbytes = None

    def __init__(self, hosts, others=()):
        self.hosts, self.others = hosts, others

    def exchange(self, words, key):
        return [[words[0] + host] for host in self.hosts]

    def all_reduce_words(self, words, combine, key):
        result = words[0]
        for other in self.others:
            result = combine(result, other)
        return [result]


@pytest.mark.parametrize(
    ("hosts", "launched", "others", "expected"),
    [
        ((0, 1), None, (), 1200),
        ((0, 0, 0, 1), None, (), 400),
        ((0, 1), "4", (), 300),  # ranks of other axes: nodes of four ranks each
        ((0, 0, 1, 1), "2", (-500,), 500),  # another host has less
    ],
)
def test_the_free_memory_of_a_host_is_divided_among_its_ranks(monkeypatch, hosts, launched, others, expected):
    monkeypatch.setattr(links, "host_free_nbytes", lambda: 1200)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    assert free_nbytes(Ranks(hosts, others)) == expected


GBIT_S = 8e-9


@pytest.mark.parametrize(
    ("gbit", "trained", "frozen"),
    [
        (0.1, "changes codes gradients", "changes"),
        (0.5, "changes codes", "changes"),
        (1, "", "changes"),
        (5, "", "changes"),
        (10, "", ""),
    ],
)
def test_what_pays_depends_on_the_time_of_a_byte_on_the_link_and_in_the_coder(gbit, trained, frozen):
    link = LinkSpeed(GBIT_S / gbit, 4e-9, 6e-10)
    for share, expected in ((0.0, trained), (1.0, frozen)):
        found = what_pays(link, share)
        names = ("changes", "codes", "gradients")
        assert [name for name in names if getattr(found, name)] == expected.split()
        assert bool(found.why) == (not expected)


TABLES = LinkSpeed(0, 1 / 0.30e9, 1 / 3.1e9)  # the coder of docs/design/wire.md


@pytest.mark.parametrize("coder", [0.75, 1.0, 1.4])
@pytest.mark.parametrize(
    ("gbit", "trained", "frozen"),
    [(0.1, (True, True, True), True), (1, (False, False, False), True), (10, (False, False, False), None)],
)
def test_what_pays_at_a_usual_speed_is_the_same_with_a_slower_or_faster_coder(gbit, trained, frozen, coder):
    """Of groups that are trained: changes, coded, gradients too. Of frozen ones: changes (None: either)."""
    link = LinkSpeed(GBIT_S / gbit, TABLES.coded_s / coder, TABLES.unchanged_s / coder)
    found = what_pays(link, 0.0)
    assert (found.changes, found.codes, found.gradients) == trained
    assert frozen in (None, what_pays(link, 1.0).changes)


def test_a_frozen_base_with_adapters_is_kept_where_weights_that_are_trained_are_not():
    found = what_pays(LinkSpeed(GBIT_S, TABLES.coded_s, TABLES.unchanged_s), 0.97)
    assert (found.changes, found.codes, found.gradients) == (True, False, False)
