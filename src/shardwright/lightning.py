"""``shardwright.clients.lightning`` under its documented name: the same module, whoever changes it."""

import sys

from shardwright.clients import lightning
from shardwright.clients.lightning import *  # noqa: F403  for type checkers

sys.modules[__name__] = lightning
