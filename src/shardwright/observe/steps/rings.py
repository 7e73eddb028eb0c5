"""What one rank did in its last steps, as people, pages and other ranks read it: a ring of records.

kind        action                              what it is
compute     ""                                  the training thread in the model's own forward or backward:
                                                from the end of one call of the runtime to the next
outside     "loss", "user"                      the training thread between phases, in none of the spans
span        "optimizer", "data", "save", ...    what somebody has said that it does
gc          ""                                  Python collects garbage, inside of any of the others
runtime     an event ("F+"), "begin", "end"     a call of the runtime; what is done there lies inside:
action      an action ("unshard"), "words"      one action, on the host; "words": ranks agree
wait        a verb ("all-gather")               the training thread is blocked until others come
background  a verb                              the same of another thread
device      "compute", or a verb                the compute stream of an accelerator between two waits for
                                                collectives; or in such a wait
collective  a verb                              from its launch until all that it brings is there; it may lie
                                                beside compute

The first five tile the time of the training thread, apart from gc. Verbs: "all-gather", "reduce-scatter",
"all-reduce", "words", and of other groups "all-to-all" and "point-to-point", whose bytes aren't known.
Groups are named by their modules.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.errors import InputError, said

_FORMAT = 4


class Record(NamedTuple):
    """kind, action: see above. groups: names. step: number of the step in which it began.

    phase: "forward", "backward", "evaluation"; "" between phases. nbytes: of the groups' unsharded
    parameters, of their gradients where these are reduced, else 0. issue: when it was launched; of all but
    waits, start. start, end: seconds of this rank's clock. transport, number: of a collective, the same on
    all its ranks. note: its key, or what a span says besides; of what the training thread does the line of
    the user's program where it was seen (a few times a second), then or in the same place of another step.
    met: whether all ranks of the transport had launched it by ``end``. link: ranks of the job, () where a
    transport sends no messages of its own; of a wait the sender and the receiver of what came last, and no
    other message was missing for the last ``link_s`` seconds. Of a collective those of the message that took
    longest, and how long; the receiver alone, where another one took half as long. axis: of the mesh, over
    which ranks were waited for; "" where it has no name.
    """

    kind: str
    action: str
    groups: tuple[str, ...]
    step: int
    phase: str
    nbytes: int
    issue: float
    start: float
    end: float
    transport: str = ""
    number: int = 0
    note: str = ""
    met: bool = False
    link: tuple[int, ...] = ()
    link_s: float = 0.0
    axis: str = ""

    @property
    def is_torchs(self) -> bool:
        """Whether it is in a collective of no transport of ours: nobody could have launched it before."""
        return self.note == self.action


def coordinates(rings: Sequence["Ring"]) -> dict[int, dict[str, int]]:
    """By rank its places on the axes of meshes, by name, as far as anything went over them."""
    found: dict[int, dict[str, int]] = {}
    for ring in rings:
        for name, axis in {each.transport: each.axis for each in ring.records if each.axis}.items():
            for place, rank in enumerate(ring.transports.get(name, ())):
                found.setdefault(rank, {})[axis] = place
    return found


class RecordedStep(NamedTuple):
    """A step of the ring: its number, and from when to when it went, in seconds."""

    number: int
    start: float
    end: float


class CoreUse(NamedTuple):
    """What the kernel counted of the training thread between two looks, in seconds of this rank's clock.

    ran_s: on a core. queued_s: ready to run, and in line for one. faults: pages that were read from disk.
    others_s: CPU time of the process' other threads, and without bound where an accelerator computes.
    throttled_s: in which a CPU quota stopped the process, counted once for each core that it was on.
    """

    start: float
    end: float
    ran_s: float
    queued_s: float
    faults: int
    others_s: float
    throttled_s: float


class Ring(NamedTuple):
    """What one rank did in its last steps.

    transports: by name, the ranks of the job that each has. steps: the last of them is the running one.
    records: by start. memory: seconds, and bytes of unsharded buffers from then on. held: seconds, and bytes
    then: in all, of shards with the optimizer's states, and of what is no model's. cores: by start, none
    where the kernel doesn't count.
    """

    rank: int
    world: int
    host: str
    transports: dict[str, tuple[int, ...]]
    steps: list[RecordedStep]
    records: list[Record]
    memory: list[tuple[float, int]]
    held: list[tuple[float, int, int, int]] = []  # noqa: RUF012
    cores: tuple[CoreUse, ...] = ()

    def to_bytes(self) -> bytes:
        """Compressed JSON."""
        text = json.dumps([_FORMAT, *self], separators=(",", ":"))
        return gzip.compress(text.encode(), 5)

    def shifted(self, by: float) -> "Ring":
        """The same, by a clock that shows ``by`` seconds less."""
        return self._replace(
            steps=[each._replace(start=each.start - by, end=each.end - by) for each in self.steps],
            records=[
                each._replace(issue=each.issue - by, start=each.start - by, end=each.end - by)
                for each in self.records
            ],
            memory=[(at - by, nbytes) for at, nbytes in self.memory],
            held=[(at - by, *nbytes) for at, *nbytes in self.held],
            cores=tuple(each._replace(start=each.start - by, end=each.end - by) for each in self.cores),
        )

    @staticmethod
    def from_bytes(data: bytes) -> "Ring":
        """The ring that ``to_bytes`` wrote. Raises: InputError for anything else."""
        try:
            version, rank, world, host, transports, steps, records, memory, held, cores = said(
                gzip.decompress(data)
            )
            if version != _FORMAT:
                raise ValueError(f"format {version}")
            return Ring(
                rank,
                world,
                host,
                {name: tuple(ranks) for name, ranks in transports.items()},
                [RecordedStep(*step) for step in steps],
                [Record(*each)._replace(groups=tuple(each[2]), link=tuple(each[13])) for each in records],
                [(at, nbytes) for at, nbytes in memory],
                [(at, whole, states, other) for at, whole, states, other in held],
                tuple(CoreUse(*each) for each in cores),
            )
        except (OSError, ValueError, TypeError, EOFError) as error:
            raise InputError(
                f"these bytes are no ring of a rank that this version wrote ({error}); give a file "
                "rank-N.ring of a run, or of model.trace().save"
            ) from error


def load(folder: str | Path) -> list[Ring]:
    """The rings of all ranks that are in ``folder``, by rank. Raises: InputError where there is none."""
    files = sorted(Path(folder).glob("rank-*.ring"))
    if not files:
        raise InputError(f"{folder} holds no rings (rank-N.ring): a run leaves them there when it ends")
    return sorted((Ring.from_bytes(file.read_bytes()) for file in files), key=lambda each: each.rank)


def write(folder: str | Path, own: Ring) -> Path:
    """Leave a ring in ``folder``, which is made; returns its file, written whole or not at all."""
    file = Path(folder) / f"rank-{own.rank}.ring"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(own.to_bytes())
    part.replace(file)
    return file
