"""``shardwright.lora`` under the name that it had first: the same module, whoever changes it."""

import sys

from shardwright import lora
from shardwright.lora import *  # noqa: F403  for type checkers

sys.modules[__name__] = lora
