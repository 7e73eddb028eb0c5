"""Foresight: what a training step takes and holds, before anything is rented (docs/plan.md)."""

from shardwright.plan.predict import Choice, Estimate, estimate

__all__ = ["Choice", "Estimate", "estimate"]
