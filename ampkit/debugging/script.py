"""The user's own training script, unchanged, under a tool: as `python script.py ARGS` would run it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ScriptStopped", "run_script"]


class ScriptStopped(BaseException):
    """A tool has seen what it wanted to see. No `Exception`, so that no handler of the script's takes it."""


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as `__main__`, with its arguments and its folder first on the path. Returns its exit code."""
    if not Path(script).is_file():
        raise FileNotFoundError(f"{script} is no file; expected the training script, then its own arguments")
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except ScriptStopped:
        return 0
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0
