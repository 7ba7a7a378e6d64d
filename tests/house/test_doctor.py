"""`ampkit doctor`: what it prints, and that it notices what is wrong."""

import json

import pytest
import torch

import ampkit
from ampkit import doctor, operator_drift
from ampkit.gradients import kernels
from ampkit.operator_drift import Drift
from ampkit.policy.op_table import TORCH, Rule
from ampkit.torch_internals import lookup, self_check


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main([])
    text = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in text
    assert f"ampkit        {ampkit.__version__}" in text
    assert "kernels  PyTorch: CPU tensors take PyTorch's own operators" in text
    for operation in doctor.CHECKS:
        assert operation in text
    assert code == 0
    assert text.endswith("all well\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"]
    assert report["versions"]["torch"] == torch.__version__
    assert {check["operation"] for check in report["checks"]} == set(doctor.CHECKS)


def test_a_wrong_result_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "unscale_", lambda grads, inv_scale, found_inf: None)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "FAIL     unscale: differs from float64 by" in text
    assert "ok       norm" in text
    assert "something is wrong" in text


def test_an_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(kernels, "multiply_", broken)
    found = {check.operation: check for check in doctor.check(torch.device("cpu"))}
    assert found["multiply"].detail == "RuntimeError: no kernel image"
    assert found["norm"].ok


INSTALL = "to get a supported one: python -m pip install 'torch>=2.11,<2.16'"


def test_a_torch_that_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main([])
    text = capsys.readouterr().out
    assert f"torch: {torch.__version__}; supported are torch 2.11 to 2.15\n  ok       regions\n" in text
    assert "to get a supported one" not in text


def test_the_self_check_decides_for_a_newer_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2.99.0"})
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "torch: 2.99.0; supported are torch 2.11 to 2.15; this one is newer, and nobody has tried it" in text
    assert INSTALL in text
    monkeypatch.setattr(self_check, "_tried", lambda: "what the region casts is not differentiated")
    assert doctor.main([]) == 1
    assert "FAIL     regions: what the region casts is not differentiated" in capsys.readouterr().out


def test_an_old_torch_is_not_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2.10.1"})
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "; this one is too old" in text
    assert INSTALL in text


def test_a_missing_name_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lookup, "missing", ["torch._C._gone"])
    monkeypatch.setattr(self_check, "missing", ["torch._C._gone"])
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "it has no torch._C._gone." in report["torch"]["regions"]
    assert report["torch"]["install"] == "python -m pip install 'torch>=2.11,<2.16'"


def test_operators_says_that_lists_and_torch_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--operators"]) == 0
    text = capsys.readouterr().out
    for device in TORCH:
        assert f"{device:14s}as listed\n" in text
    assert "composites    as classified\n" in text


def test_operators_names_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drift = Drift({"mm": Rule.LOWER, "mv": None}, {"cholesky": Rule.FLOAT32}, {"exp": (Rule.LOWER, Rule.FLOAT32)})
    monkeypatch.setattr(operator_drift, "list_drift", lambda device: drift if device == "cuda" else Drift())
    monkeypatch.setattr(operator_drift, "composite_drift", lambda: (["unheard_of"], ["qr"]))
    assert doctor.main(["--operators"]) == 1
    text = capsys.readouterr().out
    assert """
cuda          differs
  new        mm: torch LOWER
  new        mv: torch has a rule that could not be observed
  gone       cholesky: listed as FLOAT32
  different  exp: listed as LOWER, torch FLOAT32
mps           as listed
""" in text
    assert "composites    differ\n  new        unheard_of\n  gone       qr\n" in text
    assert text.endswith("the lists are not those of this torch: see above\n")
    assert doctor.main(["--operators", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["lists"]["cuda"]["different"] == {"exp": ["LOWER", "FLOAT32"]}
    assert report["composites"] == {"new": ["unheard_of"], "gone": ["qr"]}
    assert not report["agree"]


def test_a_gpu_that_cannot_run_triton_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(kernels, "why_not_triton", lambda device: "too old")
    path = doctor.path_for(torch.device("cuda", 0))
    assert path.name == "Some GPU, compute capability 7.5"
    assert (path.serves, path.because) == ("PyTorch", "too old")
    assert "bfloat16" not in path.dtypes
