"""Models with 16-bit weights: conversion, a trial of what to keep in float32, float32 master weights.

- `half`: `half` converts a model; `HalfPlan` decides which modules are converted and which are kept.
- `check_half`: `check_half` tries on a sample which modules to keep in float32, and reports errors and overflows.
- `boundary`: the casts and the region around a converted or kept module.
- `master_weights`: `MasterWeights`, float32 copies of 16-bit parameters that the optimizer steps.
"""
