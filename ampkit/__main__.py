"""The `ampkit` command: `ampkit debug`, `ampkit doctor`, `ampkit explain`. Also `python -m ampkit`."""

import argparse
import importlib
import os
import sys

import torch

import ampkit

# Name of the command -> (module with `main(argv) -> int | None`, its purpose). Imported when chosen.
COMMANDS = {
    "debug": ("ampkit.debugging.cli", "find the line and operator that cause NaN or lost precision in a script"),
    "doctor": ("ampkit.doctor", "report the dtypes that this machine supports, their speed, and wrong results"),
    "explain": ("ampkit.explain", "report the rule of an operator under autocast, and why"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names, with the other arguments. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="ampkit",
        description="Automatic mixed precision for PyTorch.",
        epilog="\n".join(f"  {name:10s}{purpose}" for name, (_, purpose) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions of ampkit and torch")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="command", help="one of the commands below")
    options = parser.parse_args(arguments[:1])
    if options.version:
        print(f"ampkit {ampkit.__version__}, torch {torch.__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    module, _ = COMMANDS[options.command]
    try:
        return importlib.import_module(module).main(arguments[1:]) or 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has ended; without this, flushing at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
