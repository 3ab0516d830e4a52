"""What a reader must know beside the ranking: sentences about the choice, how far phases hold. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval import show
from eval.records import ALL
from eval.views import Report, arm_label, judged_cell


def notes(report: Report) -> list[str]:
    """Sentences about the choice that the ranking alone does not say."""
    choice = report["choice"]
    if choice["arm"] is None:
        return []
    chosen = "no speculation" if not choice["k"] else arm_label(choice)
    said = []
    if choice["domain"] not in (None, ALL):
        others = {c["domain"] for c in report["cells"]} - {choice["domain"], ALL}
        shift = "; the other domains show what a shift costs" if others else ""
        said.append(f"Judged on {choice['domain']}, which the draft is for{shift}.")
    said += [f"Chosen: {chosen}, by {choice['rank_key']}. Ties: {choice['tie_rule']}."]
    if choice["held_out"] is not None:
        said.append(
            f"Chosen on one part of the requests and valued on the rest it gives {show.speed(choice['held_out'])}; "
            f"expected regret {show.percent(choice['regret'], 1)}."
        )
    best, longest = choice["acceptance_best"], choice["longest_accepted"]
    # Against another k of the same draft alpha says nothing: it falls with k.
    mine = next(c for c in choice["ranking"] if c["arm"] == choice["arm"])
    rivals: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    if best and choice["k"] and best["draft"] != choice["draft"] and (best["alpha"] or 0) > (mine["alpha"] or 0):
        rivals.setdefault(best["arm"], (best, []))[1].append("the highest acceptance")
    if longest and (longest["tau"] or 0) > (mine["tau"] or 1):
        rivals.setdefault(longest["arm"], (longest, []))[1].append("the most tokens a cycle")
    for other, what in rivals.values():
        acceptance = f"alpha {show.number(other['alpha'])}, tau {show.number(other['tau'])}"
        end = f"still ends at {show.speed(other['value'])}: acceptance does not decide"
        said.append(f"{arm_label(other)} has {' and '.join(what)} ({acceptance}) and {end}.")
    if choice["grid_regret"] is not None:
        said.append(
            f"Against the best arm of the whole grid, each rival on the requests that it shares with the choice, the "
            f"choice loses {show.percent(choice['grid_regret'], 1)}."
        )
    scheduled = report["settings"].get("scheduled")
    if scheduled and scheduled["shared_requests"]:
        said.append(
            f"The schedule was made of {scheduled['shared_requests']} of the requests that it is measured on here: its "
            "figure flatters it. Make it of others."
        )
    said += [text for draft in report["drafts"] for text in draft.get("doubts", ())]
    if most := report["settings"].get("max_new_tok"):
        said.append(f"Answers are of at most {most:,} tokens (eval.max_new_tok): longer ones gain more or lose more.")
    said += prompt_notes(report["settings"])
    if choice["left_out"]:
        said.append(f"Not compared, too few requests or dropped by the race: {', '.join(choice['left_out'])}.")
    return said


def trust(report: Report) -> list[dict[str, Any]]:
    """How far the phases of the judged arm can be trusted at each batch: closure, clocks, spread of the baseline."""
    judged = judged_cell(report)
    if judged is None:
        return []
    here = [c for c in report["cells"] if (c["domain"], c["group"]) == (judged["domain"], judged["group"])]
    plain = {c["batch"]: c for c in here if not c["k"]}
    return [
        {
            "batch": c["batch"],
            "closure": show.percent(c["closure_frac"], 2),
            "clocks": show.clocks(c["clocks"]),
            "noise": show.percent(plain[c["batch"]]["noise_frac"], 1) if c["batch"] in plain else show.NA,
        }
        for c in sorted(here, key=lambda c: c["batch"])
        if c["arm"] == judged["arm"] and c["status"] == "ok"
    ]


def prompt_notes(settings: Mapping[str, Any]) -> list[str]:
    """Which held-out prompts are not measured, or not whole.

    Args:
        settings: with `left_out`, `cut` and `not_asked` of `prompts.Choice`, where there is something to tell.
    """
    said = []
    for domain, left in (settings.get("left_out") or {}).items():
        said.append(
            f"Left out, as they do not fit: {_prompts(left['num'], domain)} over {left['limit_tok']:,} tokens "
            f"({left['limit']})."
        )
    for domain, cut in (settings.get("cut") or {}).items():
        said.append(
            f"Measured without their middle: {_prompts(cut['num'], domain)}, cut to {cut['limit_tok']:,} tokens "
            f"({cut['limit']})."
        )
    for domain, groups in (settings.get("not_asked") or {}).items():
        for group, num in groups.items():
            said.append(
                f"Left out, as eval.num_requests does not name their group: {_prompts(num, domain)} "
                f"({show.plain(group, 20)})."
            )
    return said


def _prompts(num: int, domain: str) -> str:
    return f"{num} held-out prompt{'s' * (num != 1)} of {show.plain(domain, 30)}"
