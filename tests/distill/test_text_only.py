"""A checkpoint that also sees images is a target by its text part: same logits, stock class, written once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from distill.look import find_config
from distill.models import UnsupportedModel, load_config, load_model, resolve
from distill.text_only import text_name
from tests.conftest import make_tokenizer

TEXT = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "max_position_embeddings": 128,
}  # fmt: skip
SEES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT), vision_config=SEES, mm_tokens_per_image=4, eos_token_id=[1, 106]
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder, max_shard_size="60KB")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))


def test_its_text_part_speaks_as_the_whole(whole: Path) -> None:
    folder = resolve(str(whole))
    assert folder != str(whole) and resolve(str(whole)) == folder == resolve(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["model_type"] == "gemma3_text" and config["eos_token_id"] == [1, 106]
    assert load_config(str(whole)).vocab_size == 512
    ids = torch.arange(24)[None]
    model = load_model(str(whole), "float32")
    assert type(model).__name__ == "Gemma3ForCausalLM"
    original = Gemma3ForConditionalGeneration.from_pretrained(whole, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, original(input_ids=ids).logits, rtol=0, atol=0)


def test_the_hubs_older_names_are_known(whole: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    for path in whole.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            (older / path.name).write_bytes(path.read_bytes())
    state = {}
    for path in sorted(whole.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            state[name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision")] = (
                weight
            )
    assert any(name.startswith("language_model.model.layers.0.") for name in state)
    save_file(state, older / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        new, old = (load_model(str(folder), "float32")(ids).logits for folder in (whole, older))
    torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_what_belongs_to_images_is_left_out(whole: Path) -> None:
    folder = Path(resolve(str(whole)))
    names = [name for path in folder.glob("*.safetensors") for name in load_file(path)]
    assert names and not [name for name in names if "vision" in name or "multi_modal" in name]
    with torch.device("meta"):
        own = AutoModelForCausalLM.from_config(load_config(str(folder)))
    assert set(names) >= {name for name, _ in own.named_parameters()}
    assert text_name("model.vision_tower.x") is None and text_name("multi_modal_projector.x") is None


def test_check_reads_its_text_sizes(whole: Path) -> None:
    problems: list[str] = []
    found = find_config(str(whole), "target.model", problems, [])
    assert not problems and found is not None and found["model_type"] == "gemma3_text" and found["hidden_size"] == 32


def test_a_type_without_a_text_part_stays_refused(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((whole / "config.json").read_text()) | {"model_type": "llava"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="model type 'llava' is not supported"):
        resolve(str(other))
