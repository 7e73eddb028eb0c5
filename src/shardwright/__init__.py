"""Shardwright: fully sharded data parallelism for PyTorch."""
