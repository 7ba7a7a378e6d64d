"""DeviceStep, the step that AdamW and SGD share: a scaler's scalars, DTensor shards, kernels with cached arguments."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, TypeVar, overload
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

import ampkit_kernels as kernels
from ampkit.gradients.clipping import norm_and_factor
from ampkit.gradients.collect import ORDINARY, gradients_of, host_value_or_none, local_tensor, moved, note_written
from ampkit.gradients.ranks import SkipGroups
from ampkit.gradients.step_contract import StepScalars
from ampkit.optim.float32_step import step_in_float32
from ampkit.optim.low_precision_weights import Precision
from ampkit.torch_private import (
    dynamo_skip,
    foreach_add_,
    foreach_mul,
    foreach_mul_,
    local_tensors,
    placements_of,
    skip_compilation,
)

Loss = TypeVar("Loss")  # returned by a closure, and then by `step`
_dtype_of, _layout_of, _is_cpu = attrgetter("dtype"), attrgetter("layout"), attrgetter("is_cpu")
_CPU = torch.device("cpu")
_MOST_CACHES = 8  # for a group in which different parameters have gradients in each step, as with experts
# arguments that a group cannot override
_OF_THE_OPTIMIZER = ("impl", "max_grad_norm", "rounding", "masters", "state_dtype", "seed")


class DeviceStep(ABC):
    """Mixin for a `torch.optim` optimizer whose step reads a scaler's scalars on the device.

    `_step_supports_amp_scaling` is torch's contract with fused optimizers, `_step_supports_grad_multiplier` is
    ampkit's: if `max_grad_norm` is set, the scaler sets `grad_multiplier`, the inverse scale times a clipping
    coefficient, and `grad_norm`. Without such a scaler `step` takes the norm itself.

    `step` goes one of these ways for each parameter group:

    - `_step_torch`: torch's own functions, on a CPU and if Triton cannot run.
    - `_step_kernels`: the subclass's kernel or its reference, after an examination of every tensor (`_step_validated`);
      a `StepCache` keeps its arguments.
    - `_step_again`: the kernel with the arguments of the cache, if parameters, gradients and state are the same
      tensors as in the last step. They are read from the optimizer each time, so that changes by users are seen.
    """

    _step_supports_amp_scaling = True
    _step_supports_grad_multiplier = True
    impl: str
    max_grad_norm: float | None
    grad_norm: Tensor | None
    param_groups: list[dict[str, Any]]
    state: Any
    _precision: Precision
    # `_fingerprint` of each weight with a remainder after its last step. Weak references keep no weight alive.
    _fingerprints: dict[ref[Tensor], tuple[Any, ...]]
    # By index of the group, device, whether there are remainders, `impl`, and which parameters have gradients.
    _caches: dict[tuple[int, torch.device, bool, str, bytes], kernels.StepCache]
    _warned = False

    @abstractmethod
    def _names(self, group: dict[str, Any]) -> Sequence[str]:
        """Return the names of state that a kernel steps, without remainders; one-element ones (step, stream) last."""

    @abstractmethod
    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of this optimizer's kernel that others do not have."""

    @abstractmethod
    def _states(self, params: Sequence[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of each parameter as the kernels take it; missing entries are made."""

    @abstractmethod
    def _step_kernel(self, group: dict[str, Any], lists: list[list[Tensor]], **options: Any) -> None:
        """Call the kernel with lists of local parameters, gradients and the entries that `_names` names."""

    @abstractmethod
    def _fused(
        self, group: dict[str, Any], lists: list[list[Tensor]]
    ) -> Callable[[list[int], list[list[Tensor]]], None]:
        """Return torch's fused step for `step_in_float32`, and leave it the lists that have an entry per element."""

    @abstractmethod
    def _step_torch(self, group: dict[str, Any], device: torch.device, scalars: StepScalars) -> bool:
        """Step a group on one device by torch's functions; False if the kernels' reference must do it."""

    def _prepare(
        self,
        impl: str,
        cls: str,
        differentiable: bool,
        precision: Precision,
        max_grad_norm: float | None,
        **numbers: Any,
    ) -> None:
        """Check arguments that torch's constructor does not check, before it runs."""
        if differentiable:
            raise ValueError(
                f"ampkit.optim.{cls} got differentiable=True; its step is not recorded by autograd: "
                f"use torch.optim.{cls}(differentiable=True)"
            )
        for name, value in numbers.items():
            if any(isinstance(item, Tensor) for item in (value if isinstance(value, tuple | list) else [value])):
                raise TypeError(
                    f"ampkit.optim.{cls} got a tensor for {name}; expected a float: only lr may be a tensor, or use "
                    f"torch.optim.{cls}(capturable=True)"
                )
        if impl not in kernels.IMPLS:
            raise ValueError(f"unknown impl {impl!r}; expected 'auto', 'triton' or 'reference'")
        if max_grad_norm is not None:
            if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, int | float):
                raise TypeError(f"max_grad_norm is {max_grad_norm!r}; expected a number, or None for no clipping")
            if not 0.0 < max_grad_norm < math.inf:
                raise ValueError(f"max_grad_norm is {max_grad_norm}; expected a positive finite number")
        self.impl, self.max_grad_norm, self.grad_norm = impl, max_grad_norm, None
        self._precision, self._fingerprints, self._caches = precision, {}, {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer` does. Never synchronizes.

        Args:
            param_group: "params", and settings that differ from the constructor's.

        Raises:
            ValueError: only `torch.optim` supports a setting, or it is one for all groups.
            TypeError: with `rounding`, `masters` or `state_dtype`, a parameter that is neither bfloat16 nor float32.
        """
        super().add_param_group(param_group)  # type: ignore[misc]  of torch's class, the other base
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        for name in _OF_THE_OPTIMIZER:
            if name in group:
                raise ValueError(
                    f"a parameter group has {name}={group[name]!r}; expected it as an argument of the optimizer, for "
                    "all groups: use another optimizer for this group"
                )
        for name, expected in (("differentiable", False), ("decoupled_weight_decay", True), ("dampening", 0)):
            if bool(group.get(name, expected)) != expected:
                raise ValueError(
                    f"a parameter group has {name}={group[name]}; ampkit.optim supports only {expected}: use "
                    "torch.optim for it"
                )
        self._precision.check(group["params"])

    @property
    def has_remainders(self) -> bool:
        """Whether bfloat16 weights have remainders, with which they are their own masters: `masters="remainder"`."""
        return self._precision.masters is not None

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_known(self, method: str, tensors: Mapping[Tensor, Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(f"{method} got {_described(tensors)}; expected a dict of tensors by parameter")
        known = set(self._parameters())
        for param in tensors:
            if param not in known:
                raise ValueError(
                    f"{method} got a key that is not a parameter of this optimizer, {_described(param)}; expected "
                    "tensors from its param_groups"
                )

    @torch.no_grad()
    def masters(self) -> dict[Tensor, Tensor]:
        """Return the float32 master of each bfloat16 parameter. Never synchronizes.

        Returns:
            By parameter a new tensor, a DTensor for a DTensor: the parameter with its remainder, or, without one, the
            parameter's value.
        """
        masters = {param: param.detach().float() for param in self._parameters() if param.dtype is torch.bfloat16}
        for param, remainder in self._all_remainders().items():
            master = kernels.rounding.joined(local_tensor(param.detach()), local_tensor(remainder))
            local_tensor(masters[param]).copy_(master)
        return masters

    @torch.no_grad()
    def set_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Set bfloat16 parameters and their remainders to float32 values. Never synchronizes.

        Args:
            masters: by parameter a float32 tensor of its shape, device and DTensor placements.

        Raises:
            TypeError: `masters` is not a mapping.
            ValueError: the optimizer has no remainders, a key is none of its bfloat16 parameters, or a value differs in
                dtype, shape, device or placements. Nothing has changed then.
        """
        if not self.has_remainders:
            raise ValueError("set_masters needs remainders; expected an optimizer with masters='remainder'")
        self._check_known("set_masters", masters)
        for param, master in masters.items():
            dtypes = param.dtype, getattr(master, "dtype", None)
            if dtypes != (torch.bfloat16, torch.float32) or _place(master) != _place(param):
                raise ValueError(
                    f"set_masters got {_described(master)} for {_described(param)}; expected float32 for bfloat16, of "
                    "the same shape, device and placements"
                )
        for group in self.param_groups:
            self._states([param for param in group["params"] if param in masters], group)
        for param, master in masters.items():
            weight, remainder = kernels.rounding.split(local_tensor(master))
            local_tensor(param).copy_(weight)
            local_tensor(self.state[param]["remainder"]).copy_(remainder)
        note_written(list(masters))
        self._note_fingerprints(masters)

    def _remainders(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return the remainders of bfloat16 parameters, 0 for a parameter that other code than a step has written."""
        remainders = {param: self.state[param]["remainder"] for param in params if param.dtype is torch.bfloat16}
        for param, remainder in remainders.items():
            weight = ref(param)
            if weight in self._fingerprints and self._fingerprints[weight] != _fingerprint(param):
                local_tensor(remainder).zero_()
                self._fingerprints[weight] = _fingerprint(param)
        return remainders

    def _all_remainders(self) -> dict[Tensor, Tensor]:
        """`_remainders` of all parameters that have one."""
        return self._remainders([param for param in self._parameters() if "remainder" in self.state.get(param, {})])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.optim.Optimizer` does. Never synchronizes.

        Remainders are 0 for weights that other code has written to.
        """
        self._all_remainders()
        return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's, as `torch.optim.Optimizer` does. Never synchronizes.

        Remainders count for the weights that the next step finds, so the model may be loaded before or after.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            ValueError: a remainder or a random stream has been converted to another dtype. Nothing has changed then.
        """
        hooked: list[dict[str, Any]] = []  # the state after the user's hooks

        def check(_: Any, state: dict[str, Any]) -> None:
            self._precision.check_state(state["state"])
            hooked.append(state)

        before = self.register_load_state_dict_pre_hook(check)  # type: ignore
        after = self.register_load_state_dict_post_hook(  # type: ignore
            lambda _: self._keep_entries(hooked[0]), prepend=True
        )
        try:
            super().load_state_dict(state_dict)  # type: ignore[misc]
        finally:
            before.remove()
            after.remove()

    def _keep_entries(self, state_dict: dict[str, Any]) -> None:
        """Restore the dtype of entries that torch has converted; drop entries from which no step can continue."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if not self._precision.continues(name):
                    del self.state[param][name]
                elif name != "step" and isinstance(value, Tensor) and not self._precision.is_torchs:
                    self.state[param][name] = value.to(param.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied optimizer; torch's `load_state_dict` also calls this, with state and groups."""
        super().__setstate__(state)  # type: ignore[misc]
        self._fingerprints, self._caches = {}, {}

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's entries, and the entries of this class that pickles keep."""
        self._all_remainders()
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc, assignment]
        own = ("impl", "max_grad_norm", "grad_norm", "_precision")
        return {**state, **{name: getattr(self, name) for name in own}}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless a scaler's `found_inf` is set. Never synchronizes on CUDA.

        Args:
            closure: computes the loss and gradients before the update; None: the gradients are there.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_compiling() and self.impl != "reference" and self._leaves_cpu():
            _step_uncompiled(self)
            return loss
        scalars = StepScalars.of(self)
        with torch.set_grad_enabled(False):
            if self.max_grad_norm is not None and scalars.grad_multiplier is None:
                clip = _clip_uncompiled if is_compiling() else DeviceStep._clip
                scalars = clip(self, scalars)
            for number, group in enumerate(self.param_groups):
                if not (self._caches and self._step_again(number, group, scalars)):
                    self._step_validated(number, group, scalars)
        return loss

    def _clip(self, scalars: StepScalars) -> StepScalars:
        """Take the norm of all gradients. Return the scalars with the factor that unscales and clips them."""
        gradients, max_norm = gradients_of(self), self.max_grad_norm
        assert max_norm is not None
        device = next(iter(gradients.by_device), _CPU)
        scalars = scalars.on(device)
        inverse = scalars.inverse_scale()
        factor = torch.ones((), dtype=torch.float32, device=device) if inverse is None else inverse
        flags = {device: torch.zeros((), dtype=torch.float32, device=device) for device in gradients.by_device}
        self.grad_norm, factor = norm_and_factor(gradients, factor, flags, 2.0, max_norm, SkipGroups(gradients.meshes))
        return StepScalars(scalars.found_inf, None, factor.float())

    def _leaves_cpu(self) -> bool:
        """Whether kernels may step. These take addresses, for each of which Dynamo would compile the step again."""
        return self.impl == "triton" or not all(param.is_cpu for param in self._parameters())

    @dynamo_skip
    def _step_again(self, number: int, group: dict[str, Any], scalars: StepScalars) -> bool:
        """Step a group by the caches of its last step; False, with nothing done, if they do not fit."""
        params, names = group["params"], self._names(group)
        grads = [param.grad for param in params]
        which = b""
        if type(None) in set(map(type, grads)):
            which = _which(grads)
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        columns, remainders = [params, grads], dict[Tensor, Tensor]()
        try:
            if names:
                state = self.state
                states = [state[param] for param in params]
                for name in names:
                    columns.append([entries[name] for entries in states])
            if self.has_remainders:
                remainders = self._remainders(params)
        except KeyError:
            return False
        launches = []
        n = len(columns) - ("step" in names) - ("stream" in names)
        sharded: Sequence[Tensor] = ()
        if not set(map(type, params)) <= ORDINARY:
            where = placements_of(params)
            if any(placements_of(column) != where for column in columns[1:n]):
                return False  # `_step_kernels` redistributes gradients
            sharded, columns = params, list(map(local_tensors, columns))
        for device, rows, targets in _launched_alike(params, remainders):
            lists = columns if rows is None else [[column[i] for i in rows] for column in columns]
            cache = self._caches.get((number, device, targets is not None, self.impl, which))
            if cache is None or not cache.fits([*lists[:n], *([] if targets is None else [targets]), *lists[n:]]):
                return False
            launches.append((cache, lists[0] if targets is None else [*lists[0], *targets]))
        with _shifted_by_shard(columns[-1], sharded) if sharded and "stream" in names else nullcontext():
            for cache, written in launches:
                cache.launch(self._all_options(group, scalars, cache.device))
                # As in-place operations do: autograd finds stale saved tensors by it.
                torch.autograd.graph.increment_version(written)
        if sharded:
            torch.autograd.graph.increment_version(sharded)
        if self.has_remainders:
            self._note_fingerprints(remainders)
        return True

    def _note_fingerprints(self, params: Iterable[Tensor]) -> None:
        self._fingerprints.update((ref(param), _fingerprint(param)) for param in params)

    def _all_options(self, group: dict[str, Any], scalars: StepScalars, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments of the kernel, except for lists."""
        found_inf, grad_scale, multiplier = scalars.on(device)
        return {
            "lr": lr_for_kernel(group["lr"], device),
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            "multiplier": multiplier,
            "grad_scale": grad_scale,
            "found_inf": found_inf,
            **self._options(group),
        }

    def _step_validated(self, number: int, group: dict[str, Any], scalars: StepScalars) -> None:
        """Step a group after an examination of every tensor, whose results caches keep for `_step_again`."""
        # torch's functions take lists of plain tensors, or of DTensors of one mesh: a mixed list is stepped in parts.
        params = group["params"]
        is_plain = self.impl != "triton" and all(map(_is_cpu, params)) and set(map(type, params)) <= ORDINARY
        if is_plain and self._step_torch(group, _CPU, scalars.on(_CPU)):
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            if param.grad is not None:
                by_device.setdefault(param.device, []).append(param)
        for device, params in by_device.items():
            refuse_sparse(self, [param.grad for param in params])
            if kernels.uses_triton(self.impl, device):
                self._step_kernels(number, group, device, params, scalars)
                continue
            here = scalars.on(device)
            for part in _by_mesh(params):
                if not self._step_torch({**group, "params": part}, device, here):
                    self._step_kernels(number, group, device, part, scalars)

    @dynamo_skip
    def _step_kernels(
        self, number: int, group: dict[str, Any], device: torch.device, params: list[Tensor], scalars: StepScalars
    ) -> None:
        lr_on_host = not isinstance(group["lr"], Tensor) or (group["lr"].is_cpu and device.type != "cpu")
        if lr_on_host and kernels.is_capturing(device):
            self._warn_of_frozen_lr()
        names, states = self._names(group), self._states(params, group)
        columns = [
            list(map(local_tensor, params)),
            [local_gradient(param, param.grad) for param in params],
            *([local_tensor(state[name]) for state in states] for name in names),
        ]
        remainders = self._remainders(params) if self.has_remainders else {}
        in_float32 = (
            not self._precision.is_torchs
            and kernels.reference.is_on_host(columns[1][0])
            and not kernels.uses_triton(self.impl, device)
            and set(map(type, columns[0])) <= ORDINARY
        )
        if in_float32:
            scalars = scalars.on(device)
        with nullcontext() if "stream" not in names else _shifted_by_shard(columns[-1], params):
            for rows, targets in split_by_remainder(params, remainders):
                lists = columns if rows is None else [[column[i] for i in rows] for column in columns]
                streams = None
                if "stream" in names:
                    *lists, streams = lists
                if not in_float32:
                    grads = [param.grad for param in group["params"]]
                    cache = self._cache((number, device, targets is not None, self.impl, _which(grads)))
                    options = self._all_options(group, scalars, device)
                    options |= {"remainders": targets, "streams": streams, "impl": self.impl, "cache": cache}
                    self._step_kernel(group, lists, **options)
                elif not scalars.skips_on_host():
                    fused = self._fused(group, lists)
                    step_in_float32(lists, targets, streams, scalars.factor_on_host(), fused)
                stepped = params if rows is None else [params[i] for i in rows]
                note_written([*stepped, *(remainders[param] for param in stepped if param in remainders)])
        if self.has_remainders:
            self._note_fingerprints(remainders)

    def _cache(self, key: tuple[int, torch.device, bool, str, bytes]) -> kernels.StepCache:
        """Return the cache for a combination of a group's gradients, replacing the oldest of `_MOST_CACHES`."""
        if key not in self._caches:
            of_group = [other for other in self._caches if other[:-1] == key[:-1]]
            if len(of_group) >= _MOST_CACHES:
                del self._caches[of_group[0]]
            self._caches[key] = kernels.StepCache()
        return self._caches[key]

    def _fill(self, params: Sequence[Tensor], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the state of each parameter, with the named entries and the entries that low precision needs."""
        self._precision.check(params)
        states = [self.state[param] for param in params]
        numbers: dict[Tensor, int] = {}
        if self._precision.streams and not all("stream" in state for state in states):
            numbers = {param: number for number, param in enumerate(self._parameters())}
        for param, state in zip(params, states, strict=True):
            self._precision.fill(state, names, param, numbers.get(param, 0))
        return states

    def _warn_of_frozen_lr(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ampkit.optim.{type(self).__name__}.step() is captured in a CUDA graph with a learning rate on the "
                "host: every replay will use this rate, whatever a scheduler sets. Pass lr=torch.tensor(...) on the "
                "device and change it in place.",
                stacklevel=6,
            )


# For compiled code; the hooks around `step` have run.
_step_uncompiled = skip_compilation(lambda optimizer: DeviceStep.step(optimizer))
_clip_uncompiled = skip_compilation(DeviceStep._clip)


def refuse_sparse(optimizer: DeviceStep, grads: Sequence[Any]) -> None:
    """Raise `RuntimeError` for a gradient that is not strided."""
    if not set(map(_layout_of, grads)) <= {torch.strided}:
        grad = next(grad for grad in grads if grad.layout is not torch.strided)
        raise RuntimeError(
            f"ampkit.optim.{type(optimizer).__name__} got a {grad.layout} gradient for a parameter of shape "
            f"{tuple(grad.shape)}; expected dense gradients: use torch.optim.SparseAdam or torch.optim.SGD for this "
            "parameter, or sparse=False"
        )


def _by_mesh(params: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Return the DTensors of each mesh, and all plain tensors: the lists that torch's functions take."""
    parts: dict[Any, list[Tensor]] = {}
    for param in params:
        parts.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return parts.values()


@contextmanager
def _shifted_by_shard(streams: list[Tensor], params: Sequence[Tensor]) -> Iterator[None]:
    """Shift random streams for one step, so that shards of a DTensor round differently; saved state has no shift."""
    numbers: dict[Any, int] = {}  # by mesh and placements
    for place, param in zip(placements_of(params), params, strict=True):
        if place not in numbers:
            numbers[place] = _shard_number(param)
    shifts = [numbers[place] << 32 for place in placements_of(params)]
    if not any(shifts):
        yield
        return
    foreach_add_(streams, shifts)
    try:
        yield
    finally:
        foreach_add_(streams, [-shift for shift in shifts])


def _shard_number(param: Any) -> int:
    """Return the index of this rank's shard of a DTensor, the same for its replicas; 0 for any other tensor."""
    number, placements = 0, getattr(param, "placements", ())
    coordinate = param.device_mesh.get_coordinate() if placements else None  # None outside of the mesh too
    for dim, place in enumerate(coordinate or ()):
        if not placements[dim].is_replicate():
            number = number * param.device_mesh.size(dim) + place
    return number


def _fingerprint(param: Tensor) -> tuple[Any, ...]:
    """Version counters and storage of a parameter, by which writes to it and assignments to its `data` are noticed.

    A write through `data` changes neither. A write to a DTensor increments its own counter, a step the counter of its
    shard. The weak reference keeps the storage's identity from being reused, but does not keep its memory.
    """
    local = local_tensor(param)
    storage = _weak_storage if not is_compiling() else _weak_storage_uncompiled
    return param._version, local._version, local.storage_offset(), storage(local)


def _weak_storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# While Dynamo traces it makes an object of the class, whose deletion fails.
_weak_storage_uncompiled = skip_compilation(_weak_storage)


def _place(tensor: Any) -> tuple[Any, ...]:
    """Shape, device, and mesh and placements of a DTensor. Tensors that agree in all can be copied shard by shard."""
    return tuple(getattr(tensor, name, None) for name in ("shape", "device", "device_mesh", "placements"))


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    placements = f" with placements {placed}" if (placed := getattr(value, "placements", None)) else ""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}{placements}"


def local_gradient(param: Any, grad: Any) -> Tensor:
    """Return this rank's shard of a gradient, sharded as its parameter."""
    if type(grad) not in ORDINARY:
        placements = getattr(param, "placements", None)
        if placements is not None and getattr(grad, "placements", placements) != placements:
            grad = grad.redistribute(param.device_mesh, placements)
    return local_tensor(grad)


def needs_float32(group: dict[str, Any], scalars: StepScalars) -> bool:
    """Whether multiplying float16 gradients may round them to 0: torch's functions need that, kernels do not."""
    return torch.float16 in map(_dtype_of, group["params"]) and scalars.factor_on_host() != 1.0


def multiplied(grads: list[Tensor], scalars: StepScalars) -> list[Tensor]:
    """Return the gradients, unscaled and clipped by the scalars, which are on the gradients' device.

    On a CPU they are multiplied in place by a scale, as by torch's fused steps: new memory would cost more than the
    rest of the step. A clipping step leaves gradients as they are.
    """
    if not grads:
        return grads
    if grads[0].is_cpu:
        factor = scalars.factor_on_host()
        if factor == 1.0:
            return grads
        # an expanded gradient cannot be written
        if scalars.grad_multiplier is not None or not all(map(Tensor.is_contiguous, grads)):
            return list(foreach_mul(grads, factor))
        foreach_mul_(grads, factor)
        return grads
    for factor in (scalars.grad_multiplier, scalars.inverse_scale()):
        if factor is not None:
            grads = list(foreach_mul(grads, factor))
    return grads


def split_by_remainder(
    params: Sequence[Tensor], remainders: Mapping[Tensor, Tensor]
) -> list[tuple[list[int] | None, list[Tensor] | None]]:
    """Return indices of parameters without a remainder, then of parameters with one and the remainders.

    None is for all parameters, or for no remainders.
    """
    if not remainders:
        return [(None, None)] if params else []
    parts = []
    for with_remainder in (False, True):
        indices = [i for i, param in enumerate(params) if (param in remainders) is with_remainder]
        if indices:
            targets = [local_tensor(remainders[params[i]]) for i in indices] if with_remainder else None
            parts.append((None if len(indices) == len(params) else indices, targets))
    return parts


def _launched_alike(
    params: Sequence[Tensor], remainders: Mapping[Tensor, Tensor]
) -> Iterator[tuple[torch.device, list[int] | None, list[Tensor] | None]]:
    """Yield each device with `split_by_remainder` of its parameters."""
    if len(set(map(Tensor.get_device, params))) < 2:
        for rows, targets in split_by_remainder(params, remainders):
            yield params[0].device, rows, targets
        return
    by_device: dict[torch.device, list[int]] = {}
    for i, param in enumerate(params):
        by_device.setdefault(param.device, []).append(i)
    for device, here in by_device.items():
        for rows, targets in split_by_remainder([params[i] for i in here], remainders):
            yield device, here if rows is None else [here[i] for i in rows], targets


def _which(grads: Sequence[Tensor | None]) -> bytes:
    """Which gradients are not None, a byte of 0 or 1 for each; empty if none is None."""
    present = bytes(map(is_not, grads, repeat(None)))
    return present if 0 in present else b""


def lr_for_kernel(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return the learning rate as kernels take it: a tensor on the device, or a number."""
    if not isinstance(lr, Tensor):
        return lr
    value = host_value_or_none(lr.detach())
    return moved(lr, device) if value is None else value
