"""A target's GGUF file is a target: its configuration, tokenizer and weights, dequantised once."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, RopeScalingType
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.common import gguf
from heads.common.typed import typed
from inference.target import loading
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from tests.refusals import refuses
from tests.train import jobs
from tests.train.publishing import VALUES
from train.plan import plan
from train.publish import PublishConfig, publish

LAYERS, HEADS, KV_HEADS, WORDS = 4, 4, 2, 60
CONFIG = LlamaConfig(
    vocab_size=WORDS + 4, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, max_position_embeddings=160, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    **{
        f"model.layers.{i}.{theirs}": f"blk.{i}.{ours}"
        for i in range(LAYERS)
        for theirs, ours in {
            "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        }.items()
    },
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    built: Any = AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16)
    return built.float().eval()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def write(file: Path, model: Any, architecture: str = "llama", scaling: str = "") -> Path:
    """Write a model as llama.cpp's converter does."""
    writer = GGUFWriter(file, architecture)
    if scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", torch.full((8,), 8.0).numpy())
    elif scaling:
        writer.add_rope_scaling_type(RopeScalingType(scaling))
    writer.add_context_length(160)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(ord("!") + i) for i in range(WORDS - 1)]
    writer.add_token_list(["<bos>", "<eos>", "<|user|>", "<|assistant|>", *letters[:-1], "AB", "BA"])
    writer.add_token_types([3] * 4 + [1] * WORDS)  # control, normal
    writer.add_token_merges(["A B", "B A"])  # transformers 5.17 reads a list of one as a string
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(".".join(stem.split(".")[-2:]))
        value = weight
        if heads is not None:  # llama.cpp has the two values of each rotary pair side by side
            value = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{NAMES[stem]}.{kind}", value.numpy(), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_file_loads_as_the_model_that_it_was_made_of(
    tmp_path: Path, model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "toy-Q8_0.gguf", model)
    token = torch.randint(4, CONFIG.vocab_size, (1, 24))
    for path in (str(file), str(tmp_path)):  # the second one reads the folder that the first has made
        target = Target.load(path, "float32", "cpu")
        torch.testing.assert_close(target.model(token).logits, model(token).logits, atol=1e-5, rtol=0)  # eps is in fp32
        assert (target.tokenizer.eos_token, target.tokenizer.chat_template) == ("<eos>", TEMPLATE)
        assert len([*cache.glob("toy-Q8_0-*/model.safetensors")]) == 1
    ends = EmbeddingsOnly.load(str(file), "float32", "cpu", False)
    assert ends.spec.fingerprint == target.spec.fingerprint
    monkeypatch.setattr(gguf, "metadata", lambda *_, **__: {"eos_token_id": 2})  # transformers 5.17 reads 0
    assert gguf.tokenizer_of(str(tmp_path), {"gguf_file": file.name}).eos_token_id == 2


def test_a_file_is_planned_in_16_bits_and_nothing_is_written(tmp_path: Path, model: Any, cache: Path) -> None:
    file = write(tmp_path / "toy.gguf", model)
    words = [
        f"model.path={file}",
        "head=eagle",
        "device=h100",
        "data.length=64",
        "trainer.micro_tokens=64",
        "launcher=inline",
    ]
    planned = plan(jobs.placed(jobs.configured(words)))
    inner = sum(p.numel() for p in model.parameters()) - 2 * CONFIG.vocab_size * 64
    assert planned.memory.resident["target: layers"] == 2 * inner
    assert loading.load_tokenizer(str(file), False).chat_template == TEMPLATE
    assert not cache.exists()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.gguf", "b.gguf"], r"holds 2 GGUF files: give one as model.path, such as .*a\.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], r"is a part of a split GGUF: join them by llama-gguf-"),
    ],
)
def test_a_folder_that_leaves_the_file_open_is_one_line(names: list[str], told: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    refuses(told, Target.load, str(tmp_path), "float32", "cpu")
    (tmp_path / "model.safetensors").touch()
    assert gguf.resolve_gguf(str(tmp_path)) == (str(tmp_path), {})


def test_an_architecture_that_transformers_does_not_know_is_one_line(tmp_path: Path, model: Any, cache: Path) -> None:
    file = write(tmp_path / "odd.gguf", model, "nonesuch")
    refuses("nonesuch", Target.load, str(file), "float32", "cpu")
    assert not cache.exists()


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear", "none"])
def test_rotary_scaling_that_transformers_drops_is_refused(tmp_path: Path, model: Any, scaling: str) -> None:
    file = write(tmp_path / "long.gguf", model, scaling=scaling)
    if scaling == "none":
        assert Target.load(str(file), "float32", "cpu").model.config.rope_parameters["rope_type"] == "default"
        return
    with pytest.raises(ValueError, match=r"long\.gguf has rotary scaling, which transformers drops"):
        Target.load(str(file), "float32", "cpu")


def test_a_head_of_a_file_is_trained_evaluated_and_published_as_gguf(
    tmp_path: Path, model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    file = write(tmp_path / "toy.gguf", model)
    draw = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": role, "content": "".join(draw.choices("CDEFGHIJKL", k=20))} for role in ("user", "assistant")
            ]
        }
        for _ in range(40)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, chats)))
    out = tmp_path / "outputs"
    words = [f"model.path={file}", f"data.path={tmp_path / 'log.jsonl'}", *jobs.QUICK, "head=eagle3", "trainer.steps=8",
             "head.draft_vocab=null", "head.feature_norm=false", "head.norm_output=false", f"out={out}"]  # fmt: skip
    jobs.finish(jobs.start(words))
    row = next(row for row in json.loads((out / "report.json").read_text())["rows"] if row["drafter"] != "plain")
    assert row["lossless"]["failed"] == 0
    values = {**VALUES, "dry_run": True, "repo": "me/toy-eagle3", "format": "gguf", "run": str(out)}
    published = publish(typed(PublishConfig, values), HfApi())
    head, target = GGUFReader(published / "head.gguf"), GGUFReader(file)
    tokens = "tokenizer.ggml.tokens"
    assert head.fields[tokens].contents() == target.fields[tokens].contents()
    assert head.fields["general.architecture"].contents() == "eagle3"
