"""Time: each clock that Shardwright reads, and the ways in which it sleeps.

All of the package reads time as ``clock.monotonic()``, never from ``time``, so that a simulation which sets
other functions here decides what time it is everywhere, at no cost for a step.
"""

import threading as _threading
import time as _time  # nowhere else

monotonic = _time.monotonic  # deadlines, and how old something is
perf_counter = _time.perf_counter  # durations that are measured, and moments of one process
thread_time = _time.thread_time  # what this thread computed
process_time = _time.process_time  # what all threads of this process computed
time = _time.time  # seconds since 1970: what hosts compare, and what files say
sleep = _time.sleep
wait = _threading.Condition.wait  # until others change something, at most so many seconds
