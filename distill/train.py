"""python -m distill.train RECIPE [key=value ...] [--check] [--resume RUN]: from a recipe to a distilled draft.

Exit code 0: the draft is there; 2: bad input; 1: the machine failed (disk full); 130 or 143: SIGINT or SIGTERM, with a
checkpoint to resume from.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distill.launch import ALONE, Board, Place, as_torchrun, check_processes, find_place, own_run
from distill.look import look
from distill.recipe import Recipe, doubts, dump, load_recipe, recipe_hash
from distill.runs import Interrupted, Run, Stop, check_run, create_run, reopen_run
from distill.schema_rounds import round_steps
from distill.surroundings import RunLog, first_host, quiet, stay_offline, talk

log = logging.getLogger("distill.train")  # not __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains.

    Args:
        argv: arguments; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m distill.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", help="a recipe, such as recipes/code.yaml (with --resume: the run's own)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to change")
    parser.add_argument("--check", action="store_true", help="validate, estimate, print the recipe, and stop")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder")
    args = parser.parse_intermixed_args(argv)
    if args.recipe and "=" in args.recipe and not Path(args.recipe).exists():
        args.recipe, args.overrides = None, [args.recipe, *args.overrides]
    if not args.recipe and args.resume is None:
        parser.error("a recipe is needed, for example recipes/code.yaml")
    talk()
    place, sayer = ALONE, "error"
    try:
        place = find_place(os.environ)
        if args.resume is not None:
            check_run(args.resume)
        source = args.recipe or args.resume / "recipe.json"
        recipe = load_recipe(source, args.overrides)
        if args.check:
            lines = look(recipe, str(source)) if place.rank == 0 else []
            sys.stdout.write(dump(recipe) + "\n" if place.rank == 0 else "")
            sys.stdout.flush()
            sys.stderr.write("".join(f"{text}\n" for text in lines))  # last, where a person looks
            return 0
        check_processes(recipe.trainer, place)
        if place.rank:
            sayer = f"process {place.rank}: error"  # of its own from here on
        with Stop().listening() as stop:
            return _run(recipe, args.resume, stop, place)
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except (ValueError, OSError) as error:
        if place.rank == 0 or sayer != "error":  # what all processes find is said once
            sys.stderr.write(f"{sayer}: {error}\n")
        return 2 if isinstance(error, ValueError) else 1


def _run(recipe: Recipe, resume: Path | None, stop: Stop, place: Place) -> int:
    """Meets the other processes, if there are any; the first one opens the run, the others join it."""
    stay_offline(recipe)
    quiet()
    if not place.launched:
        return _lead(recipe, resume, stop, place, None) if place.rank == 0 else _join(recipe, stop, place, None)
    if place.by == "srun":
        as_torchrun(os.environ, first_host(os.environ), place)
    board = Board(place)
    if place.rank:
        return _join(recipe, stop, place, board)
    code = 1
    try:
        code = _lead(recipe, resume, stop, place, board)
    finally:
        if not board.told:
            board.tell(None, code)
    return code


def _lead(recipe: Recipe, resume: Path | None, stop: Stop, place: Place, board: Board | None) -> int:
    """Opens the run folder, tracks the run, and gives it an honest end."""
    from distill.provenance import collect
    from distill.track import start

    provenance = collect(recipe.seed)
    run = create_run(recipe, provenance) if resume is None else reopen_run(resume, recipe, provenance)
    handler = RunLog(run.folder / "train.log")
    logging.getLogger().addHandler(handler)
    log.info("run %s", run.folder)
    for doubt in doubts(recipe):
        log.warning("%s", doubt)
    try:
        if _finished(recipe, run):
            return 0
        config = {
            "recipe": recipe.model_dump(mode="json"),
            "recipe_sha256": recipe_hash(recipe),
            "provenance": provenance,
            "target": recipe.target.model,
            "draft": recipe.draft.model or f"{recipe.draft.kind} of {recipe.target.model}",
        }
        tracker = start(recipe.track, run.folder, run.run_id, config, attempt=run.attempt)
        code = 1
        try:
            from distill.flow import train  # torch and all else

            train(recipe, run, stop, tracker, place, board)
            code = 0
        except Interrupted as interrupt:
            code = 128 + interrupt.signum
            has = f"its newest checkpoint is {run.last}" if run.last.exists() else "it has no checkpoint yet"
            log.error("interrupted: no draft was exported; %s", has)
            log.error("go on with: python -m distill.train --resume %s", run.folder)
            raise
        except (ValueError, OSError) as error:
            log.debug("failed", exc_info=True)  # train.log keeps where; the person gets the message alone
            if isinstance(error, OSError):
                log.error("what is saved is whole; once that is put right: --resume %s", run.folder)
            raise
        finally:
            stop.deferred = True  # a signal that comes only now changes nothing any more
            with suppress(OSError):  # a full disk, which must not hide what is being told
                tracker.finish(code)
            if code != 1:  # all processes end alike, by the last step or a signal
                from distill.ranks import part

                part()
        return 0
    finally:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):
            handler.close()


def _join(recipe: Recipe, stop: Stop, place: Place, board: Board | None) -> int:
    """What every process but the first does: it trains with it and writes nothing."""
    from distill.flow import train
    from distill.ranks import FirstFailed, part
    from distill.track import NullTracker

    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("distill").setLevel(logging.WARNING)
    run, code = (own_run(os.environ), 0) if board is None else board.listen()
    if run is None:
        return code
    try:
        train(recipe, run, stop, NullTracker(), place)
    except (Interrupted, FirstFailed) as end:
        # All end alike, and the first says why. The launcher inside the first kills it when a child it started fails.
        if place.by != "first":
            code = 128 + end.signum if isinstance(end, Interrupted) else 1
    part()
    return code


def _finished(recipe: Recipe, run: Run) -> bool:
    """Has the run taken all its steps and exported their draft? Says what a resumption does to the schedule."""
    if run.attempt == 0 or (newest := run.newest_whole()) is None:
        return False
    from distill.checkpoint import read_draft
    from distill.fit import checkpoint_step

    step, end = checkpoint_step(newest), round_steps(recipe.draft.rounds, recipe.distill.max_steps)[-1]
    # A run that was made longer has its former draft until the new one is there.
    if step >= end and (run.draft / "draft.json").exists() and read_draft(run.draft).meta.get("steps", end) >= end:
        if not run.is_linked():
            run.link_latest()
        log.info("nothing to do: the run is at step %d of %d and its draft is %s", step, end, run.draft)
        return True
    log.info("resuming at step %d of %d; the learning rate follows the cosine that ends at step %d", step, end, end)
    return False


if __name__ == "__main__":
    sys.exit(main())
