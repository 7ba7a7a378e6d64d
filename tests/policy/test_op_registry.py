"""The operator lists against the running torch: its dispatcher, its headers, and what its composites reach."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy
from ampkit.policy.op_table import TORCH, Group, Rule, fold, names
from ampkit.policy.operator_keys import resolve
from ampkit.torch_internals.dispatcher import current
from tests.helpers.op_samples import Call, op_db_calls, run
from tests.tools import operator_drift
from tests.tools.composites import DECOMPOSED, OPAQUE
from tests.tools.operator_drift import (
    ONLY_WHERE_BUILT,
    Drift,
    composite_drift,
    composites,
    list_drift,
    registered,
    rule_of,
)


@pytest.mark.parametrize("device", TORCH)
def test_torch_lists_are_what_torch_amp_does(device: str) -> None:
    """Every operator that torch.amp casts, what it casts it to, and no other."""
    drift = list_drift(device)
    assert not drift.new, f"torch casts these and the list does not know: {drift.new}"
    assert not drift.gone, f"the list names these and torch does not cast them: {drift.gone}"
    assert not drift.different, f"the list and torch differ in these: {drift.different}"


# Fake tensors of MAIA do not meet autocast; its rules are those of torch's header, as another test holds.
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu", "mtia"])
def test_the_rule_of_every_operator_is_seen(device: str) -> None:
    unseen = {name for name in registered(device) if rule_of(resolve(name), device) is None}
    # Up to torch 2.12; an operator object refuses named tensors.
    named = {name for name in unseen if "name" in name.partition(".")[2].lower()}
    assert unseen - named <= set(ONLY_WHERE_BUILT)
    assert len(registered(device)) > 90


def test_differences_of_a_list_are_named() -> None:
    groups = tuple(group for group in TORCH["cpu"] if group.rule not in (Rule.LOWER, Rule.PROMOTE))
    more = (Group(Rule.LOWER, "why", "cat"), Group(Rule.KEEP, "why", "add.Tensor"), Group(Rule.PROMOTE, "why", "stack"))
    drift = list_drift("cpu", (*groups, *more))
    assert drift.different == {"cat": (Rule.LOWER, Rule.PROMOTE)}
    assert drift.gone == {"add.Tensor": Rule.KEEP}
    assert drift.new["linalg_vecdot"] is Rule.LOWER
    assert drift.new["index_copy"] is Rule.PROMOTE
    assert "stack" not in drift.new


def test_the_command_names_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drift = Drift({"mm": Rule.LOWER, "mv": None}, {"cholesky": Rule.FLOAT32}, {"exp": (Rule.LOWER, Rule.FLOAT32)})
    monkeypatch.setattr(operator_drift, "list_drift", lambda device: drift if device == "cuda" else Drift())
    monkeypatch.setattr(operator_drift, "composite_drift", lambda: (["unheard_of"], ["qr"]))
    assert operator_drift.main() == 1
    assert """
cuda          differs
  new        mm: torch LOWER
  new        mv: torch has a rule that could not be observed
  gone       cholesky: listed as FLOAT32
  different  exp: listed as LOWER, torch FLOAT32
mps           as listed
""" in (text := capsys.readouterr().out)
    assert text.endswith("composites    differ\n  new        unheard_of\n  gone       qr\n")
    monkeypatch.setattr(operator_drift, "list_drift", lambda device: Drift())
    monkeypatch.setattr(operator_drift, "composite_drift", lambda: ([], []))
    assert operator_drift.main() == 0


def test_looking_leaves_nothing_behind() -> None:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    assert rule_of(torch.ops.aten.exp.default, "cuda") is Rule.FLOAT32
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == before
    assert current() is None


def test_every_device_type_with_autocast_has_a_list() -> None:
    for name in ("cpu", "cuda", "hip", "ipu", "xpu", "mps", "hpu", "xla", "mtia", "maia", "meta", "vulkan", "lazy"):
        assert torch.amp.is_autocast_available(name) <= (name in TORCH or name == "hip"), name
    assert all(map(torch.amp.is_autocast_available, TORCH))


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
    apart |= {f"aten::{name}" for name in ONLY_WHERE_BUILT}
    assert {name: rule for name, rule in listed.items() if name not in apart} == wanted
    assert listed["aten::binary_cross_entropy"] is Rule.BANNED


def test_every_composite_is_classified_once() -> None:
    new, gone = composite_drift()
    counts = Counter(name for group in (*OPAQUE, *DECOMPOSED) for name in names(group))
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert not new, f"new composites; decide whether a list should name them, then classify them: {new}"
    assert not gone, f"not composites of this torch: {gone}"
    assert not twice, f"classified twice: {twice}"
    assert len(composites()) > 700


def test_a_new_composite_fails_by_name() -> None:
    library = torch.library.Library("aten", "FRAGMENT")
    try:
        library.define("ampkit_unheard_of(Tensor x) -> Tensor")
        library.impl("ampkit_unheard_of", lambda x: x @ x, "CompositeImplicitAutograd")
        with pytest.raises(AssertionError, match=r"new composites.*\['ampkit_unheard_of'\]"):
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


COMPOSITES = {f"aten::{name}" for name in composites()}
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
