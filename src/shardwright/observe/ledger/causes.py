"""What a step's time can go to, in the words of the ledger, and what to do about each."""

COMPUTE, OPTIMIZER, SCHEDULE, LINK, REST = "compute", "optimizer", "launches and copies", "link", "rest"
DATA, CHECKPOINT, GARBAGE, USER = "data", "checkpoint", "garbage collection", "user code"
PAGING, QUOTA, CORES = "paging", "CPU quota", "busy cores"
CAUSES = (
    COMPUTE, DATA, USER, GARBAGE, PAGING, QUOTA, CORES, CHECKPOINT, LINK, SCHEDULE, OPTIMIZER, REST,
)  # fmt: skip
"""In the order of a table."""
WORK = (COMPUTE, OPTIMIZER, SCHEDULE)
"""What a step is for: no loss, unless others wait for it."""
SPANS = {"optimizer": OPTIMIZER, "data": DATA, "save": CHECKPOINT}
"""By what a span says that it does; other spans are causes of their own."""
NOBODY = -1
"""Whose doing a link is."""

REMEDIES = {
    COMPUTE: "compare what the ranks compute (tokens of a batch, experts) and the clocks of their devices",
    DATA: "load batches before they are needed (num_workers and prefetch_factor of a DataLoader)",
    USER: "move it out of the step, or do it every so many steps",
    GARBAGE: "call gc.freeze() after set-up, and gc.collect() on all ranks in the same step",
    PAGING: "pages are read from disk as they are used: give the host more memory, or read files ahead",
    QUOTA: "raise the CPU quota of its cgroup (cpu.max, docker run --cpus, limits.cpu of a pod)",
    CORES: "more threads are ready to run than it has cores: lower OMP_NUM_THREADS or num_workers, pin ranks",
    CHECKPOINT: "save with async_save, or to a faster disk",
    LINK: "shardwright preflight measures the links between the ranks",
    SCHEDULE: "shardwright plan chooses groups and prefetching for this model",
    OPTIMIZER: "give torch's optimizer fused=True or foreach=True",
}
"""What to do where a rank loses much to a cause."""
