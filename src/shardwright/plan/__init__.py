"""Foresight: what a training step takes and holds, before anything is rented (docs/plan.md)."""

from shardwright.plan.predict import Choice, Estimate, estimate
from shardwright.plan.search import FoundPlan, search
from shardwright.planned import Plan

__all__ = ["Choice", "Estimate", "FoundPlan", "Plan", "estimate", "search"]
