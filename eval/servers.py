"""Settings for servers, ready to paste: the measured k in the words of each. No torch.

Every flag was looked up in the documentation or source of the server; each says what it was checked against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

# llama.cpp accepts a draft whose vocabulary differs from the target's by this many rows at most.
LLAMA_CPP_ROWS = 128


class Setting(NamedTuple):
    """What to paste for one server, the language it is written in, and what to know about it ("" is nothing)."""

    server: str
    language: str
    text: str
    note: str


def settings(
    target: str, draft: str, k: int, temperature: float, schedule: Mapping[int, int], gguf: tuple[str, str] | None
) -> list[Setting]:
    """The measured k in the words of every server.

    Args:
        target, draft: folders or hub ids.
        k: proposals a cycle.
        temperature: that was measured.
        schedule: best k by batch size.
        gguf: files of target and draft; None leaves llama.cpp out.
    """
    shared = target, draft, k
    found = [
        Setting("vLLM", "bash", vllm(*shared, temperature), "Target and draft must have the same vocabulary size."),
        Setting("SGLang", "bash", sglang(*shared), "Without `--enable-dp-attention`."),
        Setting("transformers", "python", transformers(*shared, temperature), "Batch 1 only."),
        Setting("TensorRT-LLM", "yaml", tensorrt_llm(target, draft, schedule), ""),
    ]
    if gguf is not None:
        limits = (
            "A chain only, no shortlist; the target's GGUF must have the draft's vocabulary (at most "
            f"{LLAMA_CPP_ROWS} rows more or fewer) and must add a BOS as the draft's does."
        )
        found.append(Setting("llama.cpp", "bash", llama_cpp(*gguf, k, temperature), limits))
    return found


def vllm(target: str, draft: str, k: int, temperature: float = 0.0) -> str:
    """`vllm serve` with a separate draft model; its vocabulary must be the target's (source of 0.32).

    A draft is greedy there unless it is told to sample, as ours does at a temperature above 0.
    """
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": k}
    config |= {"draft_sample_method": "probabilistic"} if temperature > 0 else {}
    return f"vllm serve {target} --speculative-config '{json.dumps(config)}'"


def sglang(target: str, draft: str, k: int) -> str:
    """SGLang's standalone draft: a chain of k steps; k tokens and the one before them are verified."""
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm STANDALONE --speculative-draft-model-path {draft} \\\n"
        f"  --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    )


def transformers(target: str, draft: str, k: int, temperature: float = 0.0) -> str:
    """`generate(assistant_model=...)`: the draft's own generation config says how many tokens it proposes."""
    sampler = f"do_sample=True, temperature={temperature:g}, top_k=0" if temperature > 0 else "do_sample=False"
    return f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")
draft = AutoModelForCausalLM.from_pretrained("{draft}", dtype="auto")
draft.generation_config.num_assistant_tokens = {k}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
messages = [{{"role": "user", "content": "Write a function that merges two sorted lists."}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
ids = target.generate(**inputs, assistant_model=draft, {sampler}, max_new_tokens=128)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))"""


def llama_cpp(target: str, draft: str, k: int, temperature: float = 0.0) -> str:
    """llama-server (source of build 11434; older builds say `--draft-max` and have no `--spec-type draft-simple`).

    A draft is greedy there unless it is told to sample, as ours does at a temperature above 0.
    """
    sampler = " --spec-draft-sampling probabilistic" if temperature > 0 else ""
    return (
        f"llama-server --model {target} --model-draft {draft} --metrics \\\n"
        f"  --spec-type draft-simple --spec-draft-n-max {k} --spec-draft-n-min 0 --spec-draft-p-min 0{sampler}"
    )


def tensorrt_llm(target: str, draft: str, schedule: Mapping[int, int]) -> str:
    """A file for `trtllm-serve --config`, with the draft length by batch size.

    Args:
        target, draft: folders or hub ids.
        schedule: best k by batch size; speculation is off above the largest size that was measured.

    Returns:
        the file; where no k pays at any size, a comment that says so.
    """
    longest = max(schedule.values())
    if not longest:
        sizes = ", ".join(map(str, schedule))
        return f"# No k pays at the batch sizes that were measured ({sizes}): serve {target} without speculation."
    lines = [f"# trtllm-serve {target} --config speculative.yaml", "disable_overlap_scheduler: true"]
    lines += ["speculative_config:", "  decoding_type: DraftTarget", f"  max_draft_len: {longest}"]
    lines += [f"  speculative_model: {draft}"]
    if len(set(schedule.values())) == 1:
        lines += [f"  max_concurrency: {max(schedule)}  # the largest batch that was measured"]
    else:
        upper = ", ".join(f"{batch}: {k}" for batch, k in schedule.items())
        lines += [
            "  # Batch sizes up to and including each (documentation of 1.3); older versions: from each size on.",
            f"  draft_len_schedule: {{{upper}}}",
        ]
    return "\n".join(lines)
