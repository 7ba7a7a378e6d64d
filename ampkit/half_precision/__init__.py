"""Models with 16-bit weights: conversion, a comparison with float32, float32 master weights.

- `half`: `half` converts a model; `HalfPlan` decides which modules are converted and which are in float32.
- `check_half`: `check_half` compares all modules in float32 and in a 16-bit dtype on a sample.
- `boundary`: the casts and the region around a converted or float32 module.
- `master_weights`: `MasterWeights`, float32 copies of 16-bit parameters that the optimizer steps.
"""
