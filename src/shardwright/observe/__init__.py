"""What people look at: ``watch`` (hangs and crashes), ``steps`` (what ranks did), ``ledger`` (what steps were
lost to), ``preflight`` (can this job train on these hosts), and beside them the memory of a rank."""
