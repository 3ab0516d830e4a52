"""Recipes: every shipped one loads, every mistake is named, nothing is converted or ignored."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from distill.recipe import Recipe, RecipeError, dump, load_recipe, recipe_hash

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))
SMALL = "name: small\ndraft: {layers: [0, 2, 5]}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def mistakes(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    # Runs of one name share a folder, so a recipe in a target's folder has the target in its name.
    assert recipe.name == "-".join(path.relative_to(ROOT / "recipes").with_suffix("").parts)
    (tmp_path / "recipe.json").write_text(dump(recipe), encoding="utf-8")
    again = load_recipe(tmp_path / "recipe.json")
    assert again == recipe
    assert recipe_hash(again) == recipe_hash(recipe)


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"code", "math", "qa", "tiny"}


@pytest.mark.alone
def test_loading_needs_no_torch_and_under_two_seconds() -> None:
    code = (
        "import sys; from distill.recipe import load_recipe, dump; dump(load_recipe('recipes/code.yaml'));"
        "print(sorted({'torch', 'transformers', 'lightning', 'datasets'} & set(sys.modules)))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("text, value", [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("0.0001", 1e-4), ("1E4", 1e4), ("1", 1.0)])
def test_t60_exponents_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    assert load_recipe(write(tmp_path, SMALL + f"distill: {{lr: {text}}}\n")).distill.lr == value
    assert load_recipe(write(tmp_path, SMALL), [f"distill.lr={text}"]).distill.lr == value


def test_t60_a_number_in_quotes_is_refused_by_name(tmp_path: Path) -> None:
    message = mistakes(tmp_path, SMALL + 'distill: {lr: "1e-4"}\n')
    assert 'distill.lr = "1e-4": allowed is a finite number > 0' in message


def test_yaml_1_2_words_stay_words(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALL + "traffic: {domain: no, train: data.jsonl}\n"))
    assert recipe.traffic.domain == "no"


def test_t61_misspelt_keys_are_named_with_place_and_nearest(tmp_path: Path) -> None:
    message = mistakes(tmp_path, SMALL + "distill:\n  learing_rate: 5.0e-5\n  temprature: 2\n")
    assert "recipe.yaml:4: distill.learing_rate is no key here; nearest is distill.lr" in message
    assert "recipe.yaml:5: distill.temprature is no key here; nearest is distill.temperature" in message
    message = mistakes(tmp_path, SMALL + "lr: 1e-3\n")
    assert "lr is no key here; nearest is distill.lr" in message
    message = mistakes(tmp_path, SMALL + "distill: {loss: {forward_kll: 1.0}}\n")
    assert "distill.loss.forward_kll is no key here; nearest is distill.loss.forward_kl" in message


def test_t61_duplicate_keys_are_refused_with_both_lines(tmp_path: Path) -> None:
    message = mistakes(tmp_path, SMALL + "distill:\n  lr: 1e-3\n  lr: 1e-4\n")
    assert "recipe.yaml:5: distill.lr is given twice, first at" in message
    assert "recipe.yaml:4" in message


@pytest.mark.parametrize(
    "override, named",
    [
        ("eval.k=[0]", "eval.k[0] = 0: allowed is a whole number >= 1 and <= 16"),
        ("eval.k=[-1]", "eval.k[0] = -1"),
        ("eval.k=[2.5]", "eval.k[0] = 2.5"),
        ("eval.k=[17]", "eval.k[0] = 17"),
        ("eval.k=[3, 3]", "names a value twice"),
        ("draft.layers=[]", "draft.layers = []: allowed is a non-empty list"),
        ("draft.layers=[5, 2, 0]", "draft.layers = [5, 2, 0] must be strictly increasing"),
        ("draft.layers=[0, 0, 1]", "must be strictly increasing"),
        ("draft.layers=[-1, 2]", "draft.layers[0] = -1"),
        ("draft.layers=null", "draft.layers is missing"),
        ("draft.num_layers=3", "draft.num_layers is given beside layers"),
        ("draft.head={kind: shortlist}", "draft.head.size is needed for kind: shortlist"),
        ("draft.head={kind: shortlist, size: 0}", "draft.head.size = 0"),
        ("draft.head={kind: shortlist, size: -1}", "draft.head.size = -1"),
        ("draft.head={kind: shortlist, size: 4.0}", "draft.head.size = 4.0"),
        ("draft.head={kind: full, size: 64}", "draft.head.size belongs to kind: shortlist"),
        ("draft.head={kind: low_rank}", "draft.head.rank is needed"),
        ("draft.kind=pretrained", "draft.model is missing"),
        ("draft.size_frac=[0.2, 0.1]", "[low, high] with low < high"),
        ("eval.temperature=-1", "eval.temperature = -1: allowed is a finite number >= 0"),
        ("eval.temperature=.nan", "eval.temperature = NaN"),
        ("distill.temperature=.inf", "distill.temperature = Infinity"),
        ("responses.temperatures=[-0.5]", "responses.temperatures[0] = -0.5"),
        ("eval.top_p=0", "eval.top_p = 0: allowed is a finite number > 0 and <= 1"),
        ("eval.draft_top_p=1.5", "eval.draft_top_p = 1.5"),
        ("responses.batch_size=0", "responses.batch_size = 0: allowed is a whole number >= 1"),
        ("responses.loop_repeats=1", "responses.loop_repeats = 1"),
        ("distill.max_steps=0", "distill.max_steps = 0"),
        ("distill.max_steps=10", "distill.warmup_steps = 20 must be less than"),
        ("distill.tokens_per_step=100", "distill.tokens_per_step = 100 cannot hold a row"),
        ("distill.jsd_beta=0.001", "distill.jsd_beta = 0.001"),
        ("distill.loss={tv: 0}", "distill.loss has no weight above 0"),
        ("distill.loss={}", "distill.loss = {}"),
        ("eval.min_requests=50", "eval.num_requests = 8 is less than"),
        ("eval.num_requests={shrt: 9}", "eval.num_requests.shrt is no key here; nearest is eval.num_requests.short"),
        ("eval.num_requests={}", "eval.num_requests = {}: allowed is a whole number >= 1 or one or more of the keys"),
        ("eval.num_requests={short: 0}", "eval.num_requests.short = 0: allowed is a whole number >= 1"),
        ("eval.num_requests={short: 9, long: 2}", "eval.num_requests.long = 2 is less than eval.min_requests = 5"),
        ("eval.policies=[]", "eval.policies = []: allowed is a non-empty list"),
        ("eval.policies=[clever]", "fixed | adaptive"),
        ("eval.batches=[0]", "eval.batches[0] = 0: allowed is a whole number >= 1 and <= 64"),
        ("eval.batches=[4, 4]", "names a value twice"),
        ("eval.tree_nodes=1", "eval.tree_nodes = 1"),
        ("eval.self_layers=0", "eval.self_layers = 0"),
        ("eval.budget_min=0", "eval.budget_min = 0"),
        ("eval.objective=fastest", "allowed is latency@p50 | latency@p95 | throughput@B"),
        ("eval.objective=throughput@16", "asks for batch 16; eval.batches = [1]"),
        ("eval.rule=block", "eval.rule = 'block' belongs to sampling"),
        ("eval.draft_temperatures=[0.5]", "eval.draft_temperatures belong to sampling"),
        ("eval={tree_nodes: 8, batches: [4]}", "trees are tried at batch 1"),
        (
            "eval={temperature: 1.0, draft_temperature: 0.5, draft_temperatures: [0.5]}",
            "repeats eval.draft_temperature",
        ),
        ("eval.domains=[law]", "eval.domains names 'law'"),
        ("traffic.domain=law", "traffic.domain = 'law' has no bundled prompts"),
        ("target.dtype=fp16", "float32 | bfloat16 | float16"),
        ("trainer.devices=true", "trainer.devices = true"),
        ("name=a b", 'name = "a b"'),
        ("name=null", "name = null"),
        ("draft=null", "draft = null"),
    ],
)
def test_t62_values_out_of_range_are_named_with_what_is_allowed(tmp_path: Path, override: str, named: str) -> None:
    message = mistakes(tmp_path, SMALL, override)
    assert named in message
    assert f"override '{override}'" in message or "draft.layers" in message or "warmup" in message or "num_" in message


def test_requests_by_group_are_kept_as_they_were_written(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALL), ["eval.num_requests={short: 60, medium: 30, long: 12}"])
    assert recipe.eval.model_dump(mode="json")["num_requests"] == {"short": 60, "medium": 30, "long": 12}
    assert [recipe.eval.num_of(group) for group in ("short", "medium", "long")] == [60, 30, 12]
    (tmp_path / "resolved.json").write_text(dump(recipe))
    assert load_recipe(tmp_path / "resolved.json") == recipe
    some = load_recipe(write(tmp_path, SMALL), ["eval.num_requests={short: 60}"]).eval
    assert (some.num_of("short"), some.num_of("long")) == (60, 0)
    assert load_recipe(write(tmp_path, SMALL)).eval.num_of("long") == 8


def test_t62_training_and_held_out_files_must_differ(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    message = mistakes(
        tmp_path, SMALL, f"traffic.train={tmp_path}/*.jsonl", f"traffic.heldout=[{tmp_path}/b.jsonl, bundled]"
    )
    assert "traffic.heldout" in message and "b.jsonl" in message
    assert "is what traffic.train reads too" in mistakes(
        tmp_path, SMALL, "traffic.train=a/b", "traffic.heldout=a/b", "traffic.split_heldout=train"
    )
    fine = load_recipe(write(tmp_path, SMALL), ["traffic.train=a/b", "traffic.heldout=a/b"])
    assert fine.traffic.split_heldout == "test"


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ([], {"forward_kl": 1.0}),
        (["distill.objective=greedy"], {"forward_kl": 1.0, "cross_entropy": 0.5}),
        (["distill.objective=sampling"], {"forward_kl": 1.0}),
        (["distill.objective=sampling@0.7"], {"forward_kl": 1.0}),
        (["distill.objective=null", "distill.loss={tv: 2.0}"], {"tv": 2.0}),
    ],
)
def test_the_objective_names_losses_where_none_are_given(
    overrides: list[str], loss: dict[str, float], tmp_path: Path
) -> None:
    recipe = load_recipe(write(tmp_path, SMALL), overrides)
    assert recipe.distill.loss == loss
    assert json.loads(dump(recipe))["distill"]["loss"] == loss
    assert recipe.distill.temperature == (0.7 if recipe.distill.objective == "sampling@0.7" else 1.0)
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, SMALL), ["distill.objective=speed"])
    assert len(caught.value.problems) == 1  # the loss that depends on it is no second mistake


def test_an_objective_beside_other_losses_is_refused_and_a_resolved_recipe_is_not(tmp_path: Path) -> None:
    message = mistakes(tmp_path, SMALL, "distill.objective=sampling", "distill.loss={kl_tv: 1.0}")
    assert "distill.objective = 'sampling' stands for loss = {'forward_kl': 1.0}" in message
    assert "distill.loss = {'kl_tv': 1.0}; drop one of the two" in message
    message = mistakes(tmp_path, SMALL, "distill.objective=sampling@0.7", "distill.temperature=1.0")
    assert "'sampling@0.7' stands for temperature = 0.7, but distill.temperature = 1.0; drop one" in message
    for wrong in ("sampling@", "sampling@0", "sampling@x", "greedy@1", "speed"):
        message = mistakes(tmp_path, SMALL, f"distill.objective={wrong}")
        assert f'distill.objective = "{wrong}": allowed is greedy | sampling | sampling@T' in message
    recipe = load_recipe(write(tmp_path, SMALL), ["distill.objective=sampling@0.7"])
    (tmp_path / "resolved.json").write_text(dump(recipe))
    assert load_recipe(tmp_path / "resolved.json") == recipe


def test_all_mistakes_come_in_one_message(tmp_path: Path) -> None:
    text = (
        "name: x\nsed: 1\ndraft: {layers: [2, 1], size_frac: [1, 0]}\ntraffic: {train: 5}\neval: {k: [0], top_p: 2}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    assert len(caught.value.problems) == 6
    for key in ("sed", "draft.layers", "draft.size_frac", "traffic.train", "eval.k[0]", "eval.top_p"):
        assert any(f": {key} " in problem for problem in caught.value.problems), key


def test_overrides_replace_add_and_are_parsed_as_yaml(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, SMALL),
        [
            "distill.loss={tv: 1.0}",
            "distill.loss.reverse_kl=0.5",
            "traffic.train=data/*.jsonl",
            "eval.k=[1, 4]",
            "seed=7",
        ],
    )
    assert recipe.distill.loss == {"tv": 1.0, "reverse_kl": 0.5}
    assert recipe.traffic.train == "data/*.jsonl"
    assert recipe.eval.k == (1, 4) and recipe.seed == 7


@pytest.mark.parametrize(
    "override, named",
    [
        ("seed", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("seed.x=1", "override 'seed.x=1': seed = "),
        ("name.x=1", "name = 'small' holds no keys"),
        ("eval.k=[1", "not valid YAML"),
        ("traffic.train=*.jsonl", "quote the value"),
        ("name=2024-01-01", "is read as a date; quote it"),
    ],
)
def test_a_broken_override_is_named(tmp_path: Path, override: str, named: str) -> None:
    assert named in mistakes(tmp_path, SMALL, override)


@pytest.mark.parametrize("text", ["", "- 1\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "no mapping" in mistakes(tmp_path, text)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "missing.yaml")
    assert "recipe.yaml:2:" in mistakes(tmp_path, "name: x\n\tdraft: 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "latin.yaml")


def test_recipes_are_frozen_and_hash_by_meaning(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALL))
    with pytest.raises(ValidationError):
        recipe.seed = 1  # type: ignore[misc]
    other = load_recipe(write(tmp_path, "draft:\n  layers:\n  - 0\n  - 2\n  - 5\nname: 'small'\nseed: 0\n"))
    assert recipe_hash(recipe) == recipe_hash(other)
    assert recipe_hash(load_recipe(write(tmp_path, SMALL), ["seed=1"])) != recipe_hash(recipe)
    assert isinstance(recipe, Recipe)


@pytest.mark.parametrize(
    "text, said",
    [
        ("name: x\x01", "not valid YAML: character"),
        ("track: &a {tags: [*a]}", "an alias holds itself"),
        ("[a]: 4", "used as a key"),
        ("name: x\n? {a: b}\n: 1", "used as a key"),
        ("a: " + "[" * 5000, "nested too deeply"),
        (r'{a: "x\uD800y"}', r"a = 'x\\ud800y' holds half a character"),
        (r'{"\uD800": 1}', "key holds half a character"),
        ("a: 0x" + "f" * 4000, "a whole number of 16000 bits"),
    ],
)
def test_yaml_that_no_recipe_can_hold_is_one_message(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=said):
        load_recipe(path)
    with pytest.raises(RecipeError, match=said):
        load_recipe("recipes/code.yaml", ["traffic.system=" + text])
