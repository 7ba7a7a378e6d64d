"""An exception at every place of a call where CPython can run a signal's handler, one at a time.

That is as a Python function begins, after a call returns, and as a loop goes back. Generator expressions are spared:
what is raised while one is closed Python swallows.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupter:
    """A trace function that raises at the n-th place in frames of files with a prefix; n = 0 only counts."""

    def __init__(self, prefix: str, n: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.prefix = prefix
        self.n = n
        self.error = error
        self.count = 0
        self.place = ""         # "function:line, beginning" or "function:line, after a call"
        self._last: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.prefix) or frame.f_code.co_name == "<genexpr>":
            return None
        frame.f_trace_opcodes = True
        if event == "call":
            self._reach(frame, "beginning")
        elif event == "opcode":
            before = self._last.get(frame, "")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(("CALL", "JUMP_BACKWARD")):
                self._reach(frame, "after a call")
        elif event == "return":
            self._last.pop(frame, None)
        return self

    def _reach(self, frame: FrameType, where: str) -> None:
        self.count += 1
        if self.count == self.n:
            sys.settrace(None)
            self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}, {where}"
            raise self.error

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
            self._last.clear()
        return None
