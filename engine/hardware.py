"""The parts of a hardware check: shapes, random models, captured against eager, and a time budget.

Weights are random and made on the device itself: the time of a step does not depend on their values.
"""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from engine.bench import attention_ms, measure_costs
from engine.draft import Drafter, LookupDrafter, ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder by its sizes; `tied` shares the embedding with the head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False

    def config(self) -> LlamaConfig:
        """The config of this shape."""
        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=32768,
            tie_word_embeddings=self.tied, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        )  # fmt: skip


# Target and draft; the drafts have 5-10% of the parameters (of the 135M's, whose table is a fifth, those read a token).
PAIRS = {
    "tiny": (Shape(64, 2, 4, 2, 128, 512, True), Shape(32, 1, 2, 1, 64, 512, True)),
    "135M": (Shape(576, 30, 9, 3, 1536, 49152, True), Shape(576, 3, 9, 3, 1024, 49152, True)),
    "1B": (Shape(2048, 16, 32, 8, 8192, 128256, True), Shape(512, 6, 8, 2, 2048, 128256, True)),
    "8B": (Shape(4096, 32, 32, 8, 14336, 128256), Shape(2048, 4, 32, 8, 8192, 128256, True)),
    "32B": (Shape(5120, 64, 40, 8, 27648, 152064), Shape(2560, 18, 20, 4, 8192, 152064, True)),
}
SHORTLISTS = {"135M": 8192}  # head rows that the draft reads


def random_model(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0, spread: float | None = None
) -> PreTrainedModel:
    """A model of random weights made on the device (a 32B one takes no host memory).

    Args:
        config: its shape.
        device, dtype: of the weights.
        seed: of the weights.
        spread: standard deviation of the weights; None is the config's. At 0.02 a small model's logits hardly differ.
    """
    if spread is not None:
        config.initializer_range = spread
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a draft with a target's first three layers and half of their feed-forward channels."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 3
    config.intermediate_size //= 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:3]
    return config


def captured_against_eager(
    target: Runner, draft: Runner, ks: Sequence[int], temperatures: Sequence[float], max_new: int = 48
) -> list[dict[str, Any]]:
    """The same requests with and without graphs, by k, temperature and drafter; more requests than rows.

    Args:
        target, draft: on a CUDA device, with rows for the batch and 100 tokens more than `max_new`.
        ks: proposals a cycle; 0 is the baseline.
        temperatures: 0 is greedy; each is a run, and one more mixes them.
        max_new: tokens an answer.

    Returns:
        one entry a run: drafter, k, temperatures, batch, num_tok, num_graphs, equal, and the first difference.
    """
    batch, found = target.slab.batch, []
    prompts = torch.randint(
        0, target.config.vocab_size, (batch + 2, 80), generator=torch.Generator().manual_seed(0)
    ).tolist()
    mixes = [*((t,) for t in temperatures), tuple(temperatures)]
    for kind, k in [("draft", k) for k in ks] + [("lookup", max(ks))]:
        for mix in mixes:
            requests = [
                Request(str(i), tuple(ids[: 20 + 60 * i // len(prompts)]), max_new, mix[i % len(mix)])
                for i, ids in enumerate(prompts)
            ]
            answers, graphs = {}, 0
            for graph in (False, True):
                drafter: Drafter = LookupDrafter(device=target.device)
                if kind == "draft":
                    drafter = ModelDrafter(draft, 1, graph=graph)
                decoder = Decoder(target, (), drafter if k else None, k, 1, top_p=0.95, graph=graph)
                answers[graph] = {a.request.id: a.tokens for a in decoder.run(requests)}
                graphs = decoder.num_graphs
            different = [
                (i, next((j for j, (a, b) in enumerate(zip(answers[False][i], answers[True][i])) if a != b), None))
                for i in answers[False]
                if answers[False][i] != answers[True][i]
            ]
            found.append(
                {
                    "drafter": kind,
                    "k": k,
                    "temperatures": list(mix),
                    "batch": batch,
                    "num_tok": sum(map(len, answers[True].values())),
                    "num_graphs": graphs,
                    "equal": not different,
                    "different": different,
                }
            )
    return found


def attention_table(
    device: torch.device, dtype: torch.dtype, kernels: Sequence[str], shape: tuple[int, int, int],
    batches: Sequence[int], contexts: Sequence[int], tokens: Sequence[int], bandwidth: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """One layer's attention by kernel, beside the time that reading the keys and values takes at the copy bandwidth.

    Args:
        device, dtype: of the slab.
        kernels: see `engine.kernels`.
        shape: (query heads, KV heads, head width).
        batches, contexts, tokens: what is measured; tokens of a step are k + 1.
        bandwidth: measured bytes per second.

    Returns:
        rows: kernel, batch, context, tokens, ms, floor_ms, floor_frac (floor / measured).
    """
    size, rows = torch.empty(0, dtype=dtype).element_size(), []
    for batch in batches:
        for context in contexts:
            nbytes = 2 * batch * shape[1] * shape[2] * size * context
            # A GPU's last-level cache is some tens of megabytes.
            num_layers = max(1, -(-(1 << 28) // nbytes)) if device.type == "cuda" else 1
            for num in tokens:
                for kernel in kernels:
                    ms = attention_ms(kernel, device, dtype, batch, shape, num, context, min(num_layers, 64))
                    floor = 1e3 * nbytes / bandwidth
                    rows.append(
                        {
                            "kernel": kernel,
                            "batch": batch,
                            "context": context,
                            "tokens": num,
                            "ms": ms,
                            "floor_ms": floor,
                            "floor_frac": floor / ms,
                        }
                    )
    return rows


def pair_costs(
    target: PreTrainedModel, draft: PreTrainedModel, ks: Sequence[int], contexts: Sequence[int], batch: int,
    rounds: int, name: str, shortlist: torch.Tensor | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """`measure_costs` of two models, captured on CUDA and eager elsewhere, as JSON."""
    capacity = max(contexts) + 256
    runners = Runner(target, batch, capacity), Runner(draft, batch, capacity, shortlist)
    costs = measure_costs(*runners, ks, contexts, batch, rounds, name, graph=runners[0].device.type == "cuda")
    return [{**c.to_json(), "attention": runners[0].attention} for c in costs]


@dataclass(frozen=True)
class Part:
    """One test or measurement.

    Attributes:
        name: in the result.
        need_s: seconds that it may take; with less left it is skipped.
        run: gives what goes into the result.
        why_not: why it can not run here; "" when it can.
    """

    name: str
    need_s: float
    run: Callable[[], Any]
    why_not: str = ""


# What a kernel, a library of another version, a missing file or a full memory raises.
ERRORS = (AssertionError, AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError)


def run_parts(
    parts: Sequence[Part],
    budget_s: float,
    done: Callable[[dict[str, dict[str, Any]]], None],
    now_s: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, Any]]:
    """Runs parts one after another; a part that would go past the budget is skipped, one that fails is a row too.

    Args:
        parts: in order of importance.
        budget_s: seconds for all.
        done: gets all rows so far after each part (to write them down).
        now_s: the clock.

    Returns:
        by name: status ("done", "skipped" or "failed"), seconds, and result, reason or error.
    """
    start, rows = now_s(), {}
    for part in parts:
        began = now_s()
        left = budget_s - (began - start)
        row: dict[str, Any]
        if part.why_not:
            row = {"status": "skipped", "reason": part.why_not}
        elif part.need_s > left:
            row = {"status": "skipped", "reason": f"needs up to {part.need_s:.0f} s; {max(0.0, left):.0f} s are left"}
        else:
            try:
                row = {"status": "done", "result": part.run()}
            except ERRORS as error:
                row = {"status": "failed", "error": repr(error), "trace": traceback.format_exc(limit=-12)}
        if row["status"] != "skipped":
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        rows[part.name] = {**row, "seconds": now_s() - began}
        done(rows)
    return rows


def problems(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a person must look at: parts that failed, captured runs that differ from eager ones, divergences no tie.

    Args:
        rows: from `run_parts`; lists of runs are looked through, other results are not.
    """
    found = []
    for name, row in rows.items():
        if row["status"] == "failed":
            found.append(f"{name}: {row['error']}")
        result = row.get("result")
        for entry in result if isinstance(result, list) else []:
            label = ", ".join(
                f"{key} {entry[key]}" for key in ("drafter", "k", "temperatures", "batch") if key in entry
            )
            if entry.get("equal") is False:
                found.append(f"{name}: captured and eager tokens differ ({label})")
            if entry.get("bugs"):
                found.append(f"{name}: {entry['bugs']} divergences beyond the logit noise ({label})")
    return found
