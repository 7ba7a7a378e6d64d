"""Check that the device still works: after an illegal access it does not until the process ends."""

import torch

LOST = 3  # exit code: start again with --resume in a new process


class DeviceLostError(RuntimeError):
    """The device no longer works in this process; results so far are on disk."""


def must_answer(device: torch.device) -> None:
    """Raise `DeviceLostError` if the device no longer works. Synchronizes."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(f"{device} does not respond: {str(error).splitlines()[0]}") from error
