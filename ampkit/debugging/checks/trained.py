"""Tensors that receive gradients and that no optimizer holds, and optimizers whose parameters receive none.

Not reported: frozen parameters, modules in evaluation mode, inputs that need gradients, and tensors that the loop
updates itself.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ampkit.debugging.checks.check import Add, Check, is_plain
from ampkit.debugging.finding import Cause, Grade, Place
from ampkit.debugging.observe.autograd_graph import leaves_from
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.call_sites import Caller
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.training_loop import calling_place
from ampkit.debugging.torch_private import is_opaque, storage_key
from ampkit.gradients.collect import parameters as parameters_of

_MIN_STEPS = 3  # steps, and backward passes that reach a parameter, before a finding


class _Made(NamedTuple):
    """The operator that made a storage."""

    time: float
    caller: Caller
    in_module: bool  # a module's forward called it


class _Leaf:
    """A parameter in which backward accumulates gradients, and that no optimizer holds."""

    def __init__(self, made: _Made | None) -> None:
        self.made = made
        self.times = 0  # backward passes
        self.start: Tensor | None = None  # its values in the second of them
        self.is_hidden = False  # no module has it as a parameter
        self.is_trained = False  # its values have changed, or are not to be trained


class _Cut(NamedTuple):
    """The use of a parameter without autograd."""

    place: Place
    module: str  # the module whose forward entered `torch.no_grad`; "" for a use with autograd, as of `p.data`
    steps: set[int]
    values: Tensor


class Trained(Check):
    """Compares the leaves of each backward with the parameters of all optimizers."""

    name = "trained"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._made: StorageMap[_Made] = StorageMap()
        self._leaves: MutableMapping[Tensor, _Leaf] = WeakTensorKeyDictionary()
        self._lost: list[tuple[Tensor, _Leaf]] = []  # in several backward passes
        self._made_anew: dict[Caller, tuple[str, set[int]]] = {}  # parameters that a forward makes, and in which steps
        self._steps: dict[Optimizer, int] = {}
        self._without: dict[Optimizer, list[Tensor]] = {}  # parameters that never had a gradient
        self._start: dict[Optimizer, Tensor] = {}  # the values of its first parameter
        self._missing: dict[int, Tensor] = {}  # by storage: in `_without`, and never used with autograd
        self._cut: dict[Tensor, _Cut] = {}  # of these, all that a module uses without autograd
        self._copies: dict[Caller, list[int]] = {}  # how often a line copies another tensor, and a tensor to itself
        self._no_grad = Place(), ""  # where `torch.no_grad` was entered last, and in which module

    def opened(self, stack: ExitStack) -> None:
        for cls in (torch.no_grad, torch.inference_mode):
            stack.callback(setattr, cls, "__enter__", cls.__enter__)
            cls.__enter__ = self._noting(cls.__enter__)  # type: ignore[method-assign]

    def _noting(self, enter: Any) -> Any:
        @functools.wraps(enter)
        def noted(region: Any) -> Any:
            if self._missing:
                module = self.run.modules.current()
                self._no_grad = calling_place(), "the loop" if module is None else module.name
            return enter(region)

        return noted

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase == "forward"

    def operator_ran(self, call: Call) -> None:
        is_differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
        if not call.op.mutable and call.outputs and not is_differentiated:
            self._made.set(call.outputs[0], _Made(time.perf_counter(), call.caller, call.module is not None))
        if self._missing and call.module is not None:
            self._note_use(call)
        is_loaded = call.op.name == "aten::copy_" and call.tensors and isinstance(call.tensors[0], Parameter)
        if is_loaded and call.caller.code and not any(map(is_opaque, call.tensors)):
            ends = [(storage_key(each), each.storage_offset(), each.stride()) for each in call.tensors]
            self._copies.setdefault(call.caller, [0, 0])[ends[0] == ends[-1]] += 1

    def _note_use(self, call: Call) -> None:
        """Note a module's use of a parameter that has no gradients, with autograd or without."""
        for tensor in call.tensors:
            parameter = None if is_opaque(tensor) else self._missing.get(storage_key(tensor))
            if parameter is not None and torch.is_grad_enabled() and tensor.requires_grad:
                self._missing.pop(storage_key(tensor))
                self._cut.pop(parameter, None)
            elif parameter is not None:
                if parameter not in self._cut:
                    where = (self.run.place(call), "") if torch.is_grad_enabled() else self._no_grad
                    self._cut[parameter] = _Cut(*where, set(), parameter.detach().clone())
                self._cut[parameter].steps.add(self.run.step)

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        roots = [tensors] if isinstance(tensors, Tensor) else tensors
        inputs = kwargs.get("inputs", args[4] if len(args) > 4 else None)
        if inputs is None:
            inputs = leaves_from(root.grad_fn for root in roots if isinstance(root, Tensor))
        yield
        held = {id(p) for each in (*self.run.loop.optimizers, *self.run.loop.made) for p in parameters_of(each)}
        for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
            # Another tensor that is not a parameter is an input, and so is one by which a loss is differentiated.
            if isinstance(tensor, Parameter) and id(tensor) not in held and is_plain(tensor):
                self._note_lost(tensor)

    def _note_lost(self, tensor: Tensor) -> None:
        """Note a parameter with a gradient that no optimizer uses."""
        if tensor.grad is None:
            return
        leaf = self._leaves.setdefault(tensor, _Leaf(self._made.get(tensor)))
        leaf.times += 1
        if leaf.times == 1 and leaf.made is not None and leaf.made.in_module:
            _, steps = self._made_anew.setdefault(leaf.made.caller, (self.run.names_of([tensor]), set()))
            steps.add(self.run.step)
        elif leaf.times == 2:
            leaf.start = tensor.detach().clone()
            self._lost.append((tensor, leaf))
            modules = (module for root in self.run.modules.roots() for module in root.modules())
            owner = next((each for each in modules if any(tensor is p for p in each.parameters(recurse=False))), None)
            leaf.is_hidden = owner is None
            leaf.is_trained = owner is not None and not owner.training  # as a network that computes a loss
        elif leaf.start is not None and not leaf.is_trained:
            leaf.is_trained = not torch.equal(leaf.start, tensor.detach())

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self.place_of(optimizer)
        if optimizer not in self._without:
            parameters = self._without[optimizer] = [p for p in parameters_of(optimizer) if p.requires_grad]
            if parameters:
                self._start[optimizer] = parameters[0].detach().clone()
        without = self._without[optimizer] = [p for p in self._without[optimizer] if p.grad is None]
        if self._steps[optimizer] == 1:
            self._missing |= {storage_key(p): p for p in without if not is_opaque(p)}

    # --- findings

    def ended(self) -> None:
        for caller, (others, same) in self._copies.items():
            if same and not others:
                why = f"all {same} tensors that this line copies are copied to themselves; state_dict() copies nothing"
                fix = "the state_dict() of the other model, or copy.deepcopy(model.state_dict()) when it is saved"
                self._add("error", Cause("copied to itself", why), "a copy changes nothing", _place_of(caller), fix)
        if max(self._steps.values(), default=0) < _MIN_STEPS:
            return
        for caller, (name, steps) in self._made_anew.items():
            if len(steps) >= _MIN_STEPS:
                what = f"a parameter, {name}, is made in each forward, so no optimizer holds it"
                fix = "make it in __init__, before the optimizer"
                self._add("error", Cause("made in forward"), what, _place_of(caller), fix)
        lost = self._lost_by_kind()
        for (kind, place), leaves in lost.items():
            self._add_lost(kind, place, leaves)
        self._add_missing({kind for kind, _ in lost})

    def _add(self, grade: Grade, cause: Cause, what: str, place: Place, fix: str = "") -> None:
        self.found(place, grade, cause, what, fix, step=0, last=self.run.step - 1)

    def _lost_by_kind(self) -> dict[tuple[str, Place], dict[Tensor, _Leaf]]:
        """Return the parameters that an optimizer should hold, by the reason for which none does and by the line."""
        lost: dict[tuple[str, Place], dict[Tensor, _Leaf]] = {}
        held = [p for optimizer in self._steps for p in parameters_of(optimizer)]
        if any(type(p) not in (Tensor, Parameter) for p in held):
            return lost  # sharded: backward accumulates in other tensors than the optimizer's
        latest = max((when for when, _ in self.run.loop.made.values()), default=math.inf)
        optimizer = max(self._steps, key=self._steps.__getitem__)
        for tensor, leaf in sorted(self._lost, key=lambda each: 0.0 if each[1].made is None else each[1].made.time):
            kind, place = "not held", self.place_of(optimizer)
            if leaf.is_trained or leaf.times < _MIN_STEPS or any(tensor is p for p in held):
                continue
            if leaf.is_hidden:
                kind, place = "hidden", place if leaf.made is None else _place_of(leaf.made.caller)
            elif leaf.made is not None and leaf.made.time > latest:
                kind = "made later"
            lost.setdefault((kind, place), {})[tensor] = leaf
        return lost

    def _add_lost(self, kind: str, place: Place, leaves: dict[Tensor, _Leaf]) -> None:
        grade: Grade = "error"
        why = "the optimizer is made without them"
        fix = "pass them to the optimizer, or requires_grad_(False) for parameters that are to stay as they are"
        tensor, leaf = next(iter(leaves.items()))
        if kind == "hidden":
            why = "model.parameters() does not return them: they are in a list, a dict or a plain attribute"
            fix = "nn.ModuleList, nn.ModuleDict or nn.ParameterList"
        elif kind == "made later":
            why = "they are made after the optimizer" + (f", at {_place_of(leaf.made.caller)}" if leaf.made else "")
            fix = "make the optimizer after the last change of the model"
        elif self._is_part(tensor):
            grade = "note"
        what = f"backward computes gradients of {self.run.names_of(leaves)}, and no optimizer uses them"
        self._add(grade, Cause(kind, why), what, place, fix)

    def _is_part(self, tensor: Tensor) -> bool:
        """Return whether the optimizers hold the last layers of a model, as if only these are to be trained."""
        held = {id(p) for optimizer in self._steps for p in parameters_of(optimizer)}
        models = [[id(p) for p in root.parameters()] for root in self.run.modules.roots()]
        model = next((each for each in models if id(tensor) in each), [])
        last = [*itertools.dropwhile(lambda each: each not in held, model)]
        return bool(last) and held.issuperset(last)

    def _add_missing(self, lost: set[str]) -> None:
        """Add parameters that an optimizer holds and that have no gradient; `lost`: the kinds of `_lost`."""
        missing: dict[Place, list[Tensor]] = {}
        cut: dict[tuple[Place, str], list[Tensor]] = {}
        for optimizer, steps in self._steps.items():
            without, place, unused = self._without[optimizer], self.place_of(optimizer), []
            for p in without if steps >= _MIN_STEPS else ():
                use = self._cut.get(p)
                if use is not None and not torch.equal(use.values, p.detach()):
                    continue  # as of an average of another model
                if use is not None and len(use.steps) >= max(_MIN_STEPS - 1, steps // 2):
                    cut.setdefault((use.place, use.module), []).append(p)
                else:
                    unused.append(p)
            if unused and len(without) < sum(p.requires_grad for p in parameters_of(optimizer)):
                missing.setdefault(place, []).extend(unused if "made later" not in lost else ())
            elif unused and not lost and torch.equal(self._start[optimizer], without[0].detach()):
                names = self.run.names_of(unused)
                what = f"no parameter of the optimizer has a gradient in its {steps} steps: {names}"
                fix = "give the optimizer the parameters of the model that computes the loss"
                self._add("error", Cause("no gradients"), what, place, fix)
        for (place, module), tensors in cut.items():
            what = f"the gradient of {self.run.names_of(tensors)} is missing, although an optimizer holds them"
            why = "their modules compute without autograd: torch.no_grad, torch.inference_mode, .data or .detach()"
            fix = "compute with autograd, or requires_grad_(False) for parameters that are to stay as they are"
            # The code around a module may use it as a fixed one on purpose.
            grade: Grade = "error" if not module or self._is_whole(module, tensors) else "note"
            self._add(grade, Cause("no autograd", why), what, place, fix)
        for place, tensors in missing.items():
            if tensors:
                what = f"the gradient of {self.run.names_of(tensors)} is missing"
                self._add("note", Cause("no gradient"), what, place)

    def _is_whole(self, module: str, tensors: list[Tensor]) -> bool:
        """Return whether these are all parameters of a module, given by its path."""
        named = [each for root in self.run.modules.roots() for each in root.named_parameters()]
        own = {id(p) for name, p in named if name.startswith(f"{module}.")}
        return bool(own) and own <= {*map(id, tensors)}


def _place_of(caller: Caller) -> Place:
    return Place(*caller.line())
