"""``shardwright.quantized.interchange`` under its documented name: the same module, whoever changes it."""

import sys

from shardwright.quantized import interchange
from shardwright.quantized.interchange import *  # noqa: F403  for type checkers

sys.modules[__name__] = interchange
