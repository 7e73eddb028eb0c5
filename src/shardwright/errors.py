"""Every error that Shardwright raises on purpose.

    ShardwrightError
    |-- InputError (ValueError)        an argument, a module or a mesh that can't be sharded as asked
    |   `-- MisuseError (also AssertionError)  where torch's ``fully_shard`` raises an AssertionError
    |-- ConfigError (ValueError)       a configuration file or command line; lists everything wrong at once
    |-- MissingExtra (ModuleNotFoundError)  a package that comes with an extra of ours and isn't installed
    |-- UnsupportedTorch (ImportError) a torch that lacks a private name of torch that is needed
    |-- DataError (ValueError)         a corpus that is missing, empty or too small
    |-- ScheduleError (AssertionError) a schedule that isn't sound
    |-- StageError (RuntimeError)      a call that is illegal in the stage that a group is in
    |-- OutOfMemory (MemoryError)      a rank that holds more host memory than its budget
    |-- CommError (RuntimeError)       ranks in different collectives, or a rank that ended or never came
    |   |-- Diverged                   ranks wait for each other in different places: proven, not timed
    |   |-- RankFailed                 a rank raised an exception, or left, while others needed it
    |   |-- RankLost                   a rank's process ended without a word, or its host is gone
    |   `-- Stalled                    a rank has done nothing for as long as ``stall_s``
    |-- CheckpointError (RuntimeError) a checkpoint that is missing, damaged or doesn't fit
    |   `-- DamagedError               what was read isn't what was saved
    |-- StorageError (OSError)         an object store that can't be reached, or that refuses
    `-- LaunchError (RuntimeError)     ranks that could not be started, or that ended early

Each message says which thing, what was got, what was expected and what to do. Violations of our own
invariants are ``assert`` statements and not in this tree: they are bugs of ours, never of the user's.
"""


class ShardwrightError(Exception):
    """Base of every error raised on purpose by this package."""


class InputError(ShardwrightError, ValueError):
    """An argument, a module or a mesh that can't be sharded as asked."""


class MisuseError(InputError, AssertionError):
    """An input that torch's ``fully_shard`` refuses by an AssertionError; code for that one catches this."""


class ConfigError(ShardwrightError, ValueError):
    """A configuration file or a command line that can't be used; lists everything wrong at once."""


class MissingExtra(ShardwrightError, ModuleNotFoundError):
    """A package that comes with an extra of ours and isn't installed; says the line that installs it."""


class UnsupportedTorch(ShardwrightError, ImportError):
    """A torch that lacks a private name of torch that is needed; says the versions that have them all."""


class DataError(ShardwrightError, ValueError):
    """A corpus that is missing, empty or too small for the batch that was asked for."""


class ScheduleError(ShardwrightError, AssertionError):
    """A schedule that isn't sound: it uses, gathers, reduces or frees something at a wrong place."""


class StageError(ShardwrightError, RuntimeError):
    """A call that is illegal in the stage that a group is in."""


class OutOfMemory(ShardwrightError, MemoryError):
    """A rank that holds, or is about to hold, more host memory than ``SHARDWRIGHT_MEMORY_BUDGET`` says."""


class CommError(ShardwrightError, RuntimeError):
    """Ranks that are in different collectives, or a rank that ended or never came."""


class Diverged(CommError):
    """Ranks that wait for each other in different places, or launched different collectives."""


class RankFailed(CommError):
    """A rank raised an exception, or left, while others needed it; its own error comes first."""


class RankLost(CommError):
    """A rank whose process ended without a word, or whose host can't be reached."""


class Stalled(CommError):
    """A rank that has done nothing for as long as ``WatchPolicy.stall_s``, while others waited; or a
    collective that all ranks have launched, and that hasn't ended for ``WatchPolicy.collective_s``."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint that is missing, damaged, incomplete, or doesn't fit the model."""


class DamagedError(CheckpointError):
    """A checkpoint that is all there, and whose bytes are not those that were saved. Nothing was loaded."""


class StorageError(ShardwrightError, OSError):
    """An object store (``s3://``, ``gs://``, ...) that can't be reached, or that refuses."""


class LaunchError(ShardwrightError, RuntimeError):
    """Local ranks that could not be started, or that ended before the job was done."""
