"""eval.run --check: what would stop an evaluation or leave it with fewer requests, found before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from distill.checkpoint import read_draft, verify_draft, whole_draft
from distill.known import BUNDLED, bundled_folder
from distill.look import CheckError, find_config
from distill.models import load_config, load_tokenizer, model_hash, resolve
from distill.recipe import Recipe
from eval.inventory import doubts
from eval.prompts import choose_prompts
from eval.schedule import read_schedule

log = logging.getLogger(__name__)


def check(recipe: Recipe, source: str, drafts: Mapping[str, Path]) -> None:
    """Checks files and reads the held-out prompts; the log says how many there are of each kind.

    Nothing is fetched or converted. A target that is not here is looked at as `distill.train --check` does, and the
    prompts are counted with the first draft's tokenizer, which is the target's.

    Args:
        recipe: the resolved recipe.
        source: its file, for messages.
        drafts: folders by name.

    Raises:
        ValueError: a draft, the target, the schedule or the held-out prompts can not be used.
    """
    stage, name = recipe.eval, recipe.target.model
    if stage.schedule is not None:
        read_schedule(stage.schedule, list(drafts), max(stage.k))
    metas = {}
    for draft, path in drafts.items():
        resolve(str(path))
        whole_draft(path)
        metas[draft] = read_draft(path).meta
    folder = bundled_folder(name) if name in BUNDLED else Path(name).expanduser()
    if (folder / "config.json").is_file():
        whole = resolve(name)
        config, tokenizer = load_config(whole, trust_remote_code=recipe.target.trust_remote_code), load_tokenizer(whole)
        for path in drafts.values():
            verify_draft(path, load_tokenizer(str(path)), tokenizer, config.vocab_size)
        for text in (text for draft, meta in metas.items() for text in doubts(draft, meta, model_hash(whole))):
            log.warning("%s", text)
        choose_prompts(recipe, tokenizer, getattr(config, "max_position_embeddings", None))
        return
    problems: list[str] = []
    told: list[str] = []
    published = find_config(name, "target.model", problems, told)
    if problems:
        raise CheckError("\n".join([f"{source}: a reason not to start", *(f"  {text}" for text in problems)]))
    for text in (*told, *(text for draft, meta in metas.items() for text in doubts(draft, meta, None))):
        log.warning("%s", text)
    for draft, path in drafts.items():
        rows, theirs = load_config(str(path)).vocab_size, (published or {}).get("vocab_size")
        log.warning("%s: its %d rows were not compared with the target's tokens (rows: %s)", draft, rows, theirs)
    positions = (published or {}).get("max_position_embeddings")
    if positions is None:
        log.warning("the target's positions are unknown: prompts that do not fit them are counted below all the same")
    choose_prompts(recipe, load_tokenizer(str(next(iter(drafts.values())))), positions)
