"""``shardwright.clients.fabric`` under its documented name: the same module, whoever changes it."""

import sys

from shardwright.clients import fabric
from shardwright.clients.fabric import *  # noqa: F403  for type checkers

sys.modules[__name__] = fabric
