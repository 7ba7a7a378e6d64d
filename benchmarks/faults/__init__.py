"""Stored faults in training programs of public repositories, and the score of `ampkit debug` on them.

`inject` lays a program out with its fault, `run` runs `ampkit debug` on it, `score` compares the report with the fault.
The data: `programs.toml` and `programs/` are the programs, `cases.json` the faults, `kinds.toml` the truth about them.
"""
