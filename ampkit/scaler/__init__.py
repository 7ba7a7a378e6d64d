"""The scaler: `GradScaler`, loss scales as strategies, gradients of every kind, and what it can tell afterwards."""
