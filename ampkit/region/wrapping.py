"""Where `wrap_forward` was: pickles of wrapped modules name it so."""

from ampkit.region.forward_wrapper import _make, wrap_forward

__all__ = ["_make", "wrap_forward"]
