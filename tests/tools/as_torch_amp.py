"""A pytest plugin that puts ampkit in torch.amp's place, for `tests.tools.other_suites`."""

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
