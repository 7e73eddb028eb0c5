"""``shardwright.ops.bucketer`` under its documented name: the same module, whoever changes it."""

import sys

from shardwright.ops import bucketer
from shardwright.ops.bucketer import *  # noqa: F403  for type checkers

sys.modules[__name__] = bucketer
