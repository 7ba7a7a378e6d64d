"""Tensors that receive gradients and that no optimizer holds, and optimizers whose parameters receive none.

Not reported: frozen parameters, modules in evaluation mode, inputs that need gradients, and tensors that the loop
updates itself.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ampkit.debugging.checks.check import Add, Check
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

_MIN_STEPS = 3  # steps, and backward passes that reach a leaf, before a finding
_MIN_UNUSED = 10  # backward passes whose gradients no step has used


class _Made(NamedTuple):
    """The operator that made a storage."""

    time: float
    caller: Caller
    in_module: bool  # a module's forward called it


class _Leaf:
    """A tensor in which backward accumulates gradients."""

    def __init__(self, made: _Made | None) -> None:
        self.made = made
        self.times = 0  # backward passes
        self.fresh = 0  # of these, the ones before which it had no gradient
        self.holder: Optimizer | None = None
        self.owner: Module | None = None
        self.trained = False  # an optimizer that holds it has stepped, or its values have changed
        self.start: Tensor | None = None  # its values in the second backward, unless it is trained
        self.tensor: Tensor | None = None  # the tensor itself, unless it is trained

    def note(self, tensor: Tensor, fresh: bool) -> None:
        """Note a gradient."""
        self.times += 1
        self.fresh += fresh
        if self.start is None:
            if self.times > 1:
                self.start, self.tensor = tensor.detach().clone(), tensor
        elif not torch.equal(self.start, tensor.detach()):
            self.end()

    def end(self) -> None:
        """Note that it is trained."""
        self.trained, self.start, self.tensor = True, None, None


class Trained(Check):
    """Compares the leaves of each backward with the parameters of all optimizers."""

    name = "trained"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._made: StorageMap[_Made] = StorageMap()
        self._leaves: dict[int, tuple[weakref.ref[Tensor], _Leaf]] = {}  # by identity
        self._made_anew: dict[Caller, tuple[str, set[int]]] = {}  # parameters that a forward makes, and in which steps
        self._steps: dict[Optimizer, int] = {}
        self._without: dict[Optimizer, list[Tensor]] = {}  # parameters that never had a gradient
        self._start: dict[Optimizer, Tensor] = {}  # the values of its first parameter
        self._places: dict[Optimizer, Place] = {}
        self._higher = False  # a derivative is differentiated
        self._missing: dict[int, Tensor] = {}  # by storage: in `_without`, and never used with autograd
        self._cut: dict[Tensor, tuple[Place, set[int], Tensor]] = {}  # where, in which steps and with which values a
        # module uses one of these without autograd
        self._copies: dict[Caller, list[int]] = {}  # how often a line copies another tensor, and a tensor to itself
        self._no_grad = Place()  # where `torch.no_grad` was entered last

    def opened(self, stack: ExitStack) -> None:
        for cls in (torch.no_grad, torch.inference_mode):
            stack.callback(setattr, cls, "__enter__", cls.__enter__)
            cls.__enter__ = self._noting(cls.__enter__)  # type: ignore[method-assign]

    def _noting(self, enter: Any) -> Any:
        @functools.wraps(enter)
        def noted(region: Any) -> Any:
            self._no_grad = calling_place()
            return enter(region)

        return noted

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase in ("forward", "backward")

    def operator_ran(self, call: Call) -> None:
        if call.phase == "backward":
            self._higher = self._higher or torch.is_grad_enabled()
        elif call.phase == "forward":
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
                place = self.run.place(call) if torch.is_grad_enabled() else self._no_grad
                if parameter not in self._cut:
                    self._cut[parameter] = place, set(), parameter.detach().clone()
                self._cut[parameter][1].add(self.run.step)

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        roots = [tensors] if isinstance(tensors, Tensor) else tensors
        inputs = kwargs.get("inputs", args[4] if len(args) > 4 else None)
        if inputs is None:
            inputs = leaves_from(root.grad_fn for root in roots if isinstance(root, Tensor))
        leaves = [inputs] if isinstance(inputs, Tensor) else [*inputs]
        fresh = [tensor.grad is None for tensor in leaves]
        yield
        new: list[tuple[Tensor, _Leaf]] = []
        for tensor, is_fresh in zip(leaves, fresh, strict=True):
            if type(tensor) in (Tensor, Parameter) and not is_opaque(tensor) and tensor.grad is not None:
                leaf = self._leaf_of(tensor)
                if not leaf.trained:
                    leaf.note(tensor, is_fresh)
                    new += [(tensor, leaf)] * (leaf.holder is None)
        if new:
            holders = {id(p): o for o in (*self.run.loop.optimizers, *self.run.loop.made) for p in parameters_of(o)}
            for tensor, leaf in new:
                leaf.holder = holders.get(id(tensor))
                if leaf.holder is None:
                    self._note_lost(tensor, leaf)

    def _note_lost(self, tensor: Tensor, leaf: _Leaf) -> None:
        """Note a leaf that no optimizer holds."""
        if leaf.times == 1 and isinstance(tensor, Parameter) and leaf.made is not None and leaf.made.in_module:
            _, steps = self._made_anew.setdefault(leaf.made.caller, (self.run.names_of([tensor]), set()))
            steps.add(self.run.step)
        if leaf.times == _MIN_STEPS:
            modules = (module for root in self.run.modules.roots() for module in root.modules())
            owners = (each for each in modules if any(tensor is p for p in each.parameters(recurse=False)))
            leaf.owner = next(owners, None)
            if leaf.owner is not None and not leaf.owner.training:
                leaf.end()  # as a network that computes a loss

    def _leaf_of(self, tensor: Tensor) -> _Leaf:
        reference, leaf = self._leaves.get(id(tensor), (None, None))
        if leaf is None or reference is None or reference() is not tensor:
            leaf = _Leaf(self._made.get(tensor))
            forget = functools.partial(lambda key, _: self._leaves.pop(key, None), id(tensor))
            self._leaves[id(tensor)] = weakref.ref(tensor, forget), leaf
        return leaf

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._places[optimizer] = self.run.loop.made.get(optimizer, (0.0, calling_place()))[1]
        for p in parameters_of(optimizer):
            _, leaf = self._leaves.get(id(p), (None, None))
            if leaf is not None and not leaf.trained:
                leaf.end()
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
        leaves = [leaf for _, leaf in self._leaves.values() if leaf.tensor is not None]
        self._add_unused([leaf for leaf in leaves if leaf.holder is not None and leaf.fresh >= _MIN_UNUSED])
        if max(self._steps.values(), default=0) < _MIN_STEPS:
            return
        for caller, (name, steps) in self._made_anew.items():
            if len(steps) >= _MIN_STEPS:
                what = f"a parameter, {name}, is made in each forward, so no optimizer holds it"
                fix = "make it in __init__, before the optimizer"
                self._add("error", Cause("made in forward"), what, _place_of(caller), fix)
        lost = self._lost([leaf for leaf in leaves if leaf.holder is None and leaf.times >= _MIN_STEPS])
        for (kind, place), tensors in lost.items():
            self._add_lost(kind, place, tensors)
        missing: dict[Place, list[Tensor]] = {}
        cut: dict[Place, list[Tensor]] = {}
        for optimizer, steps in self._steps.items():
            without, place = self._without[optimizer], self._places[optimizer]
            unused = []
            for p in without if steps >= _MIN_STEPS else ():
                line, used, values = self._cut.get(p, (place, set(), p))
                if not torch.equal(values, p.detach()):
                    continue  # as of an average of another model
                if len(used) >= max(_MIN_STEPS - 1, steps // 2):
                    cut.setdefault(line, []).append(p)
                else:
                    unused.append(p)
            if not unused:
                continue
            if len(without) < sum(p.requires_grad for p in parameters_of(optimizer)):
                if not any(kind == "made later" for kind, _ in lost):
                    missing.setdefault(place, []).extend(unused)
            elif not lost and torch.equal(self._start[optimizer], without[0].detach()):
                names = self.run.names_of(unused)
                what = f"no parameter of the optimizer has a gradient in its {steps} steps: {names}"
                fix = "give the optimizer the parameters of the model that computes the loss"
                self._add("error", Cause("no gradients"), what, place, fix)
        for place, tensors in cut.items():
            what = f"the gradient of {self.run.names_of(tensors)} is missing, although an optimizer holds them"
            why = "their modules compute without autograd: torch.no_grad, torch.inference_mode, .data or .detach()"
            fix = "compute with autograd, or requires_grad_(False) for parameters that are to stay as they are"
            self._add("error", Cause("no autograd", why), what, place, fix)
        for place, tensors in missing.items():
            self._add("note", Cause("no gradient"), f"the gradient of {self.run.names_of(tensors)} is missing", place)

    def _add(self, grade: Grade, cause: Cause, what: str, place: Place, fix: str = "") -> None:
        self.found(place, grade, cause, what, fix, step=0, last=self.run.step - 1)

    def _add_unused(self, leaves: list[_Leaf]) -> None:
        """Add optimizers that never step, although their parameters have new gradients in each backward."""
        counts: dict[Optimizer, int] = {}
        for leaf in leaves if not self.run.loop.n_skipped_steps else ():
            if leaf.holder is not None:
                counts[leaf.holder] = max(leaf.times, counts.get(leaf.holder, 0))
        for optimizer, count in counts.items():
            what = f"the optimizer never steps: {count} backward passes compute gradients of its parameters"
            place = self.run.loop.made.get(optimizer, (0.0, Place()))[1]
            self._add("error", Cause("no step"), what, place, "optimizer.step() after backward")

    def _lost(self, leaves: list[_Leaf]) -> dict[tuple[str, Place], list[Tensor]]:
        """Return the leaves that an optimizer should hold, by the reason for which none does and by the line."""
        lost: dict[tuple[str, Place], list[Tensor]] = {}
        # Of optimizers that were made before the run, some may not have stepped yet.
        everything = gc.get_objects() if leaves else []
        held = [p for each in everything if issubclass(type(each), Optimizer) for p in parameters_of(each)]
        if any(type(p) not in (Tensor, Parameter) for p in held):
            return lost  # sharded: backward accumulates in other tensors than the optimizer's
        latest = max((when for when, _ in self.run.loop.made.values()), default=math.inf)
        optimizer = max(self._steps, key=self._steps.__getitem__)
        for leaf in sorted(leaves, key=lambda leaf: 0.0 if leaf.made is None else leaf.made.time):
            tensor, place = leaf.tensor, self._places[optimizer]
            if tensor is None or any(tensor is p for p in held):
                continue
            kind = "not held"
            if leaf.owner is None and self._path_to(tensor):
                kind, place = "hidden", place if leaf.made is None else _place_of(leaf.made.caller)
            elif leaf.made is not None and leaf.made.time > latest:
                kind = "made later"
            # Another tensor that is not a parameter is an input, and so is one by which a loss is differentiated.
            if isinstance(tensor, Parameter) or (kind == "hidden" and not self._higher):
                lost.setdefault((kind, place), []).append(tensor)
        return lost

    def _add_lost(self, kind: str, place: Place, tensors: list[Tensor]) -> None:
        names = self.run.names_of(tensors)
        grade: Grade = "error"
        why = "the optimizer is made without them"
        fix = "pass them to the optimizer, or requires_grad_(False) for parameters that are to stay as they are"
        if kind == "hidden":
            names = ", ".join(self._path_to(tensor) for tensor in tensors[:3])
            names += f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
            why = "model.parameters() does not return them: they are in a list, a dict or a plain attribute"
            fix = "nn.ModuleList, nn.ModuleDict, nn.ParameterList, or nn.Parameter"
        elif kind == "made later":
            made = self._made.get(tensors[0])
            why = "they are made after the optimizer" + (f", at {_place_of(made.caller)}" if made is not None else "")
            without = sum(map(len, self._without.values()))
            why += f"; it holds {without} parameters without a gradient" if without else ""
            fix = "make the optimizer after the last change of the model"
        elif self._is_part(tensors[0]):
            grade = "note"
        what = f"backward computes gradients of {names}, and no optimizer uses them"
        self._add(grade, Cause(kind, why), what, place, fix)

    def _is_part(self, tensor: Tensor) -> bool:
        """Return whether the optimizers hold the last layers of a model, as if only these are to be trained."""
        held = {id(p) for optimizer in self._steps for p in parameters_of(optimizer)}
        models = [[id(p) for p in root.parameters()] for root in self.run.modules.roots()]
        model = next((each for each in models if id(tensor) in each), [])
        last = [*itertools.dropwhile(lambda each: each not in held, model)]
        return bool(last) and held.issuperset(last)

    def _path_to(self, tensor: Tensor) -> str:
        """Return where the modules hold a tensor that `parameters` does not return; "" if they do not."""
        pending: list[tuple[str, Any]] = [(type(root).__name__, root) for root in self.run.modules.roots()]
        seen: set[int] = set()
        while pending:
            path, value = pending.pop()
            if value is tensor:
                return path
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Module):
                named = (*vars(value).items(), *value.named_children(), *value.named_parameters(recurse=False))
                pending += [(f"{path}.{name}", each) for name, each in named]
            elif isinstance(value, dict):
                pending += [(f"{path}[{key!r}]", each) for key, each in value.items()]
            elif isinstance(value, (list, tuple)):
                pending += [(f"{path}[{index}]", each) for index, each in enumerate(value)]
        return ""


def _place_of(caller: Caller) -> Place:
    return Place(*caller.line())
