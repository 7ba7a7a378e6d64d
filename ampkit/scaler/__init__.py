"""The scaler: `GradScaler`, loss scales as strategies, gradients of every kind, and the report on skipped steps."""
