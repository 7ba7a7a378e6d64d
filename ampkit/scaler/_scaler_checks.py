"""The name by which pickles of scalers from version 0.1 refer to the default factory of a dict."""

from ampkit.scaler.optimizer_record import OptimizerRecord as fresh_optimizer_state

__all__ = ["fresh_optimizer_state"]
