"""Clients of ``torch.distributed.fsdp``, run as they are after ``shardwright.install()`` (make clients)."""
