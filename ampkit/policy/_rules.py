"""The former home of `Rule`, by which pickles refer to it."""

from ampkit.policy.rules import Group, Rule

__all__ = ["Group", "Rule"]
