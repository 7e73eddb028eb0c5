"""Tests of the XLA backend run on four virtual CPU devices; without the extra each file is one skip."""

import importlib.util
import os
import sys

DEVICES = "--xla_force_host_platform_device_count=4"
# XLA's CPU compiler drops barriers and then merges the second all-gather with the first; TPU's keeps them.
KEEP_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"

if importlib.util.find_spec("jax") and "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = f"{DEVICES} {KEEP_BARRIERS}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "xla: needs the extra shardwright[xla]")
