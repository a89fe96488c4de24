"""The mixed loss against a token-by-token reference of the formula, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_hooks.losses import aggregate_loss, het_compute_token_on_off_policy_loss

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"off_policy_shaping": 0.1},
    {"off_policy_shaping": 0.5, "drop_negative_off_policy": True},
    {"clip_off_policy": False},
    {"clip_off_policy": False, "off_policy_shaping": 0.1, "drop_negative_off_policy": True},
)
SCALARS = (
    "pg_loss", "on_pg_loss", "off_pg_loss", "on_pg_clipfrac", "on_pg_clipfrac_lower", "off_pg_clipfrac",
    "off_pg_clipfrac_lower", "ppo_kl",
)  # fmt: skip
MATRICES = ("pg_losses", "on_pg_losses", "off_pg_losses", "importance_ratio")


@dataclass
class Case:
    """Arguments of the loss."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    exp_mask: Tensor
    low: float = 0.2
    high: float = 0.3
    off_high: float = 1.0
    bound: float = 3.0
    mode: str = "token-mean"
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Tensor]:
        return het_compute_token_on_off_policy_loss(
            self.old_log_prob,
            self.log_prob,
            self.advantages,
            self.response_mask,
            self.exp_mask,
            cliprange_low=self.low,
            cliprange_high=self.high,
            off_cliprange_high=self.off_high,
            clip_ratio_c=self.bound,
            loss_agg_mode=self.mode,  # type: ignore[arg-type]
            **self.options,
        )


def make_case(seed: int, rows: int = 3, tokens: int = 5, dtype: torch.dtype = torch.float64, **more: Any) -> Case:
    """Return random arguments with ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale: float) -> Tensor:
        return scale * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    log_prob = -random(1.0).abs()
    old = log_prob + random(0.9)
    masks = (torch.rand(2, rows, tokens, generator=generator) < torch.rand(2, rows, 1, generator=generator)).long()
    # A group of equal scores has advantage 0, which belongs to neither sign.
    advantages = random(1.0) * (torch.rand(rows, tokens, generator=generator) < 0.85)
    case = Case(old.to(dtype), log_prob.to(dtype), advantages.to(dtype), masks[0], masks[1], **more)
    case.log_prob.requires_grad_()
    return case


# -- the reference -----------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reference_token(
    case: Case, log_prob: float, old: float, advantage: float, off: bool
) -> tuple[float, float, bool, bool]:
    """Return one token's loss, its derivative by log_prob, and whether range and dual bound changed the loss.

    The branches are taken one after the other.
    """
    ratio = math.exp(log_prob - old)
    slope = ratio
    gamma = case.options.get("off_policy_shaping")
    if off and gamma is not None:
        slope = gamma * ratio / (ratio + gamma) ** 2
        ratio = ratio / (ratio + gamma)
    if off and case.options.get("drop_negative_off_policy") and advantage < 0:
        return 0.0, 0.0, False, False
    if off and not case.options.get("clip_off_policy", True):
        return -advantage * ratio, -advantage * slope, False, False
    low, high = 1 - case.low, 1 + (case.off_high if off else case.high)
    clipped = min(max(ratio, low), high)
    loss, derivative = -advantage * ratio, -advantage * slope
    beyond = -advantage * clipped > loss
    if beyond:
        loss, derivative = -advantage * clipped, 0.0
    lower = advantage < 0 and -advantage * case.bound < loss
    if lower:
        loss, derivative = -advantage * case.bound, 0.0
    return loss, derivative, beyond, lower


def reference(case: Case) -> tuple[dict[str, Any], list[list[float]]]:
    """Return all outputs of the loss as numbers, and the gradient of ``pg_loss`` by ``log_prob``."""
    rows, tokens = case.log_prob.shape
    losses = [[0.0] * tokens for _ in range(rows)]
    slopes = [[0.0] * tokens for _ in range(rows)]
    ratios = [[1.0] * tokens for _ in range(rows)]
    sides: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    parts = {side: [[0.0] * tokens for _ in range(rows)] for side in (False, True)}
    kl = []
    for b in range(rows):
        for t in range(tokens):
            if not case.response_mask[b, t]:
                continue
            new, old, a = (
                float(x[b, t].double()) for x in (case.log_prob.detach(), case.old_log_prob, case.advantages)
            )
            off = bool(case.exp_mask[b, t])
            losses[b][t], slopes[b][t], *clipping = reference_token(case, new, old, a, off)
            parts[off][b][t] = losses[b][t]
            ratios[b][t] = math.exp(new - old)
            sides[off].append((losses[b][t], *clipping))
            kl.append(old - new)
    counts = [int(row.sum()) for row in case.response_mask]
    used = [b for b in range(rows) if counts[b]]
    if case.mode == "token-mean":
        weights = [1 / max(sum(counts), 1)] * rows
    elif case.mode == "token-sum":
        weights = [1] * rows
    elif case.mode == "seq-mean-token-mean":
        weights = [1 / max(counts[b], 1) / max(len(used), 1) for b in range(rows)]
    else:
        weights = [1 / max(len(used), 1) / (tokens if case.mode.endswith("norm") else 1)] * rows if tokens else []
    values: dict[str, Any] = {
        "pg_loss": sum(weights[b] * sum(losses[b]) for b in used),
        "pg_losses": losses,
        "on_pg_losses": parts[False],
        "off_pg_losses": parts[True],
        "importance_ratio": ratios,
        "ppo_kl": mean(kl),
    }
    for name, off in (("on", False), ("off", True)):
        values[f"{name}_pg_loss"] = mean([entry[0] for entry in sides[off]])
        values[f"{name}_pg_clipfrac"] = mean([float(entry[1]) for entry in sides[off]])
        values[f"{name}_pg_clipfrac_lower"] = mean([float(entry[2]) for entry in sides[off]])
    return values, [[weights[b] * slope for slope in slopes[b]] for b in range(rows)]


def check_against_reference(case: Case, tolerance: float) -> None:
    result = case.run()
    values, gradient = reference(case)
    assert set(result) == {*SCALARS, *MATRICES}
    for name in (*SCALARS, *MATRICES):
        expected = torch.tensor(values[name], dtype=torch.float64).reshape(result[name].shape)
        torch.testing.assert_close(
            result[name].double(), expected, rtol=tolerance, atol=tolerance, msg=f"{name} differs"
        )
    (gradients,) = torch.autograd.grad(result["pg_loss"], case.log_prob)
    assert gradients.dtype == case.log_prob.dtype
    # A half-precision gradient is rounded again on its way to the log-probs.
    tolerance = max(tolerance, 2 * torch.finfo(gradients.dtype).eps)
    expected = torch.tensor(gradient, dtype=torch.float64).reshape(gradients.shape)
    torch.testing.assert_close(gradients.double(), expected, rtol=tolerance, atol=tolerance)


# -- values ------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 4),
    tokens=st.integers(0, 6),
    mode=st.sampled_from(MODES),
    options=st.sampled_from(OPTIONS),
    there=st.sampled_from(["both", "on", "off", "none"]),
)
@example(seed=0, rows=2, tokens=0, mode="seq-mean-token-sum-norm", options={}, there="both")
def test_equals_the_formula(seed: int, rows: int, tokens: int, mode: str, options: dict[str, Any], there: str) -> None:
    """A side of the loss without tokens is zero, and so is its gradient."""
    case = make_case(seed, rows, tokens, mode=mode, options=options)
    if there in ("on", "off"):
        case.exp_mask = torch.full_like(case.exp_mask, int(there == "off"))
    if there == "none":
        case.response_mask = torch.zeros_like(case.response_mask)
    check_against_reference(case, 1e-12)
    result = case.run()
    for side, other in (("on", "off"), ("off", "on")):
        if there in (other, "none"):
            (gradient,) = torch.autograd.grad(result[f"{side}_pg_loss"], case.log_prob, retain_graph=True)
            assert not gradient.any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computes_in_float32_whatever_comes_in(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(7, 8, 16, dtype, options=options)
    assert case.run()["pg_losses"].dtype == torch.float32
    check_against_reference(case, 2e-5)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
def test_masks_of_any_dtype(mask_dtype: torch.dtype) -> None:
    case = make_case(3)
    expected = case.run()["pg_loss"]
    case.response_mask, case.exp_mask = case.response_mask.to(mask_dtype), case.exp_mask.to(mask_dtype)
    assert torch.equal(case.run()["pg_loss"], expected)


def test_cliprange_stands_in_for_low_and_high() -> None:
    case = make_case(5, low=0.15, high=0.15)
    arguments = (case.old_log_prob, case.log_prob, case.advantages, case.response_mask, case.exp_mask)
    assert torch.equal(het_compute_token_on_off_policy_loss(*arguments, 0.15)["pg_loss"], case.run()["pg_loss"])


# -- masked tokens have no influence -----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), options=st.sampled_from(OPTIONS), mode=st.sampled_from(MODES))
def test_anything_may_stand_on_masked_tokens(seed: int, options: dict[str, Any], mode: str) -> None:
    case = make_case(seed, options=options, mode=mode, dtype=torch.float32)
    clean = case.run()
    (clean_gradient,) = torch.autograd.grad(clean["pg_loss"], case.log_prob)
    generator = torch.Generator().manual_seed(seed)
    poison = torch.tensor([math.inf, -math.inf, math.nan, 1e38, -1e38, 0.0])
    masked = case.response_mask == 0
    for name in ("old_log_prob", "log_prob", "advantages"):
        values = poison[torch.randint(len(poison), masked.shape, generator=generator)]
        setattr(case, name, torch.where(masked, values, getattr(case, name).detach()))
    case.exp_mask = torch.where(masked, 1 - case.exp_mask, case.exp_mask)
    case.log_prob.requires_grad_()
    result = case.run()
    for name in (*SCALARS, *MATRICES):
        assert torch.equal(result[name], clean[name]), name
    (gradient,) = torch.autograd.grad(result["pg_loss"], case.log_prob)
    assert torch.equal(gradient, clean_gradient)


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("options", [{}, {"off_policy_shaping": 0.1}], ids=str)
def test_an_overflowing_ratio_is_clipped_without_nan(off: int, options: dict[str, Any]) -> None:
    case = make_case(0, 1, 2, torch.float32, options=options)
    case.advantages = torch.tensor([[1.0, -1.0]])
    case.log_prob, case.old_log_prob = torch.tensor([[0.0, 0.0]], requires_grad=True), torch.tensor([[-500.0, -500.0]])
    case.response_mask, case.exp_mask = torch.ones(1, 2), torch.full((1, 2), off)
    result = case.run()
    shaped = bool(off and options)  # r / (r + gamma) of an infinite r is 1, inside both ranges
    upper, bound = (1.0, 1.0) if shaped else (1 + (case.off_high if off else case.high), case.bound)
    torch.testing.assert_close(result["pg_losses"].detach(), torch.tensor([[-upper, bound]]))
    (gradient,) = torch.autograd.grad(result["pg_loss"], case.log_prob)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_nan_on_a_counted_token_is_seen() -> None:
    case = make_case(2)
    case.response_mask[0, 0] = 1
    case.old_log_prob[0, 0] = math.nan
    result = case.run()
    (gradient,) = torch.autograd.grad(result["pg_loss"], case.log_prob)
    assert result["pg_loss"].isnan()
    assert gradient[0, 0].isnan()


# -- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "output", ["pg_loss", "pg_losses", "on_pg_losses", "off_pg_losses", "on_pg_loss", "off_pg_loss"]
)
def test_gradcheck(output: str, options: dict[str, Any]) -> None:
    case = make_case(21, 3, 4, options=options, mode="seq-mean-token-mean")

    def run(log_prob: Tensor) -> Tensor:
        case.log_prob = log_prob
        return case.run()[output]

    assert torch.autograd.gradcheck(run, (case.log_prob,))


def test_only_log_prob_gets_a_gradient() -> None:
    case = make_case(4)
    case.old_log_prob.requires_grad_()
    case.advantages.requires_grad_()
    result = case.run()
    torch.autograd.backward(result["pg_loss"])
    assert case.log_prob.grad is not None
    assert case.old_log_prob.grad is None
    assert case.advantages.grad is None
    assert not any(result[name].requires_grad for name in ("ppo_kl", "importance_ratio", "on_pg_clipfrac"))


def test_a_second_derivative_is_refused() -> None:
    case = make_case(4)
    (gradient,) = torch.autograd.grad(case.run()["pg_losses"].square().sum(), case.log_prob, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(gradient.sum())


def test_inputs_are_left_as_they_were() -> None:
    case = make_case(8, options={"drop_negative_off_policy": True})
    names = ("old_log_prob", "log_prob", "advantages", "response_mask", "exp_mask")
    before = {name: getattr(case, name).detach().clone() for name in names}
    torch.autograd.backward(case.run()["pg_loss"])
    assert all(torch.equal(getattr(case, name), before[name]) for name in names)


# -- how it runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [OPTIONS[0], *(pytest.param(loss_options, marks=pytest.mark.campaign) for loss_options in OPTIONS[1:3])],
    ids=str,
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.campaign)])
def test_compiles_to_one_graph(options: dict[str, Any], backend: str) -> None:
    torch.compiler.reset()
    case = make_case(31, dtype=torch.float32, options=options)
    expected = case.run()
    (expected_gradient,) = torch.autograd.grad(expected["pg_loss"], case.log_prob)

    @torch.compile(fullgraph=True, backend=backend)
    def run(log_prob: Tensor) -> dict[str, Tensor]:
        return het_compute_token_on_off_policy_loss(
            case.old_log_prob, log_prob, case.advantages, case.response_mask, case.exp_mask,
            cliprange_low=case.low, cliprange_high=case.high, **options,
        )  # fmt: skip

    result = run(case.log_prob)
    for name in (*SCALARS, *MATRICES):
        torch.testing.assert_close(result[name], expected[name])
    (gradient,) = torch.autograd.grad(result["pg_loss"], case.log_prob)
    torch.testing.assert_close(gradient, expected_gradient)


class NoHostSync(TorchDispatchMode):
    """Raises on a device-to-host copy and on a data-dependent shape."""

    FORBIDDEN = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "unique2", "is_nonzero", "equal"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        if {name, f"_{name}"} & self.FORBIDDEN:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_never_waits_for_the_device(mode: str, options: dict[str, Any]) -> None:
    case = make_case(41, mode=mode, options=options)
    with NoHostSync():
        torch.autograd.backward(case.run()["pg_loss"])
    with NoHostSync(), pytest.raises(AssertionError, match="waits for the device"):
        case.log_prob.sum().item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_cuda_equals_the_cpu(options: dict[str, Any]) -> None:
    case = make_case(51, 8, 64, torch.float32, options=options)
    expected = case.run()
    for name in ("old_log_prob", "advantages", "response_mask", "exp_mask"):
        setattr(case, name, getattr(case, name).cuda())
    case.log_prob = case.log_prob.detach().cuda().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = case.run()
        torch.autograd.backward(result["pg_loss"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in (*SCALARS, *MATRICES):
        torch.testing.assert_close(result[name].cpu(), expected[name], rtol=1e-5, atol=1e-6)


# -- against verl ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_equals_verl(mode: Any) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    case = make_case(61, 6, 9, torch.float32)
    case.response_mask[2] = 0
    losses = case.advantages * case.response_mask
    expected = core_algos.agg_loss(losses, case.response_mask.float(), mode)
    torch.testing.assert_close(aggregate_loss(losses, case.response_mask.bool(), mode), expected)
