"""Which of the two a call takes, and what is said where triton is missing."""

import subprocess
import sys

import pytest
import torch

from refimpl.kernels import language
from refimpl.kernels.language import Missing, takes
from refimpl.kernels.softmax import softmax


def test_float64_and_other_devices_are_torchs(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    assert takes(x, None)
    assert not takes(x.double())
    assert not takes(x, torch.ones(3, device="meta"))
    assert not takes(torch.ones(3, device="meta"))


def test_a_minus_sign_that_is_not_in_memory_is_seen(device: torch.device) -> None:
    """In what is given, and in the gradient of the result: kernels read memory."""
    z = torch.randn(2, 3, 5, device=device, dtype=torch.complex64)
    x, grad = z.conj().imag
    assert x.is_neg()
    assert not takes(x)
    plain = x.resolve_neg().clone().requires_grad_()
    torch.testing.assert_close(softmax(x), softmax(plain))
    found, right = (torch.autograd.grad(softmax(plain), plain, g)[0] for g in (grad, grad.resolve_neg()))
    torch.testing.assert_close(found, right)


def test_a_cpu_is_torchs_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "INTERPRETED", False)
    assert not takes(torch.ones(3))


def test_without_triton_kernels_can_be_defined_but_not_launched() -> None:
    triton = Missing()

    @triton.jit
    def kernel(x: int) -> None: ...

    with pytest.raises(ImportError, match="needs triton, which is not installed"):
        kernel[(1,)](1)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_on_a_cpu_imports_no_kernel() -> None:
    names = "refimpl.model.gpt, refimpl.optim.adam, refimpl.engine.engine"
    assert run(f"import sys, {names}; print('triton' in sys.modules, 'refimpl.kernels.language' in sys.modules)") == (
        "False False\n"
    )


def test_the_room_opens_without_triton_and_numpy() -> None:
    code = """
import importlib.util, sys
sys.modules["numpy"] = None
import torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
from refimpl.kernels.case import cases
from refimpl.kernels.rms_norm import rms_norm
print(len(list(cases())) > 0, "triton" in sys.modules, rms_norm(torch.ones(2, 4)).sum().item())
"""
    assert run(code).startswith("True False 7.9")
