"""The versions of torch that ampkit is tested with, and the error for a torch that regions do not work with."""

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
INSTALL = f"python -m pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"


def parsed(version: str) -> tuple[int, int]:
    """The major and minor number of a release or a nightly.

    >>> parsed("2.13.0a0+git1234")
    (2, 13)
    """
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def no_regions(fault: str) -> str:
    """The message of an error about a torch that regions do not work with."""
    return (
        f"ampkit's regions do not work with torch {torch.__version__}: {fault}. Supported are {SUPPORTED}; to get one: "
        f"{INSTALL}. Policies and the GradScaler need no region and work with this torch too"
    )
