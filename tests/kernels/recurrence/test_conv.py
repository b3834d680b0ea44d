"""The short causal convolution."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrence import conv
from kernels.recurrence.conv import causal_conv
from tests.support.closeness import nmse
from tests.support.implementations import implementations

naive, with_llvm, with_torch = implementations(conv, "naive", "with_llvm", "with_torch")

IMPLEMENTATIONS = pytest.mark.parametrize(
    "run",
    [naive.causal_conv, with_torch.causal_conv, with_llvm.causal_conv, causal_conv],
    ids=["naive", "torch", "llvm", "op"],
)
F32 = 1e-12
LENGTHS = [1, 2, 3, 4, 5, 6, 33]


def make(n_tokens: int, n_taps: int, n_batch: int = 2, channels: int = 6) -> list[torch.Tensor]:
    return [
        torch.randn(n_batch, n_tokens, channels),
        torch.randn(channels, n_taps),
        torch.randn(n_batch, n_taps - 1, channels),
    ]


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_taps", [3, 4])
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_equals_pytorchs_convolution(run, n_tokens, n_taps):
    x, weight, window = make(n_tokens, n_taps)
    y, history = run(x, weight, window)
    rows = torch.cat((window, x), 1).double().transpose(1, 2)
    sums = torch.nn.functional.conv1d(rows, weight.double().unsqueeze(1), groups=6)
    assert nmse(y, torch.nn.functional.silu(sums).transpose(1, 2)) < F32
    assert torch.equal(history, torch.cat((window, x), 1))


@IMPLEMENTATIONS
@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_with_a_bias_and_without_activation(run, n_tokens, biased, activate):
    """Also with channels that fill no vector, and a bias that is every second number."""
    x, weight, window = make(n_tokens, 3, channels=21)
    bias = torch.randn(42)[::2] if biased else None
    y, history = run(x, weight, window, bias, activate=activate)
    rows = torch.cat((window, x), 1).double().transpose(1, 2)
    added = None if bias is None else bias.double()
    sums = torch.nn.functional.conv1d(rows, weight.double().unsqueeze(1), added, groups=21)
    wanted = torch.nn.functional.silu(sums) if activate else sums
    assert nmse(y, wanted.transpose(1, 2)) < F32
    assert torch.equal(history, torch.cat((window, x), 1))


@IMPLEMENTATIONS
def test_the_last_tap_meets_the_current_token(run):
    x, window = torch.tensor([[[3.0]]]), torch.tensor([[[100.0], [20.0]]])
    y, _ = run(x, torch.tensor([[0.0, 0.5, -1.0]]), window)
    # 20 / 2 - 3 = 7, and 7 * sigmoid(7)
    assert y.item() == pytest.approx(7 / (1 + torch.tensor(-7.0).exp().item()))


@IMPLEMENTATIONS
@pytest.mark.parametrize("cut", [1, 2, 7])
def test_the_window_out_of_the_history_continues_the_sequence(run, cut):
    x, weight, window = make(8, 4)
    y, history = run(x, weight, window)
    head, _ = run(x[:, :cut], weight, window)
    tail, end = run(x[:, cut:], weight, history[:, cut : cut + 3])
    assert nmse(torch.cat((head, tail), 1), y) < F32
    assert torch.equal(end[:, -3:], x[:, -3:])


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_any_strides(run, n_tokens):
    x, weight, window = make(n_tokens, 4)
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, weight, window)]
    y, history = run(*strided)
    assert nmse(y, naive.causal_conv(x, weight, window)[0]) < F32
    assert torch.equal(history, torch.cat((window, x), 1))


@IMPLEMENTATIONS
@pytest.mark.parametrize("n_channels", [1, 16, 53])
@pytest.mark.parametrize("n_taps", [1, 4])
def test_columns_of_a_projection_and_rows_of_a_plane(run, n_channels, n_taps):
    """As a layer hands them over; what lies next to them is never touched."""
    joined = torch.full((2, 3, n_channels + 5), torch.nan)
    planes = torch.full((2, n_taps + 3, n_channels), torch.nan)
    x, window = joined[..., 2 : 2 + n_channels], planes[:, 2 : n_taps + 1]
    x.normal_(), window.normal_()
    weight = torch.randn(n_taps, n_channels).t()
    y, history = run(x, weight, window)
    law, _ = naive.causal_conv(x.double(), weight.double(), window.double())
    assert nmse(y, law) < F32
    assert torch.equal(history, torch.cat((window, x), 1))
    assert y.is_contiguous() and history.is_contiguous()


@pytest.mark.parametrize("n_tokens", [2, 9])
def test_gradients_are_those_of_the_law(n_tokens):
    inputs = [x.double().requires_grad_() for x in make(n_tokens, 4)]
    seen = torch.randn(2, n_tokens, 6).double()
    ours = torch.autograd.grad((with_torch.causal_conv(*inputs)[0] * seen).sum(), inputs)
    law = torch.autograd.grad((naive.causal_conv(*inputs)[0] * seen).sum(), inputs)
    for a, b in zip(ours, law, strict=True):
        assert nmse(a, b) < 1e-26
