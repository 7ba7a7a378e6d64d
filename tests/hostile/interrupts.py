"""KeyboardInterrupt at every instruction that a call executes in some files, one at a time.

CPython runs a signal's handler between bytecodes, mostly as a call begins or when a C function returns. Here it is
raised before every single one, and at every line, call and return: more places than a real Ctrl-C can hit. Spared are
the instructions between the end of a `with lock:` and the release of that lock, where no handler ever runs: interrupted
there, any Python program keeps its lock.
"""

from __future__ import annotations

import dis
import functools
import linecache
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple


class Place(NamedTuple):
    """An event that can be interrupted."""

    function: str
    line: int
    event: str      # "call", "line", "opcode: CALL", "return", "exception"
    guarded: bool   # inside a `try` or `with` of its function

    def __str__(self) -> str:
        return f"{self.function}:{self.line} ({self.event}{'' if self.guarded else ', outside any try'})"


class Interrupter:
    """A trace function that raises at the n-th event in frames of the files it is told; n = 0 only counts."""

    def __init__(self, prefix: str, n: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.prefix = prefix
        self.n = n
        self.error = error
        self.count = 0
        self.place: Place | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.prefix):
            return None
        frame.f_trace_opcodes = True
        if _releases_a_lock(frame):
            return self
        self.count += 1
        if self.count == self.n:
            sys.settrace(None)
            self.place = _place(frame, event)
            raise self.error
        return self

    def run(self, call: Callable[[], Any]) -> BaseException | None:
        """Call, interrupted; the exception that came out."""
        found = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except BaseException as error:
            return error.with_traceback(None)
        finally:
            sys.settrace(found)
        return None


def _place(frame: FrameType, event: str) -> Place:
    at, code = frame.f_lasti, frame.f_code
    if event == "opcode":
        event = f"opcode: {dis.opname[code.co_code[at]]}"
    return Place(code.co_qualname, frame.f_lineno or 0, event, _guarded(code, at))


@functools.cache
def _guarded(code: CodeType, offset: int) -> bool:
    return any(entry.start <= offset < entry.end for entry in dis.Bytecode(code).exception_entries)


def _releases_a_lock(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    return re.match(r"\s*with [\w.]*lock:", line) is not None and not _guarded(frame.f_code, frame.f_lasti)
