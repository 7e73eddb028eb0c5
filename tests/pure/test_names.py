"""The public surface: what ``shardwright`` exports, no more and no less."""

import inspect

import shardwright

NAMES = [
    "BackwardPrefetch",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Explanation",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatterBucketer",
    "ReduceScatterHandle",
    "SchedulePolicy",
    "ShardPlacementResult",
    "Stats",
    "StepInBackward",
    "UnshardHandle",
    "WatchPolicy",
    "clip_grad_norm_",
    "communication_s",
    "explain",
    "full_state_dict",
    "fully_shard",
    "lockstep",
    "gathered",
    "nf4",
    "quantize_",
    "register_fsdp_forward_method",
    "scattered",
    "share_comm_ctx",
    "set_transport",
    "set_watch",
    "stats",
    "stream_state_dict",
]


def test_the_public_names_are_these():
    assert sorted(getattr(shardwright, "__all__", [])) == sorted(NAMES)


def test_every_public_name_has_a_docstring_of_its_own():
    bare = [name for name in NAMES if not own_docstring(getattr(shardwright, name))]
    assert not bare, f"without a docstring: {bare}"


def own_docstring(thing: object) -> str:
    """The docstring written for this class or function: not inherited, not a dataclass's signature."""
    doc = thing.__doc__ or ""
    if inspect.isclass(thing) and (doc.startswith(f"{thing.__name__}(") or doc == thing.__mro__[1].__doc__):
        return ""
    return doc


def test_the_docstring_check_sees_through_inherited_ones():
    class Documented:
        """Something."""

    class Bare(Exception):
        pass

    Bare.__doc__ = Exception.__doc__
    assert own_docstring(Documented)
    assert not own_docstring(Bare)
