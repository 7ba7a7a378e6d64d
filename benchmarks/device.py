"""Whether the device still answers: after an illegal access it does not, until the process has ended."""

import torch

LOST = 3  # exit code: start again with --resume, in a fresh process


class DeviceLostError(RuntimeError):
    """The device answers no more in this process; what had been found out is on disk."""


def must_answer(device: torch.device) -> None:
    """Raise `DeviceLostError` if the device is gone. Waits for it."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(f"{device} answers no more: {str(error).splitlines()[0]}") from error
