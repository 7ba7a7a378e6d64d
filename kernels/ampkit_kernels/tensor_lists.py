"""Validation of lists of tensors, and the strided floating-point views of them that kernels take.

A sparse COO tensor is taken as its values, a complex tensor as its real view, an expanded tensor as its stored
elements. All functions read metadata only: no launch, no host synchronization.
"""

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of the widest access
FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
PLAIN = frozenset((Tensor, torch.nn.Parameter))
_DTYPE, _LAYOUT, _IS_CPU = attrgetter("dtype"), attrgetter("layout"), attrgetter("is_cpu")
_SHAPE, _NBYTES = attrgetter("shape"), attrgetter("nbytes")


class FlatList(list[Tensor]):
    """A checked list, whose tensors no operation of this package checks again.

    Plain contiguous float tensors of one dtype on one device, none lazily negated, each with elements and memory of its
    own. `addresses` and `sizes`, in bytes, are read when the list is made: use the list immediately, and neither change
    nor keep it.
    """

    addresses: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "FlatList | None":
        """Return the tensors as such a list; None if they do not qualify."""
        # Sets over mapped accessors are the cheapest way to examine a thousand tensors. Tensors that are not strided
        # have no contiguity, and some no address: these calls raise.
        try:
            if (
                not set(map(type, tensors)) <= PLAIN
                or len(dtypes := set(map(_DTYPE, tensors))) != 1
                or not dtypes <= FLOATS
                or len(set(map(Tensor.get_device, tensors))) != 1
                or not all(map(Tensor.is_contiguous, tensors))
                or any(map(Tensor.is_neg, tensors))
            ):
                return None
            flat = cls(tensors)
            flat.addresses = list(map(Tensor.data_ptr, tensors))
        except RuntimeError:
            return None
        flat.sizes = list(map(_NBYTES, tensors))
        if not all(flat.sizes) or len(set(flat.addresses)) != len(flat):
            return None
        return flat


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the address of each tensor's first element."""
    return tensors.addresses if type(tensors) is FlatList else list(map(Tensor.data_ptr, tensors))


def sizes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the size of each tensor in bytes."""
    return tensors.sizes if type(tensors) is FlatList else list(map(_NBYTES, tensors))


def strided_floats(tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    """Return the same numbers as strided, real, floating-point tensors that share the originals' storage.

    Of a sparse COO tensor the values as they are stored (coalesce first where duplicates must be added up); of a
    complex tensor `view_as_real` of its memory, without a lazy conjugation. Raises TypeError for other tensors that are
    not strided and floating-point.
    """
    if type(tensors) is FlatList:
        return tensors
    # Most lists need no change, and sets over mapped accessors are the cheapest way to see that.
    if (
        set(map(type, tensors)) <= PLAIN
        and set(map(_DTYPE, tensors)) <= FLOATS
        and set(map(_LAYOUT, tensors)) <= {torch.strided}
    ):
        return list(tensors)
    return [_strided_float(t, i, op) for i, t in enumerate(tensors)]


def _strided_float(t: Tensor, index: int, op: str) -> Tensor:
    if hasattr(t, "to_local"):
        raise TypeError(
            f"{op}: tensor {index} is a {type(t).__name__}; kernels work on local storage: pass tensor.to_local()"
        )
    if t.layout is torch.sparse_coo:
        t = t._values()
    if t.layout is not torch.strided:
        raise TypeError(
            f"{op}: tensor {index} has layout {t.layout}; expected strided or sparse_coo: "
            f"pass its values() or a dense tensor"
        )
    if t.is_complex():
        # The memory, not the values: a lazy conjugation changes signs only, and a resolved copy would not be written
        # back.
        t = torch.view_as_real(t.conj() if t.is_conj() else t)
    if t.dtype not in FLOATS:
        raise TypeError(
            f"{op}: tensor {index} has dtype {t.dtype}; expected a floating-point or complex tensor: "
            f"leave integer tensors out of the list"
        )
    return t


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors grouped by dtype, in order within each group."""
    if type(tensors) is FlatList:
        return [tensors]
    if len(set(map(_DTYPE, tensors))) == 1:
        return [list(tensors)]
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return list(groups.values())


def all_aligned(addresses: Sequence[int]) -> bool:
    """Whether every address allows 128-bit accesses."""
    return reduce(or_, addresses, 0) % ALIGNMENT == 0


def resolved(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with lazy conjugation and negation resolved, for lists whose signs matter."""
    if not any(map(Tensor.is_conj, tensors)) and not any(map(Tensor.is_neg, tensors)):
        return list(tensors)
    return [t.resolve_conj().resolve_neg() for t in tensors]


def check_resolved(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse lazy conjugation and negation in a list that is written: kernels read the memory, which lacks the sign."""
    if not any(map(Tensor.is_neg, tensors)) and not any(map(Tensor.is_conj, tensors)):
        return
    i = next(i for i, t in enumerate(tensors) if t.is_neg() or t.is_conj())
    raise ValueError(
        f"{op}: {name}[{i}] is a lazily negated or conjugated view, whose memory holds other values; expected "
        "tensors of their own values: pass tensor.resolve_conj().resolve_neg()"
    )


def unrepeated(t: Tensor, op: str) -> Tensor:
    """Return the view of `t` with every stored element once: dimensions of stride 0 are cut to length 1.

    An in-place operation on an expanded tensor would otherwise change an element once per repetition.
    """
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(dim, 0, 1)
    if may_overlap(t):
        raise ValueError(
            f"{op}: a tensor of shape {tuple(t.shape)} and strides {t.stride()} holds elements that share "
            f"memory in a way that cannot be written in place: pass tensor.clone()"
        )
    return t


def written_in_place(tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    """`unrepeated` over a list."""
    if all(map(Tensor.is_contiguous, tensors)):
        return list(tensors)
    return [unrepeated(t, op) for t in tensors]


def may_overlap(t: Tensor) -> bool:
    """Whether two indices may share an element: a stride does not exceed the reach of all smaller strides."""
    if t.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((st, s) for s, st in zip(t.shape, t.stride(), strict=True) if s > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_scalar(
    name: str, value: Tensor, tensors: Sequence[Tensor], op: str, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> None:
    """Refuse a device scalar that is not one float32 element on the tensors' device; `dtypes` allows others."""
    if value.dtype not in dtypes or value.numel() != 1:
        raise ValueError(
            f"{op}: {name} is a {value.dtype} tensor of shape {tuple(value.shape)}; "
            f"expected one float32 element: torch.tensor(..., dtype=torch.float32)"
        )
    if tensors and value.device != tensors[0].device:
        raise ValueError(
            f"{op}: {name} is on {value.device}, the tensors on {tensors[0].device}; expected one device: "
            f"call once per device with a copy of {name} there"
        )


def check_one_device(tensors: Sequence[Tensor], op: str) -> None:
    """Refuse a list on several devices: a launch runs on one."""
    if not tensors or type(tensors) is FlatList:
        return
    # Device indices (-1 without one) are far cheaper to collect than device objects.
    indices = set(map(Tensor.get_device, tensors))
    if len(indices) == 1 and (indices != {-1} or len(set(map(_IS_CPU, tensors))) == 1):
        return
    first = tensors[0].device
    for i, t in enumerate(tensors):
        if t.device != first:
            raise ValueError(
                f"{op}: tensor {i} is on {t.device}, tensor 0 on {first}; expected one device: call once per device"
            )


def check_parallel(op: str, **lists: Sequence[Tensor]) -> None:
    """Refuse lists of different lengths or shapes."""
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(f"{op}: got {len(tensors)} {name} for {len(first)} {first_name}; expected one for each")
        shapes, expected = list(map(_SHAPE, tensors)), list(map(_SHAPE, first))
        if shapes != expected:
            i = next(i for i, pair in enumerate(zip(shapes, expected, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"{op}: {name}[{i}] has shape {tuple(shapes[i])}, {first_name}[{i}] has {tuple(expected[i])}; "
                f"expected the same shape"
            )


def check_same_dtypes(op: str, **lists: Sequence[Tensor]) -> None:
    """Refuse parallel lists whose dtypes differ in a row: a kernel has one dtype for all of them."""
    (first_name, first), *others = lists.items()
    expected = list(map(_DTYPE, first))
    for name, tensors in others:
        dtypes = list(map(_DTYPE, tensors))
        if dtypes != expected:
            i = next(i for i, pair in enumerate(zip(dtypes, expected, strict=True)) if pair[0] != pair[1])
            raise TypeError(
                f"{op}: {name}[{i}] is {dtypes[i]}, {first_name}[{i}] is {expected[i]}; expected one dtype for all "
                f"moments of a parameter: convert one of them"
            )
