"""The name under which pickles of scalers from version 0.1 look for the default of a dict; nothing else is here."""

from ampkit.scaler.optimizer_record import OptimizerRecord as fresh_optimizer_state

__all__ = ["fresh_optimizer_state"]
