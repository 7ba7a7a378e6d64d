"""Faults injected into training programs of public repositories, and a score of the tools that look for them."""
