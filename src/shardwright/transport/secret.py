"""A secret that the ranks of a transport share, which the job's store never has in the clear.

It is ``SHARDWRIGHT_SECRET`` of the launcher's environment. Where that isn't set the first rank makes one up,
and ranks hand it on down a tree, each to two others, hidden by what only two can compute: Diffie-Hellman.
Who only reads the store doesn't learn it. Who writes there can put itself between two ranks, and is trusted.
"""

import hashlib
import hmac
import os
import secrets

from shardwright.errors import CommError, ConfigError
from shardwright.transport.attempt import Meeting

VARIABLE = "SHARDWRIGHT_SECRET"
_LEAST = 16
_PRIME = int(  # ffdhe2048 of RFC 7919 (appendix A.1), whose generator is 2
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B3EF9"
    "7D2FE363630C75D8F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E7F57C935"
    "984F0C70E0E68B77E2A689DAF3EFE8721DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108A94BB2C8E3FB"
    "B96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB190B07A7C8EE0A6D709E02FCE1CDF7E2ECC03404CD28342F61"
    "9172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005C58EF1837D1683B2C6F34A26C1B2EFFA"
    "886B423861285C97FFFFFFFFFFFFFFFF",
    16,
)
_BITS = 256  # of an exponent: RFC 7919 (section 5.2) asks for 225 at least


def given() -> bytes:
    """The secret of the environment; b"" where none is set. Raises: ConfigError for one that is too short."""
    found = os.environ.get(VARIABLE, "").encode()
    if 0 < len(found) < _LEAST:
        raise ConfigError(
            f"{VARIABLE} has {len(found)} bytes, expected {_LEAST} at least that nobody can guess: give all "
            "ranks what `openssl rand -hex 32` prints once"
        )
    return found


class KeyAgreement:
    """How the ranks of a meeting agree on a secret: each makes one before a ``refusal``, and asks after."""

    def __init__(self, meeting: Meeting) -> None:
        """Raises: as ``given``."""
        self._meeting, self._given = meeting, given()
        self._exponent = secrets.randbits(_BITS)
        # Compared with the first rank's in the store, which learns nothing of the secret by it.
        self._mark = hmac.digest(self._given, b"the same on all ranks", "sha256").hex()[:16]
        meeting.leave("secret", self._mark)
        if not self._given:  # g^x: all that the store ever has of the exponents
            meeting.leave("public", f"{pow(2, self._exponent, _PRIME):x}")

    def secret(self) -> bytes:
        """The secret. Raises: CommError, on all ranks, where one was given another than the first rank."""
        meeting, at = self._meeting, self._meeting.rank
        own = None
        if meeting.read("secret", [0])[0] != self._mark:
            own = f"{VARIABLE} of rank {meeting.log.ranks[at]} isn't that of rank {meeting.log.ranks[0]}"
        if (refused := meeting.refusal("secret", own)) is not None:
            raise CommError(f"{refused}: the launcher has to give all ranks the same, or none")
        if self._given:
            return self._given
        # Down a tree each rank hands the secret on to two others at most, however many there are.
        children = [child for child in (2 * at + 1, 2 * at + 2) if child < meeting.world]
        parent = (at - 1) // 2
        publics = meeting.read("public", [*([parent] if at else []), *children])
        secret = secrets.token_bytes(32)
        if at:
            secret = self._hidden(bytes.fromhex(meeting.own("sealed", parent)), publics[parent])
        for child in children:
            meeting.leave("sealed", self._hidden(secret, publics[child]).hex(), child)
        return secret

    def _hidden(self, secret: bytes, public: str) -> bytes:
        """A secret, so that only one other rank can read it; or what that rank has hidden. Of each pair one
        secret is sent, once."""
        shared = pow(int(public, 16), self._exponent, _PRIME).to_bytes(_PRIME.bit_length() // 8, "big")
        # As long as the secret, and used once, for nothing else: so exclusive or hides it.
        pad = hashlib.sha256(shared).digest()
        return bytes(a ^ b for a, b in zip(secret, pad, strict=True))
