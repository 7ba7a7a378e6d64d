"""The former home of `wrap_forward`, by which pickles of wrapped modules refer to it."""

from ampkit.region.forward_wrapper import _make, wrap_forward

__all__ = ["_make", "wrap_forward"]
