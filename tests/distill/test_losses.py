"""Losses against worked numbers, a plain reference in float64, and themselves at other chunk sizes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distill.acceptance import acceptance, summarise_target
from distill.loss_reference import divergence
from distill.loss_topk import top_k
from distill.loss_weights import num_selected, select, survival_weights
from distill.losses import IGNORE, LOSSES, LossError, check_losses, chunked_loss
from distill.rows import draw_rows
from engine.pack import cpu_has_bf16
from engine.warp import Warp

TOY_P = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
TOY_Q = torch.tensor([[0.1, 0.3, 0.6]], dtype=torch.float64).log()


def make_case(
    positions: int = 50, rows: int = 37, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Hidden states and heads of a draft of width 6 and a target of width 5."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden_draft": normal(positions, 6).requires_grad_(),
        "weight_draft": normal(rows, 6).requires_grad_(),
        "hidden_target": normal(positions, 5),
        "weight_target": normal(rows, 5),
        "labels": torch.randint(rows, (positions,), generator=generator),
    }


def plain_loss(
    case: dict[str, Tensor],
    weights: dict[str, float],
    denominator: float,
    temperature: float = 1.0,
    beta: float = 0.5,
    softcaps: tuple[float | None, float | None] = (None, None),
    shift: Tensor | None = None,
) -> Tensor:
    """What `chunked_loss` must equal: whole logits, autograd, the readable divergences."""
    keep = case["labels"] != IGNORE
    y = case["hidden_target"][keep] @ case["weight_target"].T
    z = case["hidden_draft"][keep] @ case["weight_draft"].T
    y, z = (x if cap is None else cap * torch.tanh(x / cap) for x, cap in zip((y, z), softcaps))
    total = torch.zeros((), dtype=z.dtype)
    for name, weight in weights.items():
        # The shift belongs to the softmax, after the temperature and beside the argmax.
        if name == "cross_entropy":
            shifted = z if shift is None else z + shift
            total = total + weight * torch.nn.functional.cross_entropy(shifted, y.argmax(-1), reduction="sum")
            continue
        offset = 0 if shift is None else shift * temperature
        total = total + weight * divergence(name, y + offset, z + offset, temperature, beta).sum()
    return total / denominator


def gradients(loss: Tensor, case: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [case["hidden_draft"], case["weight_draft"]]))


def test_t24_worked_values_of_the_divergences():
    """The paper's weights: beta on the target's side, in the mixture and before KL(p || m)."""
    assert divergence("forward_kl", TOY_P, TOY_Q).item() == pytest.approx(1.10187, abs=1e-5)
    assert divergence("reverse_kl", TOY_P, TOY_Q).item() == pytest.approx(1.00210, abs=1e-5)
    for beta, value in {0.1: 0.09267, 0.5: 0.23065, 0.9: 0.08650, 0.001: 0.00110}.items():
        assert divergence("jsd", TOY_P, TOY_Q, beta=beta).item() == pytest.approx(value, abs=1e-5)
    assert divergence("tv", TOY_P, TOY_Q).item() == pytest.approx(0.6)
    assert divergence("neg_log_alpha", TOY_P, TOY_Q).item() == pytest.approx(-torch.tensor(0.4).log().item())
    # p > q at tokens 0 only, where q has .1: TV / sqrt(.1 * .9) = .6 / .3.
    assert divergence("tv_pp", TOY_P, TOY_Q).item() == pytest.approx(2.0)
    # alpha .4: w = exp(-3 * .4) = .30119; .30119 * 1.10187 + .69881 * .6.
    assert divergence("kl_tv", TOY_P, TOY_Q).item() == pytest.approx(0.75115, abs=1e-5)
    assert divergence("kl_tv", TOY_P, TOY_Q, eta=0.0).item() == pytest.approx(1.10187, abs=1e-5)
    assert divergence("cross_entropy", TOY_P, TOY_Q).item() == pytest.approx(-torch.tensor(0.1).log().item())


def test_t24_ends_of_beta_are_refused_and_near_ends_said_aloud(caplog):
    for beta in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(LossError, match="forward_kl or reverse_kl"):
            divergence("jsd", TOY_P, TOY_Q, beta=beta)
    with caplog.at_level(logging.WARNING):
        check_losses({"jsd": 1.0}, beta=0.5)
        assert not caplog.records
        check_losses({"jsd": 1.0}, beta=0.001)
    assert "0.001" in caplog.text and "forward_kl" in caplog.text


@pytest.mark.parametrize("name", LOSSES)
def test_t25_impossible_tokens_change_nothing(name):
    generator = torch.Generator().manual_seed(3)
    y, z = (torch.randn(4, 10, generator=generator) for _ in range(2))
    padded = []
    for logits in (y, z):
        wide = torch.full((4, 1000), -torch.inf)
        wide[:, :10] = logits
        padded.append(wide.requires_grad_())
    short = divergence(name, y, z.requires_grad_())
    long = divergence(name, *padded)
    torch.testing.assert_close(long, short, rtol=1e-6, atol=1e-6)
    grad_long, grad_short = torch.autograd.grad(long.sum(), padded[1])[0], torch.autograd.grad(short.sum(), z)[0]
    torch.testing.assert_close(grad_long[:, :10], grad_short, rtol=1e-5, atol=1e-6)
    assert not grad_long[:, 10:].any()


def test_t25_all_masked_is_zero_and_not_nan():
    case = make_case()
    case["labels"].fill_(IGNORE)
    for denominator in (0, 12, torch.tensor(0)):
        loss, stats = chunked_loss(**case, weights={"forward_kl": 1.0, "neg_log_alpha": 1.0}, denominator=denominator)
        assert loss.item() == 0
        assert all(not grad.any() for grad in gradients(loss, case))
        assert stats.num_positions == stats.alpha_sum == stats.match_sum == 0


def test_t25_ignored_positions_may_hold_anything():
    case = make_case()
    case["labels"][::3] = IGNORE
    expected = gradients(plain_loss(case, {"forward_kl": 1.0}, 20), case)
    poisoned = {name: tensor.detach().clone() for name, tensor in case.items()}
    for name in ("hidden_draft", "hidden_target"):
        poisoned[name][::3] = torch.nan
    poisoned["hidden_draft"].requires_grad_()
    poisoned["weight_draft"].requires_grad_()
    loss, _ = chunked_loss(**poisoned, weights={"forward_kl": 1.0}, denominator=20, chunk_tok=8)
    for got, want in zip(gradients(loss, poisoned), expected):
        torch.testing.assert_close(got, want)


def test_t26_temperature_does_not_change_the_size_of_the_gradient():
    """Values carry the factor T^2 (tv and -log alpha: T); divided by it, they are the trial's unscaled numbers."""
    y = torch.tensor([[1.0, 0.5, -0.2]])
    z = torch.tensor([[0.3, 0.9, -0.1]], requires_grad=True)
    norm = {
        t: torch.autograd.grad(divergence("forward_kl", y, z, temperature=t).sum(), z)[0].norm().item() for t in (1, 4)
    }
    assert norm[1] == pytest.approx(0.3151, abs=1e-4)
    assert norm[4] == pytest.approx(0.2828, abs=1e-4)
    assert norm[4] / 16 == pytest.approx(0.01768, abs=1e-5)
    one, eye = torch.ones(1, 1), torch.eye(3)
    loss, _ = chunked_loss(z @ eye, eye, y @ eye, eye, one[0].long(), {"forward_kl": 1.0}, 1, temperature=4.0)
    assert torch.autograd.grad(loss, z)[0].norm().item() == pytest.approx(0.2828, abs=1e-4)
    for name in LOSSES:
        sizes = [
            torch.autograd.grad(divergence(name, y, z, temperature=t).sum(), z)[0].norm().item() for t in (4.0, 16.0)
        ]
        assert 0.8 < sizes[1] / sizes[0] < 1.25, name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gradcheck_against_finite_differences_and_the_plain_reference(name, temperature):
    case = make_case(positions=11, rows=13)
    case["labels"][3] = IGNORE
    shift = torch.linspace(0, 1, 13, dtype=torch.float64)
    settings = {"temperature": temperature, "beta": 0.3, "softcaps": (5.0, 4.0)}
    weights = {name: 0.7} if name == "forward_kl" else {name: 0.7, "forward_kl": 0.3}

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        changed = case | {"hidden_draft": hidden, "weight_draft": weight}
        return chunked_loss(**changed, weights=weights, denominator=10, chunk_tok=4, row_logit_shift=shift, **settings)[
            0
        ]

    if name not in ("tv_pp", "kl_tv"):  # parts of these are not differentiated, so they have no finite difference
        assert torch.autograd.gradcheck(value, (case["hidden_draft"], case["weight_draft"]))
    loss, want = (
        value(case["hidden_draft"], case["weight_draft"]),
        plain_loss(case, weights, 10, shift=shift, **settings),
    )
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    for got, expected in zip(gradients(loss, case), gradients(want, case)):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LOSSES)
def test_t27_chunk_size_changes_nothing(name):
    """Rows enough for the grouped argmax and for more than one block a chunk."""
    case = make_case(positions=200, rows=2000, dtype=torch.float32)
    with torch.no_grad():
        case["weight_target"] *= 0.3
        case["weight_draft"] *= 0.3
    whole = plain_loss(case, {name: 1.0}, 200)
    expected = gradients(whole, case)
    for chunk in (7, 64, 200):
        loss, stats = chunked_loss(**case, weights={name: 1.0}, denominator=200.0, chunk_tok=chunk)
        assert loss.item() == pytest.approx(whole.item(), abs=1e-6, rel=1e-6)
        for got, want in zip(gradients(loss, case), expected):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        y, z = case["hidden_target"] @ case["weight_target"].T, case["hidden_draft"] @ case["weight_draft"].T
        assert stats.match_sum.item() == (y.argmax(-1) == z.argmax(-1)).sum().item()
        assert stats.alpha_sum.item() == pytest.approx(
            torch.minimum(y.softmax(-1), z.softmax(-1)).sum().item(), rel=1e-5
        )
        assert stats.num_positions.item() == 200


def test_t27_memory_grows_with_the_chunk_and_not_with_the_text():
    """4,096 positions of 20,000 rows are 312 MiB in float32, and plain losses keep several; ours stay under one."""
    program = """
import resource, torch
from distill.losses import chunked_loss
torch.set_num_threads(1)
def run(positions):
    h, w = torch.randn(positions, 8, requires_grad=True), torch.randn(20000, 8, requires_grad=True)
    target, labels = torch.randn(positions, 8), torch.zeros(positions, dtype=torch.long)
    loss, _ = chunked_loss(h, w, target, torch.randn(20000, 8), labels, {"forward_kl": 1.0}, 1, chunk_tok=256)
    loss.backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
run(64)
small = run(256)
print(run(4096) - small)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150


# Nine TFLOP of products: over the five minutes of a test where bf16 is emulated.
EMULATED = pytest.mark.skipif(not cpu_has_bf16(), reason="no bf16 products in this CPU: emulated, it takes too long")


@pytest.mark.parametrize("width", [16, pytest.param(896, marks=EMULATED)])
def test_t27_a_vocabulary_of_152k_stays_under_2_3_gb(width: int):
    """8,192 positions of 151,936 rows in bf16 products: one float32 copy of the logits alone would be 4.6 GiB.

    The peak of a process of its own over what its inputs take, the gradient of the head (float32) included.
    """
    program = f"""
import resource, torch
from distill.losses import chunked_loss
torch.set_num_threads(2)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rows, width = 151_936, {width}
head = torch.full((rows, width), 0.01).requires_grad_()
hidden = torch.randn(8192, width, requires_grad=True)
target_head, target = torch.rand(rows, width, dtype=torch.bfloat16), torch.randn(8192, width)
labels = torch.zeros(8192, dtype=torch.long)
before = peak()
with torch.autocast("cpu", torch.bfloat16):
    loss, _ = chunked_loss(hidden, head, target, target_head, labels, {{"forward_kl": 1.0}}, 8192, chunk_tok=1024)
loss.backward()
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2.3e9


def test_autocast_multiplies_in_bf16_and_keeps_float32_gradients():
    case = make_case(positions=64, rows=128, dtype=torch.float32)
    exact = plain_loss(case, {"forward_kl": 1.0}, 64)
    expected = gradients(exact, case)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_loss(**case, weights={"forward_kl": 1.0}, denominator=64)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    for got, want in zip(gradients(loss, case), expected):
        assert got.dtype == torch.float32
        assert ((got - want).norm() / want.norm()).item() < 0.02


def test_disjoint_distributions_stay_finite():
    case = make_case(positions=4, rows=16, dtype=torch.float32)
    with torch.no_grad():
        case["hidden_draft"] *= 60
        case["hidden_target"] *= 60
    for name in LOSSES:
        loss, _ = chunked_loss(**case, weights={name: 1.0}, denominator=4)
        assert torch.isfinite(loss), name
        assert all(torch.isfinite(grad).all() for grad in gradients(loss, case)), name


def test_tv_pp_is_the_policy_gradient_with_the_normalised_reward():
    """- E_q[A grad log q] with A = (r - mean) / std, and E_q[A^2] = 1: written without any divergence."""
    generator = torch.Generator().manual_seed(8)
    y, z = (torch.randn(9, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = y.softmax(-1), z.softmax(-1)
    reward = (p > q).double()
    mean = (q * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / (mean * (1 - mean)).sqrt()
    torch.testing.assert_close((q * advantage.square()).sum(-1), torch.ones(9, dtype=torch.float64))
    z.requires_grad_()
    policy = torch.autograd.grad(-(q * advantage * z.log_softmax(-1)).sum(), z)[0]
    ours = torch.autograd.grad(divergence("tv_pp", y, z).sum(), z)[0]
    torch.testing.assert_close(ours, policy, rtol=1e-10, atol=1e-12)


def test_kl_tv_turns_from_the_kl_to_the_tv_as_acceptance_grows():
    """Gradient at a position: w KL' + (1 - w) TV', with nothing from w itself."""
    generator = torch.Generator().manual_seed(9)
    y = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    z = (y + torch.linspace(0, 3, 6)[:, None] * torch.randn(6, 20, generator=generator)).double().requires_grad_()
    parts = {name: torch.autograd.grad(divergence(name, y, z).sum(), z)[0] for name in ("forward_kl", "tv", "kl_tv")}
    for eta in (0.0, 3.0, 50.0):
        weight = (-eta * (1 - divergence("tv", y, z).detach())).exp()[:, None]
        found = torch.autograd.grad(divergence("kl_tv", y, z, eta=eta).sum(), z)[0]
        torch.testing.assert_close(found, weight * parts["forward_kl"] + (1 - weight) * parts["tv"])


@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_survival_weights_come_from_the_calls_own_acceptance(chunk):
    case = make_case()
    place = torch.cat([torch.arange(n) for n in (20, 1, 29)])
    y, z = case["hidden_target"] @ case["weight_target"].T, case["hidden_draft"] @ case["weight_draft"].T
    accept = torch.minimum(y.softmax(-1), z.softmax(-1)).sum(-1).detach()
    expected = torch.empty(50, dtype=torch.float64)
    for t in range(50):
        m = min(3, int(place[t]) + 1)
        expected[t] = sum(accept[t - j : t].prod() for j in range(m)) / m
    torch.testing.assert_close(survival_weights(accept, place, 3), expected)
    assert torch.equal(survival_weights(accept, place, 1), torch.ones(50, dtype=torch.float64))
    loss, stats = chunked_loss(**case, weights={"tv": 1.0}, denominator=50, chunk_tok=chunk, survival_k=3, place=place)
    want = (divergence("tv", y, z) * expected).sum() / 50
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(stats.loss, divergence("tv", y, z).detach())
    for got, grad in zip(gradients(loss, case), gradients(want, case)):
        torch.testing.assert_close(got, grad)
    with pytest.raises(LossError, match="survival_k 3 needs the place"):
        chunked_loss(**case, weights={"tv": 1.0}, denominator=50, survival_k=3)


def test_survival_weights_are_the_chance_of_a_live_prefix():
    """Acceptance .5, blocks of 2: behind the first token, half of the blocks' second places are alive."""
    weights = survival_weights(torch.full((4,), 0.5), torch.tensor([0, 1, 2, 0]), 2)
    assert weights.tolist() == [1.0, 0.75, 0.75, 1.0]


def test_selection_keeps_the_largest_gap_to_the_reference():
    loss, reference = torch.tensor([1.0, 3.0, 3.0, 0.5, 2.0]), torch.tensor([0.9, 1.0, 2.9, 0.5, 0.0])
    assert select(loss, reference, 0.4).tolist() == [1, 4]
    assert select(loss, reference, 0.41).tolist() == [0, 1, 4]  # of equal gaps (.1) the earlier one
    assert select(loss, reference, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert num_selected(1, 0.01) == 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cap", [None, 4.0])
def test_top_k_of_every_row_is_the_loss_itself(name, cap):
    case = make_case(positions=40, rows=37)
    case["labels"][5] = IGNORE
    want = plain_loss(case, {name: 0.7}, 39, softcaps=(cap, cap))
    few = top_k(case["hidden_target"], case["weight_target"], 37, cap, chunk_tok=7)
    assert few.ids.dtype == torch.int32 and torch.isinf(few.log_p[:, -1]).all()
    arguments = case | {"hidden_target": few, "weight_target": None}
    loss, stats = chunked_loss(**arguments, weights={name: 0.7}, denominator=39, chunk_tok=16, softcaps=(cap, cap))
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
    for got, grad in zip(gradients(loss, case), gradients(want, case)):
        torch.testing.assert_close(got, grad, rtol=1e-8, atol=1e-10)
    full = chunked_loss(**case, weights={name: 0.7}, denominator=39, softcaps=(cap, cap))[1]
    torch.testing.assert_close(stats.alpha_sum, full.alpha_sum)
    assert stats.match_sum == full.match_sum


@pytest.mark.parametrize("k", [1, 4, 20])
def test_top_k_falls_short_by_no_more_than_what_is_stated(k):
    case = make_case(positions=60)
    y, z = case["hidden_target"] @ case["weight_target"].T, case["hidden_draft"] @ case["weight_draft"].T
    p, q = y.softmax(-1), z.softmax(-1).detach()
    few = top_k(case["hidden_target"], case["weight_target"], k)
    torch.testing.assert_close(few.log_p.exp().sum(-1), torch.ones(60, dtype=torch.float64))
    rest = torch.ones_like(p).scatter_(-1, few.ids.long(), 0)
    mass_p, mass_q = (p * rest).sum(-1), (q * rest).sum(-1)
    inside = (p * rest) * ((p / mass_p[:, None]).log() - (q / mass_q[:, None]).log())
    gap = {"forward_kl": inside.sum(-1), "tv": torch.minimum(mass_p, mass_q)}
    arguments = case | {"hidden_target": few, "weight_target": None}

    def lumped(name: str) -> tuple[Tensor, Tensor]:
        loss, stats = chunked_loss(**arguments, weights={name: 1.0}, denominator=60, chunk_tok=16)
        return loss, stats.loss

    for name in ("forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha"):
        assert (lumped(name)[1] <= divergence(name, y, z).detach() + 1e-12).all(), name
    whole = {name: divergence(name, y, z).detach() for name in gap}
    torch.testing.assert_close(lumped("forward_kl")[1], whole["forward_kl"] - gap["forward_kl"])
    assert (lumped("tv")[1] >= whole["tv"] - gap["tv"] - 1e-12).all()
    assert lumped("cross_entropy")[1].mean().item() == pytest.approx(divergence("cross_entropy", y, z).mean().item())
    # The gradient, against autograd over the k + 1 categories.
    log_q = z.log_softmax(-1)
    categories = torch.cat(
        [log_q.gather(-1, few.ids.long()), log_q.masked_fill(rest == 0, -torch.inf).logsumexp(-1, keepdim=True)], -1
    )
    for name in ("forward_kl", "reverse_kl", "jsd", "tv", "tv_pp", "neg_log_alpha", "kl_tv"):
        want = divergence(name, few.log_p, categories).sum() / 60
        got = gradients(lumped(name)[0], case)
        for one, other in zip(got, torch.autograd.grad(want, list(case.values())[:2], retain_graph=True)):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_top_k_goes_with_temperature_1_and_every_row():
    case = make_case()
    arguments = case | {"hidden_target": top_k(case["hidden_target"], case["weight_target"], 3), "weight_target": None}
    for extra in ({"temperature": 2.0}, {"row_logit_shift": torch.zeros(37)}):
        with pytest.raises(LossError, match="temperature 1 and every row"):
            chunked_loss(**arguments, weights={"tv": 1.0}, denominator=1, **extra)


def test_a_frozen_head_and_no_gradient():
    case = make_case()
    loss, _ = chunked_loss(**case, weights={"tv": 1.0}, denominator=50, chunk_tok=16)
    y, z = case["hidden_target"] @ case["weight_target"].T, case["hidden_draft"] @ case["weight_draft"].T
    want = divergence("tv", y, z).sum() / 50
    torch.testing.assert_close(loss, want)
    expected = gradients(want, case)
    for got, grad in zip(gradients(loss, case), expected):
        torch.testing.assert_close(got, grad)
    frozen = case | {"weight_draft": case["weight_draft"].detach()}
    loss, _ = chunked_loss(**frozen, weights={"tv": 1.0}, denominator=50)
    torch.testing.assert_close(torch.autograd.grad(loss, case["hidden_draft"])[0], expected[0])
    with torch.no_grad():
        value, _ = chunked_loss(**case, weights={"tv": 1.0}, denominator=50)
    torch.testing.assert_close(value, want.detach())


def test_t01_heads_with_other_row_counts_are_refused_by_name():
    case = make_case()
    case["weight_target"] = torch.cat([case["weight_target"], case["weight_target"][:3]])
    with pytest.raises(LossError, match="draft head has 37 rows, target head 40"):
        chunked_loss(**case, weights={"forward_kl": 1.0}, denominator=1)


@pytest.mark.parametrize(
    ("weights", "temperature", "message"),
    [
        ({"kl": 1.0}, 1.0, "unknown loss 'kl'; allowed: forward_kl"),
        ({"tv": -1.0}, 1.0, "finite and >= 0"),
        ({"tv": 0.0}, 1.0, "one of them > 0"),
        ({}, 1.0, "one of them > 0"),
        ({"tv": 1.0}, 0.0, "temperature 0.0: must be > 0"),
        ({"tv": 1.0}, float("nan"), "temperature nan"),
    ],
)
def test_bad_mixtures_are_refused(weights, temperature, message):
    with pytest.raises(LossError, match=message):
        check_losses(weights, temperature)


def test_rows_hold_shortlist_and_labels_and_weigh_the_rest():
    shortlist = torch.tensor([1, 5, 9, 40])
    labels = torch.tensor([5, IGNORE, 300, 300, 9])
    rows = draw_rows(shortlist, labels, 512, 100, torch.Generator().manual_seed(0))
    assert rows.ids[:5].tolist() == [1, 5, 9, 40, 300]
    assert len(rows.ids) % 64 == 0 and len(rows.ids) >= 105 and len(rows.ids.unique()) == len(rows.ids)
    assert rows.labels.tolist() == [1, IGNORE, 4, 4, 2]
    assert not rows.shift[:5].any()
    torch.testing.assert_close(rows.shift[5:], torch.full((len(rows.ids) - 5,), 507 / (len(rows.ids) - 5)).log())
    again = draw_rows(shortlist, labels, 512, 100, torch.Generator().manual_seed(0))
    assert torch.equal(rows.ids, again.ids)
    everything = draw_rows(shortlist, labels, 512, 10_000)
    assert len(everything.ids) == 512 and not everything.shift.any()
    assert len(draw_rows(shortlist, labels, 512, 0).ids) == 5
    whole = draw_rows(None, labels, 512, 100)
    assert whole.shift is None and torch.equal(whole.labels, labels)


def test_rows_estimate_the_whole_partition_function():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(512, generator=generator)
    labels = torch.tensor([300])
    draws = [draw_rows(torch.arange(50), labels, 512, 64, generator) for _ in range(2000)]
    sums = torch.stack([(logits[rows.ids] + rows.shift).exp().sum() for rows in draws])
    # Four standard errors of the mean, about 1% of the sum; without the shift it would be off by 70%.
    assert abs(sums.mean() - logits.exp().sum()) < 4 * sums.std() / 2000**0.5


@pytest.mark.parametrize("shortlist", [[], [0, 512], [-1], [3, 3]])
def test_t09_bad_shortlists_are_refused(shortlist):
    with pytest.raises(LossError, match="shortlist"):
        draw_rows(torch.tensor(shortlist, dtype=torch.long), torch.tensor([1]), 512, 8)


def test_a_draft_equal_to_its_target_has_no_gradient_for_any_draw():
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(20, 6, generator=generator), torch.randn(512, 6, generator=generator)
    rows = draw_rows(torch.arange(64), torch.randint(512, (20,), generator=generator), 512, 64, generator)
    draft = hidden.clone().requires_grad_()
    args = (draft, head[rows.ids], hidden, head[rows.ids], rows.labels)
    for name in ("forward_kl", "reverse_kl", "jsd", "tv", "tv_pp", "neg_log_alpha", "kl_tv"):
        loss, stats = chunked_loss(*args, {name: 1.0}, 20, row_logit_shift=rows.shift)
        assert abs(loss.item()) < 1e-5
        assert torch.autograd.grad(loss, draft)[0].abs().max() < 1e-6
        assert stats.alpha_sum.item() == pytest.approx(20, rel=1e-5)


def test_acceptance_counts_against_the_whole_target():
    generator = torch.Generator().manual_seed(4)
    h, w = torch.randn(30, 6, generator=generator), torch.randn(100, 6, generator=generator)
    target_h, target_w = torch.randn(30, 5, generator=generator), torch.randn(100, 5, generator=generator)
    ids = torch.arange(0, 100, 3)
    y, z, warp = target_h @ target_w.T, h @ w.T, Warp(0.7)
    summary = summarise_target(target_h, target_w, warp, chunk_tok=8)
    assert torch.equal(summary.best, y.argmax(-1))
    whole = acceptance(h, w, target_h, target_w, summary, None, warp, warp, chunk_tok=8)
    short = acceptance(h, w[ids], target_h, target_w[ids], summary, ids, warp, warp, chunk_tok=8)
    p = (y / 0.7).softmax(-1)
    assert torch.equal(whole.match, z.argmax(-1) == y.argmax(-1))
    assert torch.equal(short.match, ids[z[:, ids].argmax(-1)] == y.argmax(-1))
    torch.testing.assert_close(whole.alpha, torch.minimum(p, (z / 0.7).softmax(-1)).sum(-1))
    torch.testing.assert_close(short.alpha, torch.minimum(p[:, ids], (z[:, ids] / 0.7).softmax(-1)).sum(-1))
    nothing = summarise_target(target_h[:0], target_w, warp)
    empty = acceptance(h[:0], w, target_h[:0], target_w, nothing, None, warp, warp)
    assert empty.match.shape == empty.alpha.shape == (0,)
