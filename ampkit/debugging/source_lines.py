"""Whose code called an operator: the user's line, and whether a loss scaler or a checkpoint's recompute stands between.

One walk over the frames answers all of it. Frames are told apart by their files: torch's, ampkit's and Python's own
are libraries, everything else (transformers and its like too) is where somebody wrote the model down.
"""

from __future__ import annotations

import enum
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch

_TORCH = f"{Path(str(torch.__file__)).parent}/"
_AMPKIT = f"{Path(__file__).resolve().parents[1]}/"
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"
_SITE = (f"{sysconfig.get_paths()['purelib']}/", f"{sysconfig.get_paths()['platlib']}/")


class _File(enum.Enum):
    USER = enum.auto()
    LIBRARY = enum.auto()
    SCALER = enum.auto()        # torch.amp.GradScaler, or ampkit's
    RECOMPUTE = enum.auto()     # torch.utils.checkpoint
    BACKWARD = enum.auto()      # above it is who called backward


_SPECIAL = {
    f"{_TORCH}amp/grad_scaler.py": _File.SCALER,
    f"{_TORCH}utils/checkpoint.py": _File.RECOMPUTE,
    f"{_TORCH}autograd/graph.py": _File.BACKWARD,
}
_files: dict[str, _File] = {}


class Caller(NamedTuple):
    """Who called an operator. The line is worked out when somebody asks: most operators never come up."""

    code: CodeType | None       # None: no code of the user's is on this thread's stack
    instruction: int
    scaler: bool
    scaling: bool               # it is a loss that the scaler scales, and no gradient that it looks at
    recompute: bool
    outside: bool               # it called backward, and is not itself what backward runs

    def line(self) -> tuple[str, int]:
        """Where in the user's code: the file as seen from the working directory, and the line; ("", 0) if nowhere."""
        if self.code is None:
            return "", 0
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end and line)
        return self.code.co_filename.removeprefix(os.path.join(os.getcwd(), "")), next(lines, self.code.co_firstlineno)


def find_caller(depth: int, *, recompute: bool = False) -> Caller:
    """The innermost user frame, from `depth` frames up; with `recompute`, also whether a checkpoint runs it again."""
    frame = sys._getframe(depth)
    code, instruction = None, 0
    scaler = scaling = outside = False
    while frame is not None:
        name = frame.f_code.co_filename
        kind = _files.get(name)
        if kind is None:
            kind = _files[name] = _classify(name)
        if kind is _File.LIBRARY:
            pass
        elif kind is _File.USER:
            if code is None:
                code, instruction = frame.f_code, frame.f_lasti
            if not recompute:
                break
        elif code is None and kind is _File.SCALER:
            scaler = True
            scaling |= frame.f_code.co_name == "scale"
        elif recompute and kind is _File.RECOMPUTE:
            return Caller(code, instruction, scaler, scaling, recompute=True, outside=outside)
        elif kind is _File.BACKWARD:
            recompute = False
            if code is not None:
                break
            outside = True
        frame = frame.f_back
    return Caller(code, instruction, scaler, scaling, recompute=False, outside=outside)


def _classify(name: str) -> _File:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name.startswith(f"{_AMPKIT}scaler/"):
        return _File.SCALER
    if name.startswith((_TORCH, _AMPKIT, "<ampkit ", "<frozen", "<string>")) or "/ampkit_kernels/" in name:
        return _File.LIBRARY
    if name.startswith(_PYTHON) and not name.startswith(_SITE):
        return _File.LIBRARY
    return _File.USER
