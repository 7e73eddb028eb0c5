"""Ranks that built different models are told so before anything moves; uneven data go in step."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import MixedPrecisionPolicy, SchedulePolicy, fully_shard, lockstep, set_transport, stats
from shardwright.errors import CommError, DataError, Diverged, InputError
from shardwright.transport.channel import compare
from shardwright.transport.mesh import resolve
from tests.ranks.models import Run, assert_same, batches, build, fresh_mesh, loss_of, shard_decoder
from tests.ranks.pool import on_ranks, run_ranks

TRANSPORTS = ("auto", "sockets", "collectives")


@on_ranks(1, 2, 3)
def test_all_ranks_learn_the_same_words_and_texts(rank, world):
    for transport in TRANSPORTS:
        set_transport(transport)
        axis = resolve(fresh_mesh(world))
        assert axis.comm.exchange([rank, -(2**62)], "k") == [[r, -(2**62)] for r in range(world)]
        assert axis.comm.sent_nbytes == 0
        assert compare(axis.comm, "the same", "k") == []
        texts = ["a", "bc"] + ["a"] * (world - 2)
        assert compare(axis.comm, texts[rank], "k") == (texts if world > 1 else [])


@on_ranks(2, 3)
def test_different_models_are_an_error_on_every_rank_that_shows_both_sides(rank, world):
    last = rank == world - 1
    models = {
        "shape": (lambda: nn.Linear(4, 6 if last else 5), {}, "[6, 4]", "[5, 4]"),
        "dtype": (
            lambda: nn.Linear(4, 4, dtype=torch.float64 if last else torch.float32),
            {},
            "torch.float64",
            "torch.float32",
        ),
        "number": (lambda: nn.Linear(4, 4, bias=not last), {}, "nothing", "parameter bias"),
        "policy": (
            lambda: nn.Linear(4, 4),
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if last else None)},
            "bfloat16",
            "param_dtype=None",
        ),
    }
    for transport in TRANSPORTS:
        set_transport(transport)
        mesh = fresh_mesh(world)
        for make, options, theirs, ours in models.values():
            model = fully_shard(make(), mesh=mesh, **options)
            dtype = model.weight.dtype
            for _ in range(2):  # and again: a model that was refused isn't let through the second time
                with pytest.raises(CommError, match="different models") as error:
                    model(torch.ones(1, 4, dtype=dtype))
                lines = str(error.value).splitlines()
                assert lines[1].startswith("  rank 0: ")
                assert ours in lines[1]
                assert lines[2].startswith(f"  rank {world - 1}: ")
                assert theirs in lines[2]
            assert stats(model).unsharded_nbytes == 0


@pytest.mark.parametrize(("world", "off"), [(2, (1,)), (3, (2,)), (4, (2, 3))])
@on_ranks()
def test_ranks_that_differ_in_the_option_are_told_so_before_anything_moves(rank, world, off):
    for transport in TRANSPORTS:
        set_transport(transport)
        flat = fresh_mesh(world)
        meshes = [flat]
        if world == 4:  # the copies differ, which share no all-gather; then ranks that only hold copies
            meshes += [
                init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
                for shape in ((2, 2), (4, 1))
            ]
        for mesh in meshes:
            model = fully_shard(nn.Linear(4, 4), mesh=mesh)
            model.set_schedule_policy(SchedulePolicy(agreement="off" if rank in off else "strict"))
            with pytest.raises(Diverged, match=r'agreement="strict" on rank 0.*agreement="off" on rank'):
                model(torch.ones(1, 4)).sum().backward()


def _noting(launch, keys):
    return lambda what, key: (keys.append(key), launch(what, key))[1]


@on_ranks(2)
def test_models_are_compared_once_and_only_where_an_all_gather_follows(rank, world):
    from_comm = []
    model = shard_decoder(build(), fully_shard)
    comm = resolve(None).comm
    for name in ("all_gather", "exchange"):
        setattr(comm, name, _noting(getattr(comm, name), from_comm))
    for step in range(3):
        loss_of(model, batches(step, world)[rank]).backward()
    assert from_comm[0] == "compare models"
    assert from_comm.count("compare models") == 1
    with torch.no_grad():
        other = fully_shard(nn.Linear(3, 3))
        other.unshard()
        from_comm.clear()
        if rank == 0:  # all is there already: a rank may run it alone
            other(torch.ones(1, 3))
    assert from_comm == []


def epochs(rank, world, mode):
    data = [[(rank, i) for i in range(2 + rank)] for _ in range(2)]
    return [list(lockstep(epoch, mode)) for epoch in data]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_stop_ends_with_the_shortest_and_pad_repeats_the_last_batch(world):
    for rank, (first, second) in enumerate(run_ranks(world, epochs, "stop")):
        assert first == second == [(rank, 0), (rank, 1)]
    for rank, (first, second) in enumerate(run_ranks(world, epochs, "pad")):
        own = [(rank, i) for i in range(2 + rank)]
        assert first == second == own + [own[-1]] * (world + 1 - len(own))


@on_ranks(2)
def test_uneven_training_data_train_as_one_process_does(rank, world):
    ours, theirs = Run.of(shard_decoder(build(), fully_shard)), Run.of(build())
    data = [batches(step, world) for step in range(4)]
    seen = 0
    for tokens in lockstep([rows[rank] for rows in data[: 3 + rank]]):
        loss_of(ours.model, tokens).backward()
        torch.stack([loss_of(theirs.model, rows) for rows in data[seen]]).mean().backward()
        ours.step()
        theirs.step()
        seen += 1
    assert seen == 3
    assert_same(ours.model, theirs.model)


@on_ranks(4)
def test_ranks_of_a_two_dimensional_mesh_go_together(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    data = range(5 if rank else 3)
    assert (len(list(lockstep(data, "stop", mesh))), len(list(lockstep(data, "pad", mesh)))) == (3, 5)


@on_ranks(2)
def test_a_rank_whose_data_fail_or_are_missing_ends_all_ranks_at_once(rank):
    def failing():
        yield 1
        if rank == 1:
            raise KeyError("bad batch")
        yield 2

    with pytest.raises(KeyError if rank == 1 else DataError):
        list(lockstep(failing()))
    with pytest.raises(DataError, match="no batch at all"):
        list(lockstep([] if rank == 1 else [1, 2], "pad"))
    assert list(lockstep([] if rank == 1 else [1, 2], "stop")) == []
    assert list(lockstep([], "pad")) == []


def test_an_unknown_mode_is_refused():
    with pytest.raises(InputError, match='"pad" or "stop", got \'wait\''):
        lockstep([], "wait")
