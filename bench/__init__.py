"""What a sharded step costs, measured: see step.py."""
