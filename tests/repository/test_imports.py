"""What importing loads: a new interpreter imports the packages one after the other and reports what is loaded."""

import importlib.util
import json
from typing import Any

import pytest

import ampkit
from tests.helpers.processes import fresh_python

HEAVY = ("triton", "matplotlib", "rich", "sklearn", "transformers", "accelerate", "lightning", "timm")
ON_REQUEST = ("ampkit.debugging", "ampkit.integrations")
MOST_SECONDS = 1.5  # of processor time for `import ampkit` after torch; 0.2 s on a quiet core

QUESTIONS = """
import importlib, json, pkgutil, sys, time, traceback, warnings
import torch

def loaded(names):
    return [name for name in names if any(module == name or module.startswith(name + ".") for module in sys.modules)]

seen = {}
warnings.simplefilter("error")
import ampkit_kernels
seen["kernels"] = loaded([*HEAVY, "ampkit"])
began = time.process_time()
import ampkit
seen["seconds"] = time.process_time() - began
warnings.resetwarnings()
seen["ampkit"] = loaded([*HEAVY, *ON_REQUEST])
seen["public"] = [name for name in dir(ampkit) if not name.startswith("__")]
seen["missing"] = [name for name in dir(ampkit) if not hasattr(ampkit, name)]
with ampkit.autocast("cpu"):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
seen["region"] = loaded(["torch._dynamo"])      # it takes seconds, and whoever compiles has it anyway
seen["on request"] = loaded(ON_REQUEST)
seen["integrations"] = [name for name in dir(ampkit.integrations) if f"ampkit.integrations.{name}" not in sys.modules]
seen["failures"] = {}
for package in (ampkit_kernels, ampkit):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            if not found.name.endswith("__main__") and not found.name.startswith("ampkit.integrations."):
                importlib.import_module(found.name)
        except Exception:
            seen["failures"][found.name] = traceback.format_exc()
try:
    from kernels import get_kernel
except ImportError:
    seen["hugging face"] = False
else:
    seen["hugging face"] = "get_kernel" in vars(sys.modules["kernels"])
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a new interpreter saw."""
    code = f"HEAVY, ON_REQUEST = {HEAVY!r}, {ON_REQUEST!r}\n{QUESTIONS}"
    return json.loads(fresh_python(code).splitlines()[-1])


def test_importing_ampkit_is_light(seen: dict[str, Any]) -> None:
    """`import ampkit` is fast, loads only what all users need, and gives no warning; the kernels do not load Triton."""
    assert (seen["kernels"], seen["ampkit"], seen["region"]) == ([], [], [])
    assert seen["seconds"] < MOST_SECONDS


def test_every_public_name_is_there(seen: dict[str, Any]) -> None:
    """`dir` shows the public names and no other; packages on request are imported by asking for them."""
    assert set(seen["public"]) == set(ampkit.__all__)
    assert seen["missing"] == []
    assert seen["on request"] == list(ON_REQUEST)
    assert {"accelerate", "fabric", "lightning", "timm", "transformers"} <= set(seen["integrations"])
    assert set(ampkit.amp.__all__) & set(ampkit.__all__) == set()
    assert not hasattr(ampkit, "nothing")
    assert not hasattr(ampkit.integrations, "nothing")


def test_every_module_can_be_imported(seen: dict[str, Any]) -> None:
    """With no circle of imports, the order does not matter. Integrations import their libraries: see their tests."""
    assert not seen["failures"], "\n".join(f"{name}:\n{text}" for name, text in seen["failures"].items())
    if importlib.util.find_spec("kernels.utils") is None:  # transformers looks for that package
        assert not seen["hugging face"], "at the repository root our folder passes for Hugging Face's `kernels`"
