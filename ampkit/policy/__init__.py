"""Policies: which rule every operator follows, per device type and per module, and why."""

from ampkit.policy.policy import Explanation, Policy, Rule, register_op

__all__ = ["Explanation", "Policy", "Rule", "register_op"]
