"""Bytes of a rank over its steps by what they are for, out of its ring: what the page of a step draws.

states       shards and the optimizer's, as they were last counted tensor by tensor
unsharded    gathered parameters, at every event
gradients    from a group's backward on whole, until their reduction has ended; then shards, until the
             optimizer has stepped
activations  what the allocator holds besides, as often as it was asked (for 0.2% of the time of a step); also
             what collectives and kernels need for a moment
other        what it held before the forward of such a count: inputs, other models, Python
"""

from collections.abc import Iterator

from shardwright.observe.memory.report import Category
from shardwright.observe.steps.drawing import Level
from shardwright.observe.steps.rings import Ring


def levels(ring: Ring) -> list[Level]:
    """At each moment that is known, in order. Without any count of the allocator: unsharded and gradients."""
    unsharded, whole, shards = 0, 0, dict[str, int]()
    asked: tuple[int, ...] = ()
    activations, found = 0, []
    for at, what, name, nbytes in sorted(_changes(ring), key=lambda each: each[:2]):
        if what == "unsharded":
            unsharded = nbytes[0]
        elif what == "gradients":
            whole += nbytes[0]
        elif what == "shards":
            shards[name] = nbytes[0]
        elif what == "stepped":
            shards.clear()
        gradients = whole + sum(shards.values())
        if what == "whole":
            asked = nbytes
            activations = max(0, nbytes[0] - nbytes[1] - nbytes[2] - unsharded - gradients)
        held = {str(Category.UNSHARDED): unsharded, str(Category.GRADIENTS): gradients}
        if asked:
            held = {str(Category.STATES): asked[1], **held}
            held |= {str(Category.ACTIVATIONS): activations, str(Category.OTHER): asked[2]}
        found.append(Level(at, held, f"rank {ring.rank}"))
    return found


def _changes(ring: Ring) -> Iterator[tuple[float, str, str, tuple[int, ...]]]:
    """When, what changes, of which group, and the bytes."""
    for at, nbytes in ring.memory:
        yield at, "unsharded", "", (nbytes,)
    for at, *nbytes in ring.held:
        yield at, "whole", "", tuple(nbytes)
    began: dict[str, float] = {}
    for each in ring.records:
        if each.kind == "runtime" and each.action == "B+":
            began.update(dict.fromkeys(each.groups, each.start))
        elif each.kind == "collective" and each.action == "reduce-scatter":
            start = min((began.get(name, each.start) for name in each.groups), default=each.start)
            yield start, "gradients", "", (each.nbytes,)
            yield each.end, "gradients", "", (-each.nbytes,)
            share = each.nbytes // max(1, len(ring.transports.get(each.transport, ())))
            yield each.end, "shards", " ".join(each.groups), (share,)
        elif each.kind == "span" and each.action == "optimizer":
            yield each.end, "stepped", "", ()
