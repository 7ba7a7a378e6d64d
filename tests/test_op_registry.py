"""The operator lists against the running torch: its dispatcher, its headers, and what its composites reach."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from op_samples import Call, op_db_calls, run
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy
from ampkit.policy.op_table import DECOMPOSED, OPAQUE, TORCH, Rule, fold, resolve

KEYS = {device: device.upper() for device in TORCH} | {"privateuseone": "PrivateUse1"}
# Registered by the code of a library that this build of torch may lack.
ONLY_WHERE_BUILT = {"aten::_cudnn_rnn": "cuDNN", "aten::miopen_rnn": "MIOpen"}


@pytest.mark.parametrize("device", TORCH)
def test_torch_lists_are_what_the_dispatcher_has(device: str) -> None:
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("Autocast" + KEYS[device]))
    registered = {name for name in registered if name.startswith("aten::")}
    listed = {op.name() for op in fold(TORCH[device])}
    unknown, stale = sorted(registered - listed), sorted(listed - registered - set(ONLY_WHERE_BUILT))
    assert not unknown, f"torch casts these and the list does not know: {unknown}"
    assert not stale, f"the list names these and torch does not cast them: {stale}"


def test_every_device_type_with_autocast_has_a_list() -> None:
    known = [name for name in KEYS if torch.amp.is_autocast_available(name)]
    assert set(known) == set(TORCH)
    for name in ("cpu", "cuda", "hip", "ipu", "xpu", "mps", "hpu", "xla", "mtia", "maia", "meta", "vulkan", "lazy"):
        assert torch.amp.is_autocast_available(name) <= (name in TORCH or name == "hip"), name


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": Rule.LOWER,
    "AT_FORALL_FP32": Rule.FLOAT32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Rule.FLOAT32_DTYPE_ARG,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": Rule.FLOAT32_DTYPE_ARG,
    "AT_FORALL_PROMOTE": Rule.PROMOTE,
}


def rules_in_header(text: str) -> dict[str, Rule]:
    """The rule of every operator that torch's autocast header lists for accelerators, by name."""
    found = {}
    for macro, body in re.findall(r"#define (AT_FORALL_\w+)\(_\)((?:.*\\\n)*.*\n)", text):
        if macro == "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE":
            names = re.findall(r'"([\w.]+)"', body)
        else:
            names = [".".join(filter(None, pair)) for pair in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)]
        for name in names:
            found[f"aten::{name}"] = MACROS[macro]
    return found


@pytest.mark.parametrize("device", ["cuda", "xpu", "mtia", "maia"])
def test_accelerator_rules_are_those_of_torch_s_header(device: str) -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch was installed without its headers")
    wanted = rules_in_header(header.read_text())
    assert len(wanted) > 100
    listed = {op.name(): rule for op, rule in fold(TORCH[device]).items()}
    apart = {
        "aten::binary_cross_entropy", "aten::cudnn_convolution", "aten::cudnn_convolution_transpose",
        "aten::linalg_matrix_sqrth",
    }
    assert {name: rule for name, rule in listed.items() if name not in apart | set(ONLY_WHERE_BUILT)} == wanted
    assert listed["aten::binary_cross_entropy"] is Rule.BANNED


def composites() -> set[str]:
    """Names of ATen's operators with a CompositeImplicitAutograd kernel."""
    every = torch._C._dispatch_get_all_op_names()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in every if name.startswith("aten::") and has(name, "CompositeImplicitAutograd")}


def classified() -> dict[str, int]:
    """How often each composite is named by OPAQUE and DECOMPOSED together, for the running torch."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    counts: dict[str, int] = {}
    for group in (*OPAQUE, *DECOMPOSED):
        if group.since <= version < group.until:
            for name in group.ops.split():
                counts[f"aten::{name}"] = counts.get(f"aten::{name}", 0) + 1
    return counts


# Defined by torch.distributed's remote procedure calls, which some builds leave out.
ONLY_WITH_RPC = {"aten::get_gradients"}


def test_every_composite_is_classified_once() -> None:
    counts, live = classified(), composites()
    new, gone = sorted(live - set(counts)), sorted(set(counts) - live - ONLY_WITH_RPC)
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert not new, f"new composites; decide whether a list should name them, then classify them: {new}"
    assert not gone, f"not composites of this torch: {gone}"
    assert not twice, f"classified twice: {twice}"
    assert len(live) > 700


def test_a_new_composite_fails_by_name() -> None:
    library = torch.library.Library("aten", "FRAGMENT")
    try:
        library.define("ampkit_unheard_of(Tensor x) -> Tensor")
        library.impl("ampkit_unheard_of", lambda x: x @ x, "CompositeImplicitAutograd")
        with pytest.raises(AssertionError, match=r"new composites.*\['aten::ampkit_unheard_of'\]"):
            test_every_composite_is_classified_once()
    finally:
        library._destroy()
    test_every_composite_is_classified_once()


class Walk(TorchDispatchMode):
    """Runs composites operator by operator, however deep, and notes which listed operators each one reaches.

    In inference mode a dispatch mode meets composites whole. `reached` gets an entry for every composite that ran to
    its end; `outer` holds those that are running.
    """

    def __init__(
        self, listed: set[OpOverload], reached: dict[str, set[str]], outer: tuple[set[str], ...] = ()
    ) -> None:
        super().__init__()
        self.listed, self.reached, self.outer = listed, reached, outer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.listed:
            for names in self.outer:
                names.add(func.name())
        if func.namespace != "aten" or func.name() not in COMPOSITES:
            return func(*args, **kwargs)
        names: set[str] = set()
        with Walk(self.listed, self.reached, (*self.outer, names)):
            result = func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        self.reached.setdefault(func.name(), set()).update(names)
        return result


COMPOSITES = composites()
MADE_UP = {"Tensor": torch.ones(2, 2), "number": 1, "int": 0, "float": 1.0, "bool": False, "ScalarType": torch.float64}


def made_up_arguments(op: OpOverload) -> list[Any]:
    """A first guess at arguments for any operator; those with a default are left out."""
    args = []
    for arg in op._schema.arguments:
        if arg.has_default_value():
            break
        kind = str(arg.type)
        if kind.startswith("List["):
            args.append([MADE_UP.get(kind[5:-1], 0)] * 2)
        else:
            args.append(MADE_UP.get(kind, MADE_UP["Tensor"]))
    return args


@pytest.mark.filterwarnings("ignore")       # the samples call deprecated operators on purpose
def test_opaque_composites_reach_nothing_that_a_list_names() -> None:
    pytest.importorskip("expecttest", reason="torch's operator database imports it; it is in ampkit[dev]")
    listed = {op for device in TORCH for op in Policy.default(device).rules()}
    reached: dict[str, set[str]] = {}
    opaque = {f"aten::{name}" for group in OPAQUE for name in group.ops.split()} & COMPOSITES
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for call in op_db_calls(dtype, limit=3):
                run(call, Walk(listed, reached))
        for op in map(resolve, sorted(opaque - set(reached))):
            run(Call(op.name(), op, tuple(made_up_arguments(op)), {}), Walk(listed, reached))
    wrong = {name: names for name, names in reached.items() if name in opaque and names}
    assert not wrong
    assert len(opaque & set(reached)) > 200, "the walk is blind"
    assert reached["aten::hstack"] == {"aten::cat"}, "the walk is blind"
    assert "aten::log_softmax.int" in reached["aten::cross_entropy_loss"], "the walk is blind"


def test_in_place_and_out_overloads_are_never_listed() -> None:
    for device in TORCH:
        for op in Policy.default(device).rules():
            assert not op._schema.is_mutable, op


def test_dtype_arguments_are_there_to_be_set() -> None:
    for device in TORCH:
        for op, rule in Policy.default(device).rules().items():
            if rule is Rule.FLOAT32_DTYPE_ARG:
                overloads = [getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()]
                assert any(arg.name == "dtype" for one in overloads for arg in one._schema.arguments), op
