"""`ampkit doctor`: what it prints, and that it notices what is wrong."""

import json

import pytest
import torch

import ampkit
from ampkit import doctor
from ampkit.gradients import kernels


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


def test_versions_outside_the_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.torch_is_supported("2.11.0+cu130")
    assert doctor.torch_is_supported("2.13.0")
    assert not doctor.torch_is_supported("2.10.1")
    monkeypatch.setattr(doctor, "torch_is_supported", lambda version: False)
    assert doctor.main([]) == 1
    assert "is outside the supported range 2.11 to 2.15" in capsys.readouterr().out


def test_a_gpu_that_cannot_run_triton_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(kernels, "why_not_triton", lambda device: "too old")
    path = doctor.path_for(torch.device("cuda", 0))
    assert path.name == "Some GPU, compute capability 7.5"
    assert (path.serves, path.because) == ("PyTorch", "too old")
    assert "bfloat16" not in path.dtypes
