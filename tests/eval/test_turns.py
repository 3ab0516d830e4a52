"""Whose turn it is: orders and clocks are balanced in every domain and group."""

from __future__ import annotations

from collections import Counter

import pytest

from eval.arms import Arm
from eval.turns import next_turn

ARMS = (Arm("", 0), Arm("a", 2), Arm("b", 2))


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("domains", [1, 2, 3, 4])
def test_orders_are_balanced_in_every_domain(every: int, domains: int) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    orders: dict[int, Counter[tuple[str, ...]]] = {d: Counter() for d in range(domains)}
    for i in range(domains * 4 * every):
        domain = i % domains
        passes = next_turn(seen, str(domain), "short", every).passes(ARMS)
        assert [arm for arm, clock in passes if clock == "bare"] in (list(ARMS), list(ARMS[::-1]))
        orders[domain][(passes[0][0].name, *(clock for _, clock in passes[:2]))] += 1
    for found in orders.values():
        both = {key: num for key, num in found.items() if set(key[1:]) == {"bare", "phased"}}
        assert both == {(arm, *clocks): 1 for arm in ("baseline", "draft:b@k2")
                        for clocks in (("bare", "phased"), ("phased", "bare"))}  # fmt: skip
        alone = [found[arm, "bare", "bare"] for arm in ("baseline", "draft:b@k2")]
        assert alone == [2 * (every - 1)] * 2
