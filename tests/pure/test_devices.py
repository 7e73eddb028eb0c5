"""Which device ranks train on: as many ranks as accelerators, and never the CPU beside them unasked."""

import pytest
import torch

from shardwright.errors import ConfigError
from shardwright.recipe.config import LaunchConfig, RunConfig
from shardwright.train import launch
from shardwright.train.launch import CPU_RANKS, xla_environment
from shardwright.train.ranks import choose_device, ranks_to_start


@pytest.fixture
def see(monkeypatch):
    """Makes torch count so many accelerators of a kind."""

    def seen(count, kind="cuda"):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        device = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: device)

    return seen


@pytest.mark.parametrize(
    ("count", "kind", "options", "ranks", "device"),
    [
        (8, "cuda", {}, 8, "cuda"),
        (4, "xpu", {"ranks": "auto"}, 4, "xpu"),
        (1, "mps", {}, 1, "mps"),
        (8, "cuda", {"ranks": 3}, 3, "cuda"),
        (8, "cuda", {"device": "cpu"}, CPU_RANKS, "cpu"),
        (2, "cuda", {"device": "cpu", "ranks": 4}, 4, "cpu"),
        (0, "", {}, CPU_RANKS, "cpu"),
        (0, "", {"ranks": 4}, 4, "cpu"),
    ],
)
def test_auto_takes_as_many_ranks_as_there_are_devices(see, count, kind, options, ranks, device):
    see(count, kind)
    config = LaunchConfig(**options)
    assert ranks_to_start(config) == ranks
    assert choose_device(config, ranks) == device


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_devices_are_refused_with_the_remedy_and_not_put_on_the_cpu(see, device):
    see(2)
    config = LaunchConfig(ranks=4, device=device)
    with pytest.raises(ConfigError, match="4 ranks on this host, but 2 cuda device") as refused:
        ranks_to_start(config)
    for remedy in ("launch.ranks = auto", "torchrun --nproc-per-node 2", "--launch.device cpu"):
        assert remedy in str(refused.value)


@pytest.mark.parametrize(("count", "seen"), [(0, "no accelerator"), (2, "2 of kind 'xpu'")])
def test_a_kind_that_is_not_there_is_refused(see, count, seen):
    see(count, "xpu")
    with pytest.raises(ConfigError, match=f'"cuda", but this process sees {seen}'):
        choose_device(LaunchConfig(device="cuda"), 1)


def test_one_xla_program_has_two_devices_unless_told(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for ranks, devices in ((0, CPU_RANKS), (4, 4)):
        assert f"device_count={devices} " in xla_environment(ranks)["XLA_FLAGS"]


@pytest.mark.parametrize(("given", "taken"), [("auto", "auto"), ("last", "last"), (30, "30"), ("30", "30")])
def test_a_run_goes_on_from_what_a_recipe_says(given, taken):
    assert RunConfig(resume=given).resume == taken


@pytest.mark.parametrize("given", ["newest", -1, True, 1.5])
def test_another_word_is_refused(given):
    with pytest.raises(ValueError, match='expected "auto", "last", or the step of a checkpoint'):
        RunConfig(resume=given)


def test_ranks_that_memory_has_no_room_for_are_refused_with_how_many_it_has(see, monkeypatch):
    see(0, "")
    monkeypatch.setattr("shardwright.train.ranks.anonymous_nbytes", lambda: 200 << 20)
    monkeypatch.setattr("shardwright.train.ranks.free_nbytes", lambda: 1 << 30)
    assert ranks_to_start(LaunchConfig(ranks=5)) == 5
    told = r"each takes 200\.0 MiB before .*, together 1\.2 GiB, and 1\.0 GiB of memory are free: .* most 5"
    with pytest.raises(ConfigError, match=told):
        ranks_to_start(LaunchConfig(ranks=6))
    monkeypatch.setattr("shardwright.train.ranks.free_nbytes", lambda: 0)  # nothing says
    assert ranks_to_start(LaunchConfig(ranks=6)) == 6


def test_more_ranks_than_eight_for_each_core_are_refused_unless_a_key_says_so(monkeypatch):
    monkeypatch.setattr(launch, "_cores", lambda: 2)
    launch.check_ranks(16, 8)
    launch.check_ranks(17, 9)
    with pytest.raises(ConfigError, match=r"launch.ranks = 17, .* 2 core.*16; .*launch.ranks_per_core"):
        launch.check_ranks(17, 8)
