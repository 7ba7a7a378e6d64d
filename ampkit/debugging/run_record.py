"""`record_run`: writes small statistics of each operator of some steps, to compare two runs of one script.

A record is a file of JSON lines. The first has `kind` and `version`, and what the run was: torch, machine, rank. Each
other line is one step, with a list of its operator calls. A call has its place and a few numbers about its results, and
no tensor. The runs may differ in precision, in the version of torch, in rank or in machine.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging.detect import rank
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.report import Report, plain
from ampkit.debugging.storage_map import StorageMap
from ampkit.debugging.torch_private import OpOverload, is_opaque, storage_key
from ampkit.dtypes import dtype_name

KIND, VERSION = "ampkit.debugging.run", 1
_FIRST_STEPS = 4  # so many steps are recorded at the beginning; later those whose number is a power of two
GIVEN = "given"  # the operator's name for a tensor that no operator made: a parameter, or data


@dataclass
class RecordReport(Report):
    """What `record_run` wrote."""

    kind = "record"
    path: str = ""
    steps: int = 0
    operators: int = 0

    def __bool__(self) -> bool:
        return False  # it finds nothing

    def __str__(self) -> str:
        text = f"recorded {self.operators} operator calls of {self.steps} steps in {self.path or 'no file'}"
        return f"{text}\nthe run did not reach its end: {self.incomplete}" if self.incomplete else text


class record_run(OperatorObserver[RecordReport]):
    """Context that writes a record of a run, which `ampkit debug compare` compares with another.

    Recorded are the first four steps, and those whose number is a power of two. A step ends with `optimizer.step()`, or
    where a scaler skips it. Results and random numbers stay the same to the bit.

    Synchronizes with the device once for each recorded step.

    Args:
        path: file for the record, in an existing folder; `{rank}` in it is the rank of this process. An existing file
            is replaced.
        model: module whose submodules are named by their paths; None takes the outermost modules that run.

    Raises:
        TypeError: if `model` is no module.
        OSError: if the file cannot be written.

    Entering returns the `RecordReport`.

    Example::

        with debugging.record_run("bfloat16.jsonl"):
            train(model, loader)
    """

    def __init__(self, path: str | Path, model: Module | None = None) -> None:
        super().__init__(model, RecordReport())
        self._path = str(path)
        self._calls: list[dict[str, Any]] = []
        self._numbers: list[Tensor] = []  # for each call: see `_numbers_of`
        self._made: StorageMap[bool] = StorageMap()  # storages that an operator wrote, or that are recorded as given
        self._names: dict[int, str] = {}  # of parameters and buffers, by storage
        self._n_roots = 0  # for which they were collected

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._write()  # what ran after the last step

    @property
    def _is_recorded(self) -> bool:
        return self.step < _FIRST_STEPS or self.step & (self.step - 1) == 0

    def _observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_recorded:
            return func(*args, **kwargs)
        scale = (self.scale or 1.0) if call.phase == "backward" else 1.0
        facts = call.facts
        written = facts.written(args, kwargs)
        operands = [
            each for each in call.tensors if not facts.overwrites or not any(each is other for other in written)
        ]
        for tensor in operands if not facts.shape_only else ():
            if not self._made.get(tensor):
                self._made.set(tensor, True)
                self._add(call, [tensor], [], 1.0, GIVEN)
        size = [each for each in operands if each.is_floating_point()]
        before = torch.stack([_norm(each) for each in size]).amax() if size else torch.zeros((), dtype=torch.float64)
        result = func(*args, **kwargs)
        outputs = [each for each in facts.outputs(result, args, kwargs) if not is_opaque(each) and each.numel()]
        for tensor in outputs:
            self._made.set(tensor, True)
        if outputs and not facts.uninitialized:
            self._add(call, outputs, [before], scale, facts.name)
        return result

    @torch.no_grad()
    def _add(self, call: OperatorCall, outputs: list[Tensor], operands: list[Tensor], scale: float, op: str) -> None:
        """Add a call: its place now, its numbers when the step has ended."""
        fields = self._operation_fields(call)
        if op == GIVEN:
            fields["phase"] = "before"
        if fields["phase"] in ("before", "optimizer"):
            fields["module"] = self._name(outputs[0])
        self._calls.append(
            {
                "op": op,
                **{key: fields[key] for key in ("phase", "module", "call", "file", "line", "backward_of")},
                "dtype": dtype_name(outputs[0].dtype),
                "random": call.facts.random and op != GIVEN,
                "numel": sum(each.numel() for each in outputs),
                "scale": scale,
            }
        )
        self._numbers.append(_numbers_of(outputs, operands))

    def _name(self, tensor: Tensor) -> str:
        """The name of a parameter or a buffer; "" for data."""
        roots = self.modules.roots()
        if len(roots) != self._n_roots:
            named = (pair for root in roots for pair in (*root.named_parameters(), *root.named_buffers()))
            self._names = {storage_key(each): name for name, each in named if not is_opaque(each)}
            self._n_roots = len(roots)
        return self._names.get(storage_key(tensor), "")

    def _step_ended(self, *, skipped: bool = False) -> None:
        if self._is_recorded:
            self._write(skipped=skipped)

    def _write(self, *, skipped: bool = False) -> None:
        """Write the step as a line, with what ran since the step before."""
        if not self._calls:
            return
        if not self.report.path:
            self.report.path = self._path.replace("{rank}", str(rank() or 0))
            head = {
                "kind": KIND,
                "version": VERSION,
                "torch": str(torch.__version__),
                "machine": platform.node(),
                "rank": rank(),
            }
            Path(self.report.path).write_text(json.dumps(head) + "\n", encoding="utf-8")
        rows = torch.stack([numbers.cpu() for numbers in self._numbers]).tolist()
        for call, (norm, largest, zeros, broken, operand) in zip(self._calls, rows, strict=True):
            zeros /= call["numel"]
            call |= {"norm": norm, "largest": largest, "zeros": zeros, "nonfinite": int(broken), "operand": operand}
        line = {"step": self.step, "skipped": skipped, "calls": self._calls}
        with Path(self.report.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self.report.steps += 1
        self.report.operators += len(self._calls)
        self._calls, self._numbers = [], []


def _numbers_of(outputs: list[Tensor], operands: list[Tensor]) -> Tensor:
    """Norm, largest magnitude, number of zeros and of elements that are not finite; the largest norm of an operand."""
    norms, largest, zeros, broken = [], [], [], []
    for each in outputs:
        values = each.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        values = values.double()
        finite = torch.isfinite(values)
        values = torch.where(finite, values, 0.0)
        norms.append(values.norm())
        largest.append(values.abs().amax())
        zeros.append(values.numel() - torch.count_nonzero(values) - (~finite).sum())
        broken.append((~finite).sum())
    device = norms[0].device
    operand = operands[0].to(device) if operands else norms[0]
    parts = [torch.stack(norms).norm(), torch.stack(largest).amax(), sum(zeros), sum(broken), operand]
    return torch.stack([part.double() for part in parts])  # type: ignore[union-attr]


def _norm(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    norm = tensor.detach().double().norm()
    return torch.where(torch.isfinite(norm), norm, math.inf)
