"""Whether this job was started again by its launcher, after an attempt that failed or was pre-empted.

torchrun counts the restarts of each of its agents, SLURM those of a job. Agents count each for themselves:
one that has joined later says 0 where another one says 1. So the ranks have to agree.
"""

import os

RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""How often a launcher has started this process' job again; unset, or 0, in the first attempt."""


def this_rank_restarted() -> bool:
    """Whether the launcher tells this rank that the job was started again. Local; other ranks may differ."""
    counts = [os.environ.get(name, "") for name in RESTART_VARIABLES]
    return any(count.isdecimal() and int(count) > 0 for count in counts)
