"""Hangs and crashes: who is missing, and why. A rank's thread asks the others and names who is at fault."""
