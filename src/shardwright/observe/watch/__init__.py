"""Hangs and crashes: who is missing, and why. Each rank's thread asks the others and names who is at fault."""
