"""Tests of the extra shardwright[hf]; without it each file is one skip, which says so.

Ranks are forked from a server that has imported transformers, and what its Trainer needs."""

import os
import tempfile

from tests.ranks import pool

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="shardwright-cache-")  # tokens of these tests alone

pool._server.set_forkserver_preload(
    [*pool._PRELOAD, "transformers", "transformers.modeling_utils", "transformers.trainer"]
)
pool.start_server()
