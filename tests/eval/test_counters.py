"""Servers' counters in our definitions, on worked examples; no counters is n/a, never 0 or 1."""

from __future__ import annotations

import pytest

from eval.counters import Counters, between, from_counters, from_timings, read_counters, total

# As vLLM's /metrics shows them: two engines, the time of creation, other metrics.
PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 3.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.3e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="3"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="4"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""

LLAMA_PAGE = """\
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 130
llamacpp:spec_decode_num_accepted_tokens_total 42
llamacpp:spec_decode_num_drafts_total 65
llamacpp:requests_processing 0
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 29
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 13
"""


def test_the_bonus_token_is_in_tau() -> None:
    """43 passes of k = 5 with the histogram 11, 14, 11, 4, 0, 3: 63 of 215 accepted, 106 tokens out."""
    histogram = (11, 14, 11, 4, 0, 3)
    reached = tuple(float(sum(histogram[j:])) for j in range(1, 6))
    found = from_counters(read_counters(PAGE.replace('position="10"} 0.0', 'position="10"} 0')))
    assert found is not None
    assert (found["drafted"], found["accepted"], found["num_cycles"]) == (215, 63, 43)
    assert found["alpha"] == pytest.approx(0.2930, abs=5e-5)
    assert found["tau"] == pytest.approx(106 / 43) == pytest.approx(2.4651, abs=5e-5)
    assert found["mean_accepted"] == pytest.approx(63 / 43)
    assert [p["A"] * 43 for p in found["accept_by_position"]] == pytest.approx([*reached, 0.0])
    assert found["accept_by_position"][1]["c"] == pytest.approx(18 / 32)


def test_llama_server_shows_the_same_counters_under_its_own_name() -> None:
    """As llama-server --metrics shows them."""
    found = from_counters(read_counters(LLAMA_PAGE))
    assert found is not None and found["source"] == "llama-server counters"
    assert (found["drafted"], found["accepted"], found["num_cycles"]) == (130, 42, 65)
    assert found["alpha"] == pytest.approx(42 / 130) and found["tau"] == pytest.approx(107 / 65)
    assert [p["A"] * 65 for p in found["accept_by_position"]] == pytest.approx([29, 13])


def test_positions_add_up_to_tau_without_the_bonus() -> None:
    """llama.cpp's sample: .805, .632 and .483 at three positions are 2.92 tokens a pass."""
    found = from_counters(Counters(1000, 3000, 1920, (805, 632, 483)))
    assert found is not None
    assert found["tau"] == pytest.approx(2.92)
    assert 1 + sum(p["A"] for p in found["accept_by_position"]) == pytest.approx(found["tau"])


def test_only_what_was_counted_in_between() -> None:
    first, later = Counters(10, 50, 20, (10, 10)), Counters(14, 70, 26, (13, 12, 1))
    assert between(first, later) == Counters(4, 20, 6, (3, 2, 1))
    assert between(None, later) is None and between(first, None) is None
    assert between(later, first) is None  # the server started anew
    assert total([between(first, later), Counters(1, 5, 1, (1,))]) == Counters(5, 25, 7, (4, 2, 1))
    assert total([first, None]) is None and total([]) is None


@pytest.mark.parametrize("page", ["", "vllm:num_requests_running 0.0\n", "<html>vllm:spec_decode_num_drafts</html>"])
def test_a_server_without_counters_has_no_acceptance(page: str) -> None:
    assert read_counters(page) is None and from_counters(read_counters(page)) is None


def test_nothing_drafted_is_no_acceptance() -> None:
    assert from_counters(Counters(0, 0, 0)) is None
    assert from_timings([]) is None
    assert from_timings([{"predicted_n": 64, "predicted_ms": 3.0}]) is None


def test_llama_server_tells_passes_by_its_tokens() -> None:
    """docs/metrics.md: 64 tokens, the first from the prefill, 21 passes with k = 3, 42 accepted."""
    found = from_timings([{"predicted_n": 64, "draft_n": 63, "draft_n_accepted": 42}])
    assert found is not None
    assert found["num_cycles"] == 21 and found["tau"] == pytest.approx(3.0) and found["alpha"] == pytest.approx(2 / 3)
    # An answer without a draft is made of plain passes, which count.
    plain = from_timings([{"predicted_n": 64, "draft_n": 63, "draft_n_accepted": 42}, {"predicted_n": 22}])
    assert plain is not None and plain["tau"] == pytest.approx(84 / 42)
