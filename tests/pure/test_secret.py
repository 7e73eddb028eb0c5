"""The secret that ranks of a transport agree on, through a store that anybody may read."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from shardwright.errors import CommError, ConfigError
from shardwright.transport import secret
from shardwright.transport.attempt import Meeting
from shardwright.transport.cpu.handshake import Place
from shardwright.transport.process import LaunchLog

SECRET = "0123456789abcdef-of-the-launcher"


def prime_of_rfc_7919():
    """ffdhe2048 by the formula of the RFC: 2^2048 - 2^1984 + ([2^1918 e] + 560316) 2^64 - 1."""
    term = e = 1 << 1982
    factor = 0
    while term:
        factor += 1
        term //= factor
        e += term
    return 2**2048 - 2**1984 + ((e >> 64) + 560316 << 64) - 1


class Recorded(Meeting):
    """Keeps what is left in the store."""

    def leave(self, what, data, at=None):
        LEFT.append(data)
        super().leave(what, data, at)


LEFT: list[str] = []


def agreed(world, environments=None, monkeypatch=None):
    """What each rank has, or why not."""
    LEFT.clear()
    store, log, found = HashStore(), LaunchLog(range(world), "cpu"), [None] * world
    given = [b""] * world if environments is None else environments

    def run(rank):
        meeting = Recorded(store, log, rank, timedelta(seconds=20))
        try:
            with lock:
                monkeypatch.setattr(secret, "given", lambda: given[rank])
                agreement = secret.KeyAgreement(meeting)
            meeting.refusal("listen", None)
            found[rank] = agreement.secret()
        except CommError as error:
            found[rank] = str(error)

    lock = threading.Lock()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_the_group_is_the_one_that_is_named():
    assert prime_of_rfc_7919() == secret._PRIME
    assert pow(3, secret._PRIME - 1, secret._PRIME) == 1


@pytest.mark.parametrize("world", [1, 2, 7])
def test_all_ranks_have_one_secret_that_is_not_in_the_store(world, monkeypatch):
    found = agreed(world, monkeypatch=monkeypatch)
    assert len(set(found)) == 1 and len(found[0]) == 32
    assert not any(found[0].hex() in left for left in LEFT)
    assert agreed(world, monkeypatch=monkeypatch)[0] != found[0]


def test_that_of_the_environment_is_taken_and_is_not_in_the_store(monkeypatch):
    found = agreed(3, [SECRET.encode()] * 3, monkeypatch)
    assert found == [SECRET.encode()] * 3
    assert not any(SECRET in left or SECRET.encode().hex() in left for left in LEFT)


def test_ranks_that_were_given_different_ones_are_all_told(monkeypatch):
    for other in (b"", b"another, as long as that"):
        found = agreed(3, [SECRET.encode(), SECRET.encode(), other], monkeypatch)
        assert len(set(found)) == 1
        assert "SHARDWRIGHT_SECRET of rank 2 isn't that of rank 0: the launcher has to give" in found[0]


def test_one_that_can_be_guessed_is_refused(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "short")
    with pytest.raises(ConfigError, match="SHARDWRIGHT_SECRET has 5 bytes, expected 16 at least"):
        secret.given()


def test_each_call_has_a_key_of_its_own():
    place, same = Place("host", 1, "aa"), Place("host", 1, "ab")
    keys = [of.key(SECRET.encode(), rank, kind) for of in (place, same) for rank in (0, 1) for kind in (0, 1)]
    assert len(set(keys)) == 8 and place.key(b"other", 0, 0) not in keys
