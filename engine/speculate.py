"""Speculative decoding on one screen: prefill, propose, verify, accept, commit; k = 0 is the baseline.

    while rows are active:
        d, q   = drafter.propose(k)                      # k serial draft steps
        p      = target([newest token, d_1 ... d_k])     # one pass
        a, y   = accept(p, q, d)                         # a proposals kept, y follows
        commit   d_1 ... d_a, y                          # rollback is a smaller length

The target's slab holds every token of a row but the newest, whose key is written by the next pass. Rows are ragged:
each accepts its own count, no realignment. A finished row leaves and a waiting request takes its slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from engine import noise
from engine.accept import accept_block, accept_greedy, accept_sampled, with_room
from engine.clock import BareClock, Clock
from engine.draft import Batch, Drafter, Proposal, refuse_window
from engine.graphs import HostCopy, Step, check_graph, memory_pool
from engine.model import Runner
from engine.policy import Policy
from engine.request import Answer, Cycle, Request, Texts, Verified
from engine.row_state import RowState, move_on
from engine.warp import Warp, argmax, draw, next_token, probabilities

RULES = ("token", "block")


class Decoder:
    """Decodes requests with a target, and a drafter or none.

    Args:
        target: its slab's rows are the batch.
        eos: ids that end an answer.
        drafter: None is the baseline.
        k: proposals a cycle; 0 is the baseline.
        seed: of all noise.
        top_k, top_p: the target's warping (temperature belongs to the request).
        clock: gets the phases draft, verify and sampling.
        keep_hidden: keep the target's hidden state of every emitted token (distillation reads them).
        stop: looks at an answer's tokens after each commit; true ends it with finish "stop".
        rule: how samples are accepted, "token" by token or by "block"; both are exact.
        policy: chooses each cycle's k, at most `k`; None is always k.
        graph: capture verify and accept as CUDA graphs (the drafter has its own switch). Graphs live as long as the
            decoder: keep one for many requests.
        watch: sees every verify pass that had proposals, rejected ones included.

    Raises:
        ValueError: k without a drafter, or out of 0..16; an unknown rule; top_k or top_p out of range; a target with a
            window; graphs without a CUDA device.
    """

    def __init__(
        self,
        target: Runner,
        eos: Iterable[int],
        drafter: Drafter | None = None,
        k: int = 0,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        clock: Clock | None = None,
        keep_hidden: bool = False,
        stop: Callable[[list[int]], bool] | None = None,
        rule: str = "token",
        policy: Policy | None = None,
        graph: bool = False,
        watch: Callable[[Verified], None] | None = None,
    ) -> None:
        if not 0 <= k <= 16:
            raise ValueError(f"k is {k}; it must be 0 (no speculation) to 16")
        if k > 0 and drafter is None:
            raise ValueError(f"k is {k} but there is no drafter; give one, or k = 0")
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
        refuse_window(target, "it decides what the answer is")
        Warp(0.0, top_k, top_p)
        self.rule, self.policy = rule, policy
        self.target, self.drafter, self.k, self.seed = target, drafter, k, seed
        self.top_k, self.top_p = top_k, top_p
        self.eos = frozenset(eos)
        self.clock: Clock = clock or BareClock(target.device)
        self.keep_hidden, self.stop, self.watch = keep_hidden, stop, watch
        self.active: list[Answer] = []
        self._rows: RowState | None = None  # None: rows have come or gone since it was read
        self._kept: dict[int, RowState] = {}  # by number of rows
        pool = memory_pool() if check_graph(graph, target.device, target.config) else None
        self._verify, self._accept = (Step(run, graph, pool=pool) for run in (self._run_target, self._run_accept))
        self._to_host = HostCopy()

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far, the drafter's left out."""
        return self._verify.num_captured + self._accept.num_captured

    @torch.inference_mode()
    def admit(self, request: Request) -> Answer:
        """Prefills a request into the next free row and emits its first token.

        Raises:
            ValueError: no free row, or the request does not fit the target's positions.
        """
        need, room = len(request.ids) + request.max_new, self.target.max_positions
        if need > room:
            raise ValueError(
                f"request {request.id}: {len(request.ids)} prompt tokens + {request.max_new} new ones need {need} "
                f"positions; the target and its slab hold {room}"
            )
        if len(self.active) == self.target.slab.batch:
            raise ValueError(f"all {self.target.slab.batch} rows are taken; wait for one to finish")
        row = len(self.active)
        if row == 0:
            self.clear(len(request.ids))
        ids = torch.tensor(request.ids, device=self.target.device)
        hidden = self.target.prefill(ids, row)[-1]
        read = self.reads_draft(request)
        if self.drafter is not None and read:
            self.drafter.start(row, ids)
        return self.resume(request, hidden, read)

    def clear(self, positions: int) -> None:
        """Between requests: slabs are laid out for rows of so many positions, however long earlier ones were.

        On a CPU batched products read all slots that are laid out.
        """
        assert not self.active
        self.target.forget(positions)
        if self.drafter is not None:
            self.drafter.forget(positions)

    def reads_draft(self, request: Request) -> bool:
        """Does the drafter read the prompt before decoding? Not where nothing can be drafted, or is expected to be."""
        num, drafter = len(request.ids), self.drafter
        able = drafter is not None and self.k > 0 and drafter.reach(num) > 0
        return able and (self.policy is None or self.policy.drafts(request.id, num + 1))

    @torch.inference_mode()
    def resume(self, request: Request, hidden: Tensor, read: bool = True) -> Answer:
        """Starts a request whose prompt is already in the next free row of the slabs (one prefill, many arms).

        Args:
            request: the request.
            hidden: [H] the target's final hidden state at the prompt's last token.
            read: the drafter has read the prompt too (`reads_draft`).
        """
        answer = Answer(request)
        temperature = torch.tensor([request.temperature], device=self.target.device)
        logits = self.target.logits(hidden[None, None])
        if Warp(request.temperature).greedy:
            first = argmax(logits[0])
        else:
            key = torch.tensor([noise.request_key(request.id)], device=self.target.device)
            position = torch.full_like(key, len(request.ids))
            probs = probabilities(logits, temperature, self.top_k, self.top_p)
            first = draw(probs[:, 0], noise.uniform(self.seed, key, position, noise.FINAL))
        if self.keep_hidden:
            answer.hidden.append(hidden)
        answer.commit(first.tolist(), self.eos, self.stop)
        if self.drafter is not None:
            self.drafter.join(len(self.active), read)
        self.active.append(answer)
        self._rows = None
        return answer

    def retire(self) -> list[Answer]:
        """Takes finished rows out; the last active row moves into each gap. `cycle` does so by itself."""
        done = [a for a in self.active if a.finish]
        if self.policy is not None:
            for answer in done:
                self.policy.forget(answer.request.id)
        if not done:
            return []
        while any(a.finish for a in self.active):
            gap = next(i for i, a in enumerate(self.active) if a.finish)
            mover = self.active.pop()
            if gap < len(self.active):
                self.active[gap] = mover
                if not mover.finish:
                    length = len(mover.request.ids) + len(mover.tokens)
                    self.target.slab.move_row(len(self.active), gap, length)
                    if self.drafter is not None and self.k > 0:
                        self.drafter.move(len(self.active), gap, length)
        self._rows = None
        return done

    def _draft_length(self, longest: int) -> int:
        """k, less what no row could use, and what the drafter or the slab can not hold (then speculation pauses)."""
        if self.drafter is None or self.k == 0:
            return 0
        useful = max(a.request.max_new - len(a.tokens) for a in self.active) - 1
        useful = self.k if self.target.fixed else useful  # another k would be another graph
        wanted = self.k if self.policy is None else self.policy.choose([a.request.id for a in self.active], longest)
        return max(0, min(self.k, wanted, useful, self.drafter.reach(longest), self.target.max_positions - longest))

    @torch.inference_mode()
    def cycle(self) -> list[Answer]:
        """One round over all active rows; returns those that finished."""
        start_s = time.perf_counter()
        rows, batch = self._start()
        longest = batch.longest
        k = self._draft_length(longest)
        proposal = None
        if k:
            assert self.drafter is not None
            with self.clock.phase("draft"):
                proposal = self.drafter.propose(batch, k)
        elif self.drafter is not None:
            self.drafter.skip()
        given = Proposal(rows.last[:, :0]) if proposal is None else proposal
        with self.clock.phase("verify"):
            extent = self.target.extent(longest + k, longest + k)
            hidden, logits = self._verify((extent,), rows.last, rows.length, given.tokens)
        with self.clock.phase("sampling"):
            state = rows.last, rows.length, rows.temperature, batch.keys, rows.live, rows.limit, rows.drawn
            (result,) = self._accept((rows.draws,), logits, *state, given.tokens, given.q, given.rows, given.count)
        assert hidden is not None and result is not None and logits is not None
        found = self._to_host(result)
        count, kept = [r[0] for r in found], [r[1] for r in found]
        if self.watch is not None and k:
            self.watch(Verified(tuple(self.active), given.tokens, count, kept, hidden, logits))
        self._record(kept, [r[2:] for r in found], count, hidden)
        if self.policy is not None:
            self.policy.took(k, len(self.active), longest, (time.perf_counter() - start_s) * 1e3)
        return self.retire()

    def _start(self) -> tuple[RowState, Batch]:
        """What this cycle starts from, and what the drafter may see of it."""
        if self._rows is None:
            # With fixed shapes rows are added up to a power of two, and their state stays in the same tensors.
            num = self.target.rows(len(self.active))
            fresh = RowState.of(self.active, num, self.target.device)
            kept = self._kept.setdefault(num, fresh)
            self._rows = fresh if kept is fresh else fresh.within(kept)
        rows, texts = self._rows, Texts(self.active, len(self._rows.length))
        longest = max(len(a.request.ids) + len(a.tokens) for a in self.active)
        keys = rows.keys if self.rule == "token" else rows.cycle_keys(self.active)
        return rows, Batch(rows.last, rows.length, longest, rows.temperature, keys, texts, rows.draws)

    def _record(self, kept: list[int], tokens: list[list[int]], count: list[int], hidden: Tensor) -> None:
        """Commits what each row emitted, and writes down its cycle."""
        for row, answer in enumerate(self.active):
            before, emit = len(answer.tokens), tokens[row][: kept[row] + 1]
            cut = answer.commit(emit, self.eos, self.stop)
            num = len(answer.tokens) - before
            answer.cycles.append(Cycle(count[row], kept[row], num, cut))
            if self.policy is not None:
                self.policy.observe(answer.request.id, count[row], kept[row])
            if self.keep_hidden:
                answer.hidden.extend(hidden[row, :num].clone().unbind(0))

    # What runs on the device, and never waits for it: a `Step` calls it as it is, or captures and replays it.

    def _run_target(self, extent: int, last: Tensor, length: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [B, k+1, H] and logits [B, k+1, R] after the newest token and each of the k proposals."""
        hidden = self.target.step(torch.cat([last[:, 1:], proposed], 1), length - 1, extent)
        return hidden, self.target.logits(hidden)

    def _run_accept(
        self, draws: str, logits: Tensor, last: Tensor, length: Tensor, temperature: Tensor, keys: Tensor,
        live: Tensor, limit: Tensor, drawn: Tensor, tokens: Tensor, q: Tensor | None, rows: Tensor | None,
        count: Tensor | None,
    ) -> tuple[Tensor]:  # fmt: skip
        """Proposed and accepted counts and the emitted tokens, one row [2 + k + 1] each; moves `last` and `length`."""
        k = tokens.shape[1]
        count = with_room(length, limit, k, count)
        if draws == "greedy":
            accepted, final = accept_greedy(tokens, argmax(logits), count)
        elif k == 0:
            accepted = torch.zeros_like(length)
            u_final = noise.uniform(self.seed, keys[drawn], length[drawn], noise.FINAL)
            final = next_token(logits[:, 0], temperature, drawn, u_final, self.top_k, self.top_p)
        else:
            p = probabilities(logits, temperature, self.top_k, self.top_p, draws)
            ahead = length[:, None] + torch.arange(k + 1, device=p.device)
            u_final = noise.uniform(self.seed, keys[:, None], ahead, noise.FINAL)
            u_accept = noise.uniform(self.seed, keys[:, None], ahead[:, :k], noise.ACCEPT)
            judge = accept_sampled if self.rule == "token" else accept_block
            accepted, final = judge(p, q, tokens, u_accept, u_final, rows, count)
        emitted = move_on(last, length, live, tokens, accepted, final)
        return (torch.cat([count[:, None], accepted[:, None], emitted], 1),)

    def run(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Answers requests in the order they finish, keeping every row busy."""
        waiting = iter(requests)
        more = True
        while more or self.active:
            while more and len(self.active) < self.target.slab.batch:
                if (request := next(waiting, None)) is None:
                    more = False
                else:
                    self.admit(request)
                    yield from self.retire()
            if self.active:
                yield from self.cycle()
