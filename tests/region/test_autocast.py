"""`autocast`: its arguments, defaults, errors and warnings."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ampkit import Policy, Rule, autocast
from ampkit.region.arguments import emulates_bfloat16
from tests.helpers.processes import fresh_python
from tests.helpers.regions import BF16, FP16, FP32, FP64, both, like_torch, on_fake_cuda, product


@both
@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        (1, ValueError, "device_type.*int"),
        (torch.device("cpu"), ValueError, "device_type.*device"),
        ("cpu:x", RuntimeError, "(?i)device string|expected one of"),
        ("meta", RuntimeError, "has no autocast|unsupported"),
    ],
    ids=str,
)
def test_devices_that_are_refused(region, device, error, message):
    """Whether a dtype is given or not."""
    for dtype in (None, BF16):
        with pytest.raises(error, match=message):
            region(device, dtype)


@both
def test_dtypes_and_devices(region):
    """The defaults are bfloat16 on the CPU and float16 on CUDA; a device may have an index."""
    with region("cpu") as made:
        assert made.fast_dtype is torch.get_autocast_dtype("cpu") is product() is BF16
    with region("cpu", FP16):
        assert product() is FP16
    with region("cpu:0"):
        assert product() is BF16
    assert region("cuda", enabled=False).fast_dtype is FP16
    with region("cuda:0"):
        assert torch.is_autocast_enabled("cuda")
    with FakeTensorMode(), autocast("cuda:0"):
        assert product(device="cuda") is FP16
    made = region("cpu", FP16, False, False)  # in torch's order
    with made:
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FP16
        assert not torch.is_autocast_cache_enabled()


@both
@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", FP32, "(?i)disabl"),
        ("cpu", torch.int32, "(?i)disabl"),
        pytest.param(
            "cuda",
            None,
            "CUDA is not available",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA"),
        ),
    ],
)
def test_a_device_or_dtype_that_is_not_available_disables(region, device, dtype, message):
    """A UserWarning at the caller, and the region is disabled; silent with enabled=False."""
    with pytest.warns(UserWarning, match=message) as caught:
        made = region(device, dtype)
    assert caught[0].filename == __file__
    with made:
        assert not torch.is_autocast_enabled(device)
        assert product() is FP32
    region("cuda", enabled=False)


@both
def test_cuda_without_bfloat16(region, monkeypatch):
    """A RuntimeError. The device is made up; the check is real."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old one")
    with pytest.raises(RuntimeError, match=r"bfloat16.*float16"):
        region("cuda", BF16)
    assert region("cuda", BF16, enabled=False).fast_dtype is BF16


def test_cuda_that_emulates_bfloat16_is_warned_of_once(monkeypatch):
    """As a T4 or V100 does: torch counts that as support, and a step takes many times as long."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert emulates_bfloat16()
    with pytest.warns(UserWarning, match=r"Tesla T4 .*emulates.*torch\.float16.*GradScaler") as caught:
        made = [autocast("cuda", BF16) for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert made[1].fast_dtype is BF16
    autocast("cuda", FP16)


def test_cuda_region_in_float64():
    """Products are float64, the float32 list stays float32; atan2 works where torch.amp raises."""
    half = {"dtype": FP16, "device": "cuda"}
    for dtype in (FP32, FP64):
        assert on_fake_cuda(lambda: product(FP16, "cuda"), dtype) is dtype
    assert on_fake_cuda(lambda: torch.exp(torch.ones(2, **half)), FP64) is FP32
    with pytest.raises(AssertionError, match=r"ampkit gives torch\.float16") as caught:
        on_fake_cuda(lambda: torch.atan2(torch.ones(2, **half), torch.ones(2, **half)), FP64)
    assert "in at::autocast::prioritize" in str(caught.value.__cause__)


def test_dtypes_and_policies_by_name_are_the_objects():
    """A named policy is one object, so that entering such a region again finds the mode that it had."""
    named, plain = autocast("cpu", "float16", policy="torch"), autocast("cpu", FP16, policy=Policy.torch("cpu"))
    assert (named.fast_dtype, named.spec.policy, repr(named)) == (plain.fast_dtype, plain.spec.policy, repr(plain))
    assert named.spec.policy is autocast("cpu", policy="torch").spec.policy
    assert (
        torch.compile(lambda x: autocast("cpu", "float16", policy="torch")(lambda x: x @ x)(x), backend="eager")(
            torch.ones(2, 2)
        ).dtype
        is FP16
    )
    assert repr(autocast("cpu", FP16)) == "autocast('cpu', torch.float16, enabled=True)"
    assert repr(like_torch()).endswith(", policy=Policy.torch('cpu'))")


def test_no_arguments_mean_this_machine():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = "cpu" if accelerator is None else accelerator.type
    with autocast() as region:
        assert region.device == expected
        assert torch.is_autocast_enabled(expected)
    assert not torch.is_autocast_enabled(expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device_type": "meta"}, RuntimeError, "'meta' has no autocast in torch; expected one such as"),
        ({"enabled": 1}, TypeError, "enabled is 1; expected True or False"),
        ({"cache_enabled": "no"}, TypeError, "cache_enabled is 'no'; expected True or False"),
        ({"dtype": 16}, TypeError, "dtype is 16; expected a torch.dtype such as torch.bfloat16, one of 'bfloat16'"),
        ({"dtype": "half"}, ValueError, "dtype is 'half'; .* one of 'bfloat16', 'float16' and 'float32', or None"),
        ({"policy": 1}, TypeError, r"policy is 1; expected a Policy for 'cpu', such as Policy.default"),
        ({"policy": "apex"}, ValueError, r"policy is 'apex'; expected a Policy for 'cpu', .* 'default' or 'torch'"),
        ({"policy": Policy.torch("cuda")}, TypeError, r"policy is Policy.torch\('cuda'\); expected a Policy for 'cpu'"),
        ({"device_type": "ipu"}, RuntimeError, "'ipu' has no autocast in torch; expected one such as"),
        ({"policy": {"aten::gelu": "float32"}}, TypeError, r"\. A policy is made of rules by Policy.default"),
        ({"policy": Rule.KEEP}, TypeError, r"policy is <Rule\.KEEP.* made of rules by Policy"),
        ({"device_type": True}, ValueError, r"is True of type bool; .* Pass enabled by keyword: auto"),
        ({"device_type": BF16}, ValueError, r"The dtype is the second argument: autocast\('cuda', torch\.bfloat16\)"),
        ({"device_type": "bf16"}, RuntimeError, r"is 'bf16', which .*\. The dtype is the second argument: auto"),
        (
            {"device_type": "gpu"},
            RuntimeError,
            r"'gpu', which is not a device string; .* one such as 'cuda', .* 'cpu'$",
        ),
        (
            {"device_type": torch.device("cpu")},
            ValueError,
            r"expected a string such as 'cuda'\. Pass the type .*: 'cpu'",
        ),
        (
            {"device_type": Policy.torch("cpu")},
            ValueError,
            r"Pass the policy by keyword: autocast\('cpu', policy=policy\)",
        ),
        ({"device_type": 1}, ValueError, r"device_type is 1 of type int; expected a string such as 'cuda'$"),
    ],
)
def test_arguments_of_the_wrong_type(arguments, error, message):
    """torch finds a flag of another type on entering, ampkit at once."""
    with pytest.raises(error, match=message):
        autocast(**{"device_type": "cpu"} | arguments)


def test_a_decorator_without_parentheses():
    with pytest.raises(ValueError, match=r"device_type is <function .* A decorator needs its arguments: @autocast\("):

        @autocast
        def function():
            pass


def test_float8_is_no_dtype_of_a_region():
    with pytest.warns(UserWarning, match=r"not torch\.float8_e4m3fn: it .* Select 8-bit formats .*with_rules"):
        assert not autocast("cpu", torch.float8_e4m3fn).spec.enabled
    with pytest.warns(UserWarning, match=r"not torch\.int8: it is disabled\. To compute in float32, decorate"):
        autocast("cpu", torch.int8)


@pytest.mark.parametrize("when", ["before the import", "after a region"])
def test_a_backend_with_a_name_of_its_own(when):
    """Ascend's, Gaudi's and others' come as `privateuseone` and are renamed, once, at any time."""
    rename = """
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("torch.npu")
module.get_amp_supported_dtype = lambda: [torch.float16]
module.is_initialized, module.current_device = lambda: True, lambda: 0
torch._register_device_module("npu", module)
library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
library.fallback(torch.library.fallthrough_kernel)
"""
    use = """
from ampkit import Policy, autocast
with autocast("cpu"):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
Policy.default("privateuseone")
"""
    check = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x = torch.empty(2, 2, device="npu")
    for device in ("npu", "npu:0", "privateuseone"):
        for policy in (None, Policy.default("npu"), Policy.torch(device) if device == "npu" else "default"):
            with autocast(device, torch.float16, policy=policy):
                print(torch.mm(x, x).dtype, torch.is_autocast_enabled("npu"))
assert Policy.default("privateuseone") == Policy.default("npu")
"""
    code = "import torch, types" + (rename + use if when == "before the import" else use + rename) + check
    lines = fresh_python(code).splitlines()
    assert lines == [*["torch.float16 True"] * 2, "torch.float32 True", *["torch.float16 True"] * 6]


def test_custom_backends(monkeypatch):
    """Without its dtypes torch raises an AssertionError, ampkit a RuntimeError as for any device one cannot have."""
    with pytest.raises(AssertionError):
        torch.autocast("privateuseone")
    with pytest.raises(RuntimeError, match=r"'privateuseone'.*get_amp_supported_dtype.*_register_device_module"):
        autocast("privateuseone")
    module = type("backend", (), {"get_amp_supported_dtype": staticmethod(lambda: [FP16])})
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    with autocast("privateuseone", FP16):
        assert torch.is_autocast_enabled("privateuseone")
    with pytest.warns(UserWarning, match="autocast for privateuseone supports torch.float16, not torch.bfloat16"):
        autocast("privateuseone", BF16)
