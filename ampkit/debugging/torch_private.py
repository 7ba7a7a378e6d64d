"""Names of torch that only debugging needs: autograd nodes, identities of storages, modes below autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data
from torch import Tensor

from ampkit.torch_private import private

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator
else:
    FakeTensor = private("_subclasses.fake_tensor.FakeTensor")
    StorageWeakRef = private("multiprocessing.reductions.StorageWeakRef")
    LoaderIterator = private("utils.data.dataloader._BaseDataLoaderIter")

current_node: Any = private("_C._current_autograd_node")
# The number of the next node that this thread makes. An operator's node is made before the operator reaches a mode.
next_sequence_number: Any = private("_C._autograd._get_sequence_nr")

# Sets the versions of tensors, by which autograd notices that a saved tensor was written in place.
set_version: Any = private("_C._autograd._unsafe_set_version_counter")
negative_view: Any = private("_neg_view")  # returns a view of the same memory with the negative bit set

without_modes: Any = private("utils._python_dispatch._disable_current_modes")  # a context without any dispatch mode

_storage_of: Any = private("UntypedStorage._new_with_weak_ptr")
private("UntypedStorage._cdata")
private("Tensor._is_zerotensor")


def revived(weak: StorageWeakRef) -> Any:
    """Return the storage of a weak reference; None if it is freed."""
    return _storage_of(weak.cdata)


def node_sequence_number(node: Any) -> int:
    """Return the sequence number of an autograd node: the number of its forward operator."""
    return type(node)._sequence_nr(node)


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which its views share. It may be reused once the storage is freed."""
    return tensor.untyped_storage()._cdata


def is_opaque(tensor: Tensor) -> bool:
    """Return whether a tensor cannot be read as strided memory: sparse, nested, quantized, meta, fake, zero."""
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
        or tensor._is_zerotensor()
        or isinstance(tensor, FakeTensor)
    )
