"""What a dispatch mode below autograd asks torch: the mode itself, the node that runs, who owns a tensor's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OpOverload", "StorageWeakRef", "TorchDispatchMode", "current_node", "is_opaque", "next_sequence_number",
    "node_sequence_number", "storage_key", "without_dispatch",
]

without_dispatch = torch._C._DisableTorchDispatch
current_node = torch._C._current_autograd_node
# Of the next node that this thread makes: autograd makes an operator's node before the operator reaches a mode.
next_sequence_number = torch._C._autograd._get_sequence_nr


def node_sequence_number(node: Any) -> int:
    """The number of an autograd node; a forward operator whose node it is noted the same one."""
    return node._sequence_nr()


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's memory: views have one in common. Free to be reused once the memory is gone."""
    return tensor.untyped_storage()._cdata


def is_opaque(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be read as strided memory: sparse, nested, quantized, mkldnn, meta, fake."""
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta
