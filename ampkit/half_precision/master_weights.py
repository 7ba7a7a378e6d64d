"""MasterWeights: float32 copies of a 16-bit model's parameters, which the optimizer steps instead.

The neighbors of 1 are 2**-10 away in float16 and 2**-7 in bfloat16; adding an update below half of that changes
nothing. So the optimizer steps float32 masters, and the model gets them rounded (Micikevicius et al., "Mixed Precision
Training", 2018, section 3.1). Gradients arrive at the model's parameters and move to the masters in one pass that casts
them to float32, unscales and checks them. Optimizer, clipping and schedulers work on float32 tensors, unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import ampkit_kernels
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.gradients.collect import local_tensor, masters_of, moved, note_written, set_masters

__all__ = ["MasterWeights"]


@dataclass
class _Pair:
    """A 16-bit parameter and its master, with the parameter's version and address when it last equaled the master."""

    param: Tensor
    master: Parameter
    written: tuple[int, int] = (-1, 0)

    def state(self) -> tuple[int, int]:
        """Return the version counter and the address of the parameter; `param.data = ...` changes the address only."""
        return self.param._version, local_tensor(self.param).data_ptr()


class MasterWeights:
    """Gives an optimizer float32 masters for its float16 and bfloat16 parameters (Micikevicius et al., 2018).

    Afterwards `optimizer.param_groups` holds the masters, and `loss.backward(); optimizer.step()` works as before:
    `step` moves the gradients to the masters, updates the masters, rounds them into the model and drops their
    gradients. `optimizer.zero_grad()` clears the gradients of masters and model. float32 parameters are unchanged.
    16-bit parameters that join later, by `add_param_group` or `requires_grad_(True)`, get masters in the next step;
    frozen ones get none. A sparse gradient becomes dense. `step` with a closure raises `RuntimeError`.

    `ampkit.GradScaler` finds the masters by itself. With another scaler, call `take_gradients_()` after backward, so
    that the scaler finds float32 gradients.

    Masters start from the 16-bit values; `load_state_dict` can set others, such as the model's original float32 values.

    If a 16-bit weight is changed from outside (a checkpoint, a pruning mask, `param.data = ...`), the next `step` sets
    each master element that no longer rounds to the weight to the new value. Writes into `param.data` (`.data.mul_`)
    are not detected and are overwritten.

    Args:
        optimizer: a `torch.optim.Optimizer` over the model's parameters; its state for them moves to the masters.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        RuntimeError: the optimizer has masters already.
        ValueError: the optimizer was made with `masters="remainder"`.

    No method synchronizes with the device. Memory per 16-bit parameter: 4 bytes for the master, and 4 for its gradient
    between `take_gradients_` and the end of `step`.

    >>> model = torch.nn.Linear(2, 1).bfloat16()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    >>> masters = MasterWeights(optimizer)
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> [master.dtype for master in masters.masters()]
    [torch.float32, torch.float32]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"MasterWeights takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        refuse_other_masters(optimizer)
        self.optimizer = weakref.proxy(optimizer)  # a proxy: the hooks of the optimizer hold this object
        self._pairs: dict[int, _Pair] = {}
        self._adopt()
        set_masters(optimizer, self)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def model_parameters(self) -> list[Tensor]:
        """Return the model's 16-bit parameters, in the order of `masters`."""
        return [pair.param for pair in self._pairs.values()]

    def masters(self) -> list[Parameter]:
        """Return the float32 masters, in the order in which they were made."""
        return [pair.master for pair in self._pairs.values()]

    def master_of(self, param: Tensor) -> Parameter | None:
        """Return the master of a parameter, or None if it has none.

        Args:
            param: a parameter of the model.
        """
        pair = self._pairs.get(id(param))
        return None if pair is None else pair.master

    @torch.no_grad()
    def take_gradients_(
        self, inv_scale: Tensor | None = None, found_inf: dict[torch.device, Tensor] | None = None
    ) -> None:
        """Move the gradients of 16-bit parameters to their masters, in float32, times `inv_scale`.

        They are added to gradients that masters hold, and the 16-bit parameters' gradients are set to None, so that
        several backwards add up in float32. Parameters without a gradient are unchanged.

        Args:
            inv_scale: the factor, a float32 tensor of one element; None means 1.
            found_inf: float32 flags of one element by device, set to 1 if a product is not finite. Flags of missing
                devices are added. None: flags are not returned.

        Raises:
            RuntimeError: a parameter is on another device than its master. Nothing has changed then.
        """
        self._adopt()
        flags = {} if found_inf is None else found_inf
        with_gradients = [(pair, grad) for pair in self._pairs.values() if (grad := pair.param.grad) is not None]
        for pair, _ in with_gradients:
            _check_device(pair)
        # Two launches per device: gradients that become the master's, and gradients that are added to it.
        launches: dict[tuple[torch.device, bool], tuple[list[Tensor], list[Tensor]]] = {}
        for pair, grad in with_gradients:
            pair.param.grad = None
            master = pair.master
            if grad.layout is torch.sparse_coo:
                grad = grad.to(torch.float32).to_dense()  # repeated indices add up in float32
            if hasattr(grad, "placements") and grad.placements != master.placements:  # type: ignore[attr-defined]
                grad = grad.redistribute(placements=master.placements)  # type: ignore[attr-defined]
            sources, destinations = launches.setdefault((grad.device, master.grad is not None), ([], []))
            if master.grad is None:
                master.grad = torch.empty_like(grad, dtype=torch.float32)
            sources.append(local_tensor(grad).resolve_neg())  # kernels read memory, without the negative bit
            destinations.append(local_tensor(master.grad))
        for (device, accumulate), (sources, destinations) in launches.items():
            factor, flag = _scalars(device, inv_scale, flags)
            ampkit_kernels.unscale_into_(sources, destinations, factor, flag, accumulate=accumulate)

    @torch.no_grad()
    def write_back_(self) -> None:
        """Round the masters into the model's 16-bit parameters, in one launch per device."""
        by_device: dict[torch.device, list[_Pair]] = {}
        for pair in self._pairs.values():
            by_device.setdefault(pair.param.device, []).append(pair)
        for pairs in by_device.values():
            masters = [local_tensor(pair.master) for pair in pairs]
            params = [local_tensor(pair.param) for pair in pairs]
            ampkit_kernels.cast_(masters, params)
        note_written(self.model_parameters())
        for pair in self._pairs.values():
            pair.written = pair.state()

    def state_dict(self) -> dict[str, Any]:
        """Return the masters in the order of the parameter groups; the tensors share their storage.

        Together with the optimizer's own `state_dict` it resumes a run with bitwise identical results.
        """
        return {"masters": [master.detach() for master in self._in_groups()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, and write the model's 16-bit parameters from it.

        Args:
            state_dict: {"masters": tensors}, one for each master in the order of the parameter groups, of any dtype.

        Raises:
            KeyError: it has no "masters".
            TypeError: "masters" is not a list of tensors.
            ValueError: another number of masters, or another shape. Nothing has been loaded when it raises.
        """
        load_masters_(self, saved_masters(self, state_dict))

    def _in_groups(self) -> list[Tensor]:
        """Return the masters in the order of the parameter groups."""
        masters = {id(pair.master) for pair in self._pairs.values()}
        return [param for group in self.optimizer.param_groups for param in group["params"] if id(param) in masters]

    @torch.no_grad()
    def update_changed_(self) -> None:
        """Copy 16-bit parameters that were changed from outside into their masters; `step` calls this itself.

        Elements that equal the rounded master leave the master's value as it is.
        """
        for pair in self._pairs.values():
            if pair.written != pair.state():
                param, master = pair.param, pair.master
                master.copy_(torch.where(param == master.to(param.dtype), master, param.to(torch.float32)))

    def _adopt(self) -> None:
        """Replace the 16-bit parameters in the optimizer's groups by masters."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            params: list[Tensor] = group["params"]
            for index, param in enumerate(params):
                if param.dtype not in SIXTEEN_BIT or not param.requires_grad:
                    continue
                if id(param) in self._pairs:
                    raise RuntimeError(
                        f"a 16-bit parameter of shape {tuple(param.shape)} was given to the optimizer a second time, "
                        f"in addition to its master; remove it from the parameter group that was added"
                    )
                master = Parameter(param.detach().to(torch.float32))
                params[index] = master
                _move_state(optimizer, param, master)
                self._pairs[id(param)] = pair = _Pair(param, master)
                pair.written = pair.state()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        refuse_closure(optimizer, args, kwargs)
        self._adopt()
        self.update_changed_()
        self.take_gradients_()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.write_back_()
        for pair in self._pairs.values():
            pair.master.grad = None

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.__class__.zero_grad(self.optimizer, set_to_none)
        for pair in self._pairs.values():
            if set_to_none:
                pair.param.grad = None
            elif pair.param.grad is not None:
                pair.param.grad.detach_().zero_()


def saved_masters(masters: MasterWeights, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return each master with its saved value; raise as `MasterWeights.load_state_dict`, and load nothing."""
    if "masters" not in state_dict:
        raise KeyError(f"no 'masters' in this state dict, which has {sorted(map(str, state_dict))}")
    masters._adopt()
    saved, present = state_dict["masters"], masters._in_groups()
    if not isinstance(saved, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in saved):
        raise TypeError(f"the saved masters are {saved!r}; expected a list of tensors")
    if len(saved) != len(present):
        raise ValueError(f"there are {len(saved)} saved masters; this optimizer has {len(present)}")
    for index, (tensor, master) in enumerate(zip(saved, present, strict=True)):
        if tensor.shape != master.shape:
            raise ValueError(
                f"the saved master {index} has shape {tuple(tensor.shape)}; this optimizer's {tuple(master.shape)}"
            )
    return list(zip(present, saved, strict=True))


@torch.no_grad()
def load_masters_(masters: MasterWeights, values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values into masters, given as pairs, and round all masters into the model."""
    for master, value in values:
        master.copy_(value)
    masters.write_back_()


def _scalars(
    device: torch.device, inv_scale: Tensor | None, flags: dict[torch.device, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the factor and the flag of a device; add a missing flag to `flags`."""
    factor = torch.ones((), dtype=torch.float32, device=device) if inv_scale is None else moved(inv_scale, device)
    if device not in flags:
        flags[device] = torch.zeros((), dtype=torch.float32, device=device)
    return factor, flags[device]


def _move_state(optimizer: torch.optim.Optimizer, param: Tensor, master: Parameter) -> None:
    """Move the optimizer's state for a 16-bit parameter to its master, in float32."""
    if param not in optimizer.state:
        return
    optimizer.state[master] = {
        name: value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT else value
        for name, value in optimizer.state.pop(param).items()
    }


def refuse_closure(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `RuntimeError` if a hook before `step` gets a closure: `args` begins with the optimizer."""
    if kwargs.get("closure") is not None or any(map(callable, args[1:2])):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step got a closure, whose gradients would not reach the float32 masters or be "
            "unscaled; run backward first and call step() without a closure"
        )


def _check_device(pair: _Pair) -> None:
    if pair.param.device != pair.master.device:
        raise RuntimeError(
            f"a parameter of shape {tuple(pair.param.shape)} is on {pair.param.device}, its float32 master on "
            f"{pair.master.device}; move the model before the optimizer gets master weights, not after"
        )


def refuse_other_masters(optimizer: Any) -> None:
    """Raise `RuntimeError` for an optimizer with `MasterWeights`, `ValueError` for one with remainders."""
    if masters_of(optimizer) is not None:
        raise RuntimeError(
            f"this {type(optimizer).__name__} has master weights already; keep using the first MasterWeights, "
            f"FP16Optimizer or initialize"
        )
    if getattr(optimizer, "has_remainders", False):
        raise ValueError(
            f"this {type(optimizer).__name__} has masters='remainder', which stores the remainders of float32 masters "
            "beyond their bfloat16 weights; expected one kind of masters: omit that argument, or use the optimizer "
            "without other masters, as at level O3"
        )
