"""Foresight: what a training step takes and holds, before anything is rented (docs/plan.md)."""

from shardwright.plan.file import Plan
from shardwright.plan.predict import Choice, Estimate, estimate
from shardwright.plan.questions import fewest_ranks, largest_batch, longest_sequence, savings
from shardwright.plan.search import FoundPlan, search
from shardwright.plan.subject import Subject, of_model
from shardwright.plan.transformer import Architecture, Microbatch

__all__ = [
    "Architecture",
    "Choice",
    "Estimate",
    "FoundPlan",
    "Microbatch",
    "Plan",
    "Subject",
    "estimate",
    "fewest_ranks",
    "largest_batch",
    "longest_sequence",
    "of_model",
    "savings",
    "search",
]
