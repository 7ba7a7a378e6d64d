"""A process that has torch and ampkit imported, and forks for each command `ampkit debug`, to save the imports.

Each line of stdin is a JSON list: working directory, file for what is printed, processor seconds, arguments.
Each line of stdout is the exit code and the processor time of the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import signal
import sys

import torch


def main() -> None:
    """Serve until stdin ends. The first line of stdout is the file of the ampkit that was imported."""
    sys.path.pop(0)  # this file's folder
    warm_up()
    import ampkit.debugging.cli

    print(json.dumps(ampkit.__file__), flush=True)

    for line in sys.stdin:
        folder, log, seconds, arguments = json.loads(line)
        before = os.times()
        child = os.fork()
        if child == 0:
            _run(folder, log, seconds, arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        print(json.dumps([code, round(used, 2)]), flush=True)


def warm_up() -> None:
    """Import what programs import, and what torch imports as it trains, once for all children."""
    layer = torch.nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 2)))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = kind(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for (batch,) in loader:
            with torch.autocast("cpu"):
                loss = layer(batch).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def _run(folder: str, log: str, seconds: int, arguments: list[str]) -> None:
    """Become the command; ends the process."""
    code = 3
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(0)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.argv = ["ampkit", *arguments]
        runpy.run_module("ampkit", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the scorer was interrupted
        main()
