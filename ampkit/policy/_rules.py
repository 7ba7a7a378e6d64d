"""Where `Rule` was: pickles name it so."""

from ampkit.policy.rules import Group, Rule

__all__ = ["Group", "Rule"]
