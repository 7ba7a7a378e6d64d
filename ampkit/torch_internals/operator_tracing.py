"""What a dispatch mode below autograd asks torch: the mode itself, the node that runs, who owns a tensor's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = [
    "ObserverMode", "OpOverload", "StorageWeakRef", "current_node", "is_opaque", "next_sequence_number", "node_name",
    "node_sequence_number", "only_observed", "storage_key", "without_dispatch",
]

without_dispatch = torch._C._DisableTorchDispatch
current_node = torch._C._current_autograd_node
# Of the next node that this thread makes: autograd makes an operator's node before the operator reaches a mode.
next_sequence_number = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]


class ObserverMode(TorchDispatchMode):
    """A dispatch mode for uncompiled code: without the guards against Dynamo, which cost more than a look at a tensor.

    Used where compiled functions run eagerly.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See the operators of compiled code's own runtime too."""
        return False


def only_observed() -> bool:
    """Whether every dispatch mode here looks on and no more: none that traces, records or makes fake tensors."""
    return all(isinstance(mode, ObserverMode) for mode in _get_current_dispatch_mode_stack())


def node_name(node: Any) -> str:
    """What an autograd node is called. That of a custom function is its `ctx`, on which users store what they like."""
    return type(node).name(node)


def node_sequence_number(node: Any) -> int:
    """The number of an autograd node; a forward operator whose node it is noted the same one."""
    return type(node)._sequence_nr(node)


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's memory: views have one in common. Free to be reused once the memory is gone."""
    return tensor.untyped_storage()._cdata


def is_opaque(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be read as strided memory: sparse, nested, quantized, mkldnn, meta, fake."""
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta
