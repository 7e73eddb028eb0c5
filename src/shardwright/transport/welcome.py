"""How ranks that use one store come to share a random token: the protocol, step by step, with no store in it.

The store may be full of what ranks before have left, and the same ranks meet again and again by the same
keys, some already in their next meeting while others are still in the last one. The first rank makes the
token; the others learn it by three keys each:

    hello/<rank>            the rank's own random number      written by the rank
    welcome/<rank>          that number, and the token        written by the first rank
    <token>/met/<rank>      that the rank has the token       written by the rank

A welcome counts for the number that it repeats, so nobody takes an old one. A rank that has the token is seen
to have it before it says its next hello, and the first rank looks for that *after* it has read a hello: so a
hello of the next meeting is never answered with the token of the last one. Each looks whether what it wrote
still stands, and writes it again where it doesn't: what comes late from a process that has ended does no
harm. Processes that have the same rank, and live at the same time, can't be told apart: a launcher ends the
ranks of an attempt before it starts those of the next.

A round is a generator: it yields a key to be read, with None, and is sent what is there, "" for nothing; or
a key to be written, with its value. ``tests/pure/test_welcome.py`` explores all interleavings of them.
"""

from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")
Round = Generator[tuple[str, str | None], str, _Result]


def answer(rank: int, token: str) -> Round[bool]:
    """A round of the first rank for one of the others. Returns whether that has the token."""
    number = yield f"hello/{rank}", None
    if not number:
        return False
    if (yield met(rank, token), None):
        return True
    if (yield f"welcome/{rank}", None) != f"{number} {token}":
        yield f"welcome/{rank}", f"{number} {token}"
    return False


def ask(rank: int, number: str, word: str) -> Round[str]:
    """A round of a rank but the first. Returns the token, "" where this number isn't welcome yet.

    word: left for all who have the token.
    """
    welcomed, _, token = (yield f"welcome/{rank}", None).partition(" ")
    if welcomed != number:
        if (yield f"hello/{rank}", None) != number:
            yield f"hello/{rank}", number
        return ""
    while not (yield met(rank, token), None):
        yield met(rank, token), word
    return token


def met(rank: int, token: str) -> str:
    """The key by which a rank that has the token is known."""
    return f"{token}/met/{rank}"
