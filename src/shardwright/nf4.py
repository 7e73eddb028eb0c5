"""``shardwright.quantized.nf4`` under its documented name: the same module, whoever changes it."""

import sys

from shardwright.quantized import nf4
from shardwright.quantized.nf4 import *  # noqa: F403  for type checkers

sys.modules[__name__] = nf4
