"""Scores on held-out answers: an oracle draft scores one, the shortlist is told from the whole head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from distill.acceptance import acceptance, served_warps, summarise_target
from distill.recipe import load_recipe
from distill.teacher import Batch, ResponseDataset
from distill.validation import FACTORS, GREEDY, Score, Served, Validation, choose, flat, table
from engine.costs import Costs, predicted_speedup
from engine.warp import Warp, probabilities
from tests.conftest import make_noisy
from tests.distill.test_module import write_answers

COSTS = Costs(T_ms=10.0, V_ms={1: 11.0, 3: 13.0}, t_ms=1.0)
SIZES = [(5 + 3 * n % 20, 8 + 5 * n % 17) for n in range(12)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, t_tied: PreTrainedModel) -> ResponseDataset:
    return ResponseDataset(write_answers(tmp_path_factory.mktemp("answers") / "a", t_tied, SIZES), max_length=60)


def score(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    dataset: ResponseDataset,
    shortlist: torch.Tensor | None = None,
    warp: Warp = GREEDY,
    own: Warp | None = None,
    batch_tok: int = 100,
) -> list[Score]:
    def hidden(batch: Batch) -> torch.Tensor:
        states = draft.model(batch.input_ids).last_hidden_state
        # The cached states are bf16, so the oracle's are rounded alike.
        return states[batch.positions[:, 0], batch.positions[:, 1]].bfloat16().float()

    validation = Validation(dataset, Served(COSTS, (1, 3), warp, own or warp), batch_tok=batch_tok, chunk_tok=16)
    weight = draft.get_output_embeddings().weight.detach()
    return validation.run(hidden, weight, target.get_output_embeddings().weight.detach(), shortlist)


def test_the_target_as_its_own_draft_scores_one(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    scores = score(t_tied, t_tied, dataset)
    assert [found.domain for found in scores] == ["code", "math"]
    assert sum(found.num_tok for found in scores) == sum(answer for _, answer in SIZES)
    for found in scores:
        assert found.alpha > 0.98  # padding moves a few ties of the rounded states
        assert found.overlap > 0.95
        assert found.cycles[3].tau == pytest.approx(4.0, abs=0.15)
        assert found.best[0] == 3


def test_batches_do_not_matter(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    draft = make_noisy(t_tied)
    one, many = (score(draft, t_tied, dataset, batch_tok=tokens) for tokens in (1, 10_000))
    for first, second in zip(one, many):
        assert first.alpha == pytest.approx(second.alpha, abs=0.02)
        assert first.overlap == pytest.approx(second.overlap, abs=0.01)


def test_a_shortlist_without_the_answers_accepts_nothing(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    written = {token for row in dataset.rows for token in row.answer_ids}
    others = torch.tensor([token for token in range(512) if token not in written])
    for found in score(t_tied, t_tied, dataset, others):
        assert found.alpha == 0.0
        assert found.alpha_whole > 0.98
        assert found.overlap < found.overlap_whole
        assert found.cycles[1].tau == 1.0


def test_the_prediction_is_the_cost_models_for_the_cycles_found(
    t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    for found in score(make_noisy(t_tied), t_tied, dataset):
        assert 0.1 < found.alpha < 0.95
        for k, cycles in found.cycles.items():
            assert found.speedup[k] == pytest.approx(predicted_speedup(COSTS, k, cycles.conditional))


def test_a_sampled_target_is_predicted_from_overlap(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    greedy, sampled = (score(make_noisy(t_tied), t_tied, dataset, warp=Warp(t)) for t in (0.0, 1.0))
    for first, second in zip(greedy, sampled):
        assert first.overlap == second.overlap
        # What is judged of a tuning is what is served: equal tokens, or the chance to be accepted.
        for one, figure in ((first, first.alpha), (second, second.overlap)):
            sums, counts = zip(*one.matches)
            assert sum(sums) / sum(counts) == pytest.approx(figure, rel=1e-5)
        assert second.cycles[1].alpha == pytest.approx(second.overlap, abs=0.15)
        assert first.cycles[1].alpha == pytest.approx(first.alpha, abs=0.15)


@pytest.mark.parametrize("rows", [None, 200])
@pytest.mark.parametrize(
    ("warp", "own"),
    [(Warp(0.8, 0, 0.7), Warp(0.8)), (Warp(1.0, 5), Warp(0.9)), (Warp(1.2, 40, 0.9), Warp(1.1, 0, 0.8))],
)
def test_a_warped_target_is_judged_as_it_is_served(
    warp: Warp, own: Warp, rows: int | None, t_tied: PreTrainedModel, dataset: ResponseDataset
) -> None:
    """The chance of acceptance is sum min(p, q) after the warping of both, over the rows in use."""
    draft = make_noisy(t_tied)
    shortlist = None if rows is None else torch.arange(0, 512, 2)[:rows]
    found = {one.domain: one for one in score(draft, t_tied, dataset, shortlist, warp=warp, own=own)}
    heads = [model.get_output_embeddings().weight.detach() for model in (t_tied, draft)]
    sums: dict[str, list[float]] = {name: [] for name in found}
    for number, row in enumerate(dataset.rows):
        batch = dataset.collate([number])
        states = draft.model(batch.input_ids).last_hidden_state[0, batch.positions[:, 1]].bfloat16().float()
        temperatures = (torch.tensor([one.temperature]) for one in (warp, own))
        p = probabilities((batch.hidden_target.float() @ heads[0].T)[None], next(temperatures), warp.top_k, warp.top_p)
        z = states @ heads[1].T
        kept = torch.arange(512) if shortlist is None else shortlist
        q = probabilities(z[None][..., kept], next(temperatures), own.top_k, own.top_p)
        sums[row.domain] += torch.minimum(p[0][:, kept], q[0]).sum(-1).tolist()
    for name, values in sums.items():
        assert len(values) == found[name].num_tok
        assert found[name].overlap == pytest.approx(sum(values) / len(values), abs=1e-4)
        assert found[name].cycles[1].alpha == pytest.approx(found[name].overlap, abs=0.15)
    if rows is None:
        plain = {one.domain: one for one in score(draft, t_tied, dataset, warp=Warp(warp.temperature))}
        assert any(abs(plain[name].overlap - one.overlap) > 1e-3 for name, one in found.items())


def test_what_a_recipe_serves_is_what_counts() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    one = load_recipe(recipes / "code.yaml", ["eval.temperature=0.8", "eval.top_p=0.9", "eval.top_k=50"])
    assert served_warps(one.eval) == (Warp(0.8, 50, 0.9), Warp(0.8))
    own = ["eval.temperature=1.0", "eval.draft_temperature=0.6", "eval.draft_top_p=0.7"]
    assert served_warps(load_recipe(recipes / "code.yaml", own).eval) == (Warp(1.0), Warp(0.6, 0, 0.7))


def test_tied_logits_at_the_cut_are_a_distribution(t_tied: PreTrainedModel) -> None:
    """bf16 logits have few values: what is cut among equal ones would leave p a sum above 1."""
    head = t_tied.get_output_embeddings().weight.detach().bfloat16()
    states = torch.randn(40, head.shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    warp = Warp(1.0, 30, 0.9)
    summary = summarise_target(states, head, warp)
    found = acceptance(states, head, states, head, summary, None, warp, warp)
    assert float(found.alpha.max()) <= 1 + 1e-5
    assert float(found.alpha.min()) > 0.8  # the draft is the target; but for what ties with the last token
    assert summary.floor is not None and bool(torch.isfinite(summary.floor).all())


def test_the_trained_domain_decides(t_tied: PreTrainedModel, dataset: ResponseDataset) -> None:
    scores = score(make_noisy(t_tied), t_tied, dataset)
    by_domain = {found.domain: found for found in scores}
    assert choose(scores, "math") == by_domain["math"].best
    mean = {k: (by_domain["code"].speedup[k] + by_domain["math"].speedup[k]) / 2 for k in (1, 3)}
    assert choose(scores, "mixed")[1] == pytest.approx(max(mean.values()))
    lines = table(scores).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert flat(scores)["val/code/alpha"] == by_domain["code"].alpha


def test_answers_shorter_than_a_cycle_give_no_tau(tmp_path: Path, t_tied: PreTrainedModel) -> None:
    short = ResponseDataset(write_answers(tmp_path / "a", t_tied, [(5, 2), (6, 2)]), max_length=60)
    found = score(t_tied, t_tied, short)
    assert found[0].cycles[3].tau is None
    assert "n/a" in table(found)
    assert "val/code/tau_3" not in flat(found)
    assert found[0].speedup[3] > 0


@pytest.mark.parametrize("shortlist", [None, torch.arange(0, 60)])
def test_the_fitted_temperature_undoes_a_scaled_head(
    t_tied: PreTrainedModel, dataset: ResponseDataset, shortlist: torch.Tensor | None
) -> None:
    """A draft whose logits are 1 / 0.8 of the target's overlaps it wholly at 1 / 0.8 of its temperature."""
    head = t_tied.get_output_embeddings().weight.detach()

    def hidden(batch: Batch) -> torch.Tensor:
        return batch.hidden_target.float()

    validation = Validation(dataset, Served(COSTS, (1, 3), Warp(0.7), Warp(0.7)), batch_tok=100, chunk_tok=16)
    for scale in (1.0, 1 / 0.7):
        fitted = validation.fit_temperature(hidden, head * scale, head, shortlist)
        assert fitted.target == 0.7
        if shortlist is None:
            assert fitted.draft == pytest.approx(0.7 * min(FACTORS, key=lambda f: abs(f - scale)))
        assert fitted.overlap >= fitted.overlap_same
        plain = validation.run(hidden, head * scale, head, shortlist)
        mean = sum(found.overlap * found.num_tok for found in plain) / sum(found.num_tok for found in plain)
        assert fitted.overlap_same == pytest.approx(mean, abs=1e-5)
