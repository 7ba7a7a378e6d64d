"""MasterWeights: float32 weights behind a half model, in the place of its parameters in the optimizer.

A half weight near 1 moves in steps of 2**-11 (float16) or 2**-8 (bfloat16); updates below half a step vanish
when they are added to it. So the optimizer steps float32 masters, and the model gets them rounded
(Micikevicius et al. 2018, section 3.1). Gradients arrive at the half parameters and are taken to the masters
in one pass: widened, unscaled, checked. The optimizer, clipping and schedulers work on float32 tensors,
unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.gradients import closures, kernels
from ampkit.gradients.masters import masters_of, set_masters
from ampkit.gradients.transfer import moved

__all__ = ["MasterWeights"]

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class _Pair:
    """A half parameter of the model, its master, and the half's version when last seen."""

    half: Tensor
    master: Parameter
    version: int


class MasterWeights:
    """Gives an optimizer float32 masters for its float16 and bfloat16 parameters.

    From then on `optimizer.param_groups` holds the masters, and `loss.backward(); optimizer.step()` works as
    before: `step` takes the gradients that have arrived, updates the masters, writes them to the model (in
    the same launch for `ampkit.optim` on CUDA) and drops the masters' gradients. Closures work too.
    `optimizer.zero_grad()` clears both sides. float32 parameters stay as they are. Half parameters that join
    later, by `add_param_group` or `requires_grad_(True)`, get masters in the next step; frozen ones get none.

    With `ampkit.GradScaler` nothing changes. With another scaler, call `take_gradients_()` after backward, so
    that it finds float32 gradients.

    If a half weight is changed from outside (a checkpoint loaded, a pruning mask), its master takes the value
    wherever it no longer rounds to it. Changes through `.data` are not seen.

    Args:
        optimizer: a `torch.optim.Optimizer` over the model's parameters; its state moves to the masters.
        values: float32 values that masters start from, by half parameter, when the model was float32 before.
            They become the masters' storage. Others start from the half values.

    Raises:
        TypeError: not an optimizer.
        RuntimeError: the optimizer has masters already.
        ValueError: a value of another shape, dtype or device than its parameter needs.

    Never syncs. Memory per half parameter: 4 bytes for the master, and 4 for its gradient between
    `take_gradients_` and the end of `step`.

    >>> model = torch.nn.Linear(2, 1).bfloat16()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    >>> masters = MasterWeights(optimizer)
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> [master.dtype for master in masters.masters()]
    [torch.float32, torch.float32]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, values: Mapping[Tensor, Tensor] | None = None) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"MasterWeights takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if masters_of(optimizer) is not None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} has master weights already; keep using the first MasterWeights, "
                f"FP16Optimizer or initialize"
            )
        _check_values(values or {})
        self._optimizer = weakref.ref(optimizer)
        self._pairs: dict[int, _Pair] = {}
        self._adopt(values or {})
        set_masters(optimizer, self)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps the masters."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer of these master weights is gone; keep a reference to it")
        return optimizer

    def halves(self) -> list[Tensor]:
        """The model's half parameters, in the order of `masters`."""
        return [pair.half for pair in self._pairs.values()]

    def masters(self) -> list[Parameter]:
        """The float32 masters."""
        return [pair.master for pair in self._pairs.values()]

    def master_of(self, param: Tensor) -> Parameter | None:
        """The master of a model's parameter; None where it has none."""
        pair = self._pairs.get(id(param))
        return None if pair is None else pair.master

    @torch.no_grad()
    def take_gradients_(
        self, inv_scale: Tensor | None = None, found_inf: dict[torch.device, Tensor] | None = None
    ) -> None:
        """Move the gradients that arrived at half parameters to their masters, in float32, times `inv_scale`.

        They are added where a master holds a gradient, and the half parameters' are dropped: what the next
        backward brings is added in float32. Does nothing where none has arrived. Never syncs.

        Args:
            inv_scale: the factor, one float32 element; None is 1.
            found_inf: flags by device, set to 1 where a product is not finite; devices are added.

        Raises:
            RuntimeError: a parameter was moved to another device than its master's. Nothing has changed then.
        """
        self._adopt({})
        found = {} if found_inf is None else found_inf
        fresh: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        added: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        arrived = [(pair, grad) for pair in self._pairs.values() if (grad := pair.half.grad) is not None]
        for pair, _ in arrived:
            _check_device(pair)
        for pair, grad in arrived:
            pair.half.grad = None
            master = pair.master
            if not _is_plain(grad) or (master.grad is not None and not _is_plain(master.grad)):
                _take_one(master, grad, inv_scale, found)
                continue
            sources, destinations = (fresh if master.grad is None else added).setdefault(grad.device, ([], []))
            if master.grad is None:
                master.grad = torch.empty_like(grad, dtype=torch.float32)
            sources.append(grad)
            destinations.append(master.grad)
        for lists, accumulate in ((fresh, False), (added, True)):
            for device, (sources, destinations) in lists.items():
                factor, flag = _scalars(device, inv_scale, found)
                kernels.unscale_into_(sources, destinations, factor, flag, accumulate=accumulate)

    @torch.no_grad()
    def write_back_(self) -> None:
        """Round the masters into the model's half parameters, one launch per device. Never syncs."""
        pairs = list(self._pairs.values())
        by_device: dict[torch.device, list[_Pair]] = {}
        for pair in pairs:
            by_device.setdefault(pair.half.device, []).append(pair)
        for part in by_device.values():
            kernels.cast_([_local(pair.master) for pair in part], [_local(pair.half) for pair in part])
        self._note_written(pairs)

    def drop_gradients(self) -> None:
        """Set the masters' gradients to None, as each step does."""
        for pair in self._pairs.values():
            pair.master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The masters, by parameter group and position; None where a parameter has none. Shares their storage.

        Together with the optimizer's own `state_dict` it resumes a run bit for bit.
        """
        masters = {id(pair.master) for pair in self._pairs.values()}
        groups = self.optimizer.param_groups
        return {
            "masters": [
                [param.detach() if id(param) in masters else None for param in group["params"]] for group in groups
            ]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, and write the model's half parameters from it.

        Raises:
            KeyError: no "masters" in it. TypeError: masters that are no tensors. ValueError: other groups, numbers or
            shapes than this optimizer's. Nothing has been loaded then.
        """
        self.loadable(state_dict)()

    def loadable(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved state as `load_state_dict` does; returns a function that loads it."""
        if "masters" not in state_dict:
            raise KeyError(f"no 'masters' in this state dict, which has {sorted(map(str, state_dict))}")
        self._adopt({})
        saved, groups = state_dict["masters"], self.optimizer.param_groups
        masters = {id(pair.master) for pair in self._pairs.values()}
        if not isinstance(saved, list | tuple) or not all(isinstance(group, list | tuple) for group in saved):
            raise TypeError(f"the saved masters are {saved!r}; expected a list of tensors per parameter group")
        found, expected = [len(group) for group in saved], [len(group["params"]) for group in groups]
        if found != expected:
            raise ValueError(f"the saved masters come in groups of {found}; this optimizer's groups are of {expected}")
        copies: list[tuple[Tensor, Tensor]] = []
        for index, (values, group) in enumerate(zip(saved, groups, strict=True)):
            for position, (value, param) in enumerate(zip(values, group["params"], strict=True)):
                if value is None or id(param) not in masters:
                    continue
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"the saved master {position} of group {index} is {value!r}; expected a tensor or None"
                    )
                if value.shape != param.shape:
                    raise ValueError(
                        f"the saved master {position} of group {index} has shape {tuple(value.shape)}; this "
                        f"optimizer's has {tuple(param.shape)}"
                    )
                copies.append((param, value))
        return lambda: self._load(copies)

    @torch.no_grad()
    def _load(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for param, value in copies:
            param.copy_(value)
        self.write_back_()

    def follow_model_(self) -> None:
        """Let masters take the values of half parameters that were changed from outside. Never syncs.

        An element that is still its master rounded keeps the master's digits. `step` calls this itself.
        """
        with torch.no_grad():
            for pair in self._pairs.values():
                if pair.half._version != pair.version:
                    half, master = pair.half, pair.master
                    master.copy_(torch.where(half == master.to(half.dtype), master, half.to(torch.float32)))
                    pair.version = half._version

    def _adopt(self, values: Mapping[Tensor, Tensor]) -> None:
        """Put masters in the place of the half parameters that the optimizer still holds."""
        optimizer = self.optimizer
        new = []
        for group in optimizer.param_groups:
            params: list[Tensor] = group["params"]
            for index, param in enumerate(params):
                if param.dtype not in HALVES or not param.requires_grad:
                    continue
                if id(param) in self._pairs:
                    raise RuntimeError(
                        f"a half parameter of shape {tuple(param.shape)} was given to the optimizer a second time, "
                        f"beside its master; remove it from the parameter group that was added"
                    )
                value = values.get(param)
                master = Parameter(param.detach().to(torch.float32) if value is None else value.detach())
                params[index] = master
                _move_state(optimizer, param, master)
                self._pairs[id(param)] = _Pair(param, master, param._version)
                new.append(param)
        if new and hasattr(optimizer, "write_copies"):      # it writes the halves as it steps
            optimizer.write_copies({pair.master: pair.half.detach() for pair in self._pairs.values()})  # type: ignore

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._adopt({})
        self.follow_model_()
        closure = closures.extract(args[1:], kwargs)
        if closure is None:
            self.take_gradients_()
            return None
        arguments, kwargs = closures.replace(self._around(closure), args[1:], kwargs)
        return (args[0], *arguments), kwargs

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self.write_back_()
            with torch.enable_grad():
                loss = closure()
            self.take_gradients_()
            return loss

        return evaluate

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if hasattr(optimizer, "write_copies") and closures.extract(args[1:], kwargs) is None:
            self._note_written(list(self._pairs.values()))
        else:
            self.write_back_()
        self.drop_gradients()

    def _note_written(self, pairs: Sequence[_Pair]) -> None:
        # Kernels that write by address do not bump version counters, by which autograd finds stale saved tensors.
        torch.autograd.graph.increment_version([_local(pair.half) for pair in pairs])
        for pair in pairs:
            pair.version = pair.half._version

    def _zero_grad(self, set_to_none: bool = True) -> None:
        optimizer = self.optimizer
        type(optimizer).zero_grad(optimizer, set_to_none)
        for pair in self._pairs.values():
            if set_to_none:
                pair.half.grad = None
            elif pair.half.grad is not None:
                pair.half.grad.detach_().zero_()


def _scalars(
    device: torch.device, inv_scale: Tensor | None, found: dict[torch.device, Tensor]
) -> tuple[Tensor, Tensor]:
    """The factor and the flag of a device; the flag is made where there is none."""
    factor = torch.ones((), device=device) if inv_scale is None else moved(inv_scale, device)
    if device not in found:
        found[device] = torch.zeros((), dtype=torch.float32, device=device)
    return factor, found[device]


def _take_one(master: Parameter, grad: Any, inv_scale: Tensor | None, found: dict[torch.device, Tensor]) -> None:
    """Take one sparse or DTensor gradient."""
    placements = getattr(master, "placements", None)
    if placements is not None and grad.placements != placements:
        grad = grad.redistribute(placements=placements)
    wide = grad.to(torch.float32)
    local = _local(wide)
    if local.layout is torch.sparse_coo:
        wide = local = local.coalesce()
        local = local._values()
    factor, flag = _scalars(local.device, inv_scale, found)
    kernels.unscale_([local], factor, flag)
    master.grad = wide if master.grad is None else master.grad + wide


def _move_state(optimizer: torch.optim.Optimizer, param: Tensor, master: Parameter) -> None:
    """Move the optimizer's state for a half parameter to its master, in float32."""
    if param not in optimizer.state:
        return
    optimizer.state[master] = {
        name: value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in HALVES else value
        for name, value in optimizer.state.pop(param).items()
    }


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not hasattr(tensor, "to_local")


def _local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _check_device(pair: _Pair) -> None:
    if pair.half.device != pair.master.device:
        raise RuntimeError(
            f"a parameter of shape {tuple(pair.half.shape)} is on {pair.half.device}, its float32 master on "
            f"{pair.master.device}; move the model before the optimizer gets master weights, not after"
        )


def _check_values(values: Mapping[Tensor, Tensor]) -> None:
    for param, value in values.items():
        if value.dtype is not torch.float32 or value.shape != param.shape or value.device != param.device:
            raise ValueError(
                f"a master value of shape {tuple(value.shape)} in {value.dtype} on {value.device} was given for a "
                f"parameter of shape {tuple(param.shape)} on {param.device}; expected float32 of its shape there"
            )
