"""The classes of torch's operators."""

from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OpOverload", "OpOverloadPacket"]
