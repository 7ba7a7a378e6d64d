"""State of each test of regions: no compiled code at the start, none left at the end. See `tests/conftest.py` too."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.nn.modules import module as hooked

from ampkit.dispatch.dynamo_guard import current_tag
from ampkit.region import module_hooks
from ampkit.region.stack import thread


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No compiled code from another test, and no region, tag, module hook or option of torch from this one."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    yield
    assert [device for device in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(device)] == []
    assert (thread.regions, module_hooks._running.modules, current_tag()) == ([], [], ())
    assert not hooked._global_forward_pre_hooks
    assert not hooked._global_forward_hooks
    assert torch.compiler.config.cache_key_tag == ""
    assert functorch_config.backward_pass_autocast == "same_as_forward"
