"""ampkit in other people's training loops: a module per library, which imports that library when it is imported itself.

`accelerate` and `transformers` set up an `Accelerator` and a `Trainer`; `lightning` and `fabric` have precision
plugins; `timm` has its scaler.
"""
