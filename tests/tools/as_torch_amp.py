"""A pytest plugin that puts ampkit in torch.amp's place for other projects' precision tests, as in

    cd pytorch/test; PYTHONPATH=$AMPKIT:$AMPKIT/kernels:$AMPKIT/tests/tools pytest -p as_torch_amp test_autocast.py

with checkouts of pytorch, Lightning (`tests_pytorch/plugins/precision`) or Accelerate (`tests/test_accelerator.py`) of
the installed versions; without `-p` the same tests run with torch.amp. Compared last with torch 2.13.0 on a CPU,
Lightning 2.6.5 and Accelerate 1.15.0.dev0, these alone failed: `test_autocast_called_with_non_callable` and
`test_non_string_device`, which match torch's words of an error of the same class, and Lightning's
`test_amp_precision_default_scaler`, which gives a scaler `device=Mock()`.
"""

from typing import Any

import torch

import ampkit


class Autocast(ampkit.autocast):
    """`ampkit.autocast` with torch.amp's own operator list where no other policy is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"policy": "torch", **options})


# What a program can import from torch's public names.
torch.autocast = torch.amp.autocast = Autocast      # type: ignore[misc]
torch.amp.GradScaler = ampkit.GradScaler        # type: ignore[misc]  (pickles name torch.amp.grad_scaler's)
torch.amp.custom_fwd, torch.amp.custom_bwd = ampkit.custom_fwd, ampkit.custom_bwd
