"""The target: its features, embeddings, tokenizer, chat template and devices; and its refusals."""

import re
import weakref
from collections import Counter
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from data.batches import check_known, pack
from data.text.masks import Sample, samples_of
from data.text.prompts import Prompt, prompt_of
from data.text.records import parse
from eval.inputs.workloads import MASKING
from inference.run import chat_ids
from inference.target import probe
from inference.target.checkpoint import fingerprint
from inference.target.config import DTYPES, device_named, fast_dtype, model_config, use_device
from inference.target.embeddings import TargetEmbeddings, final_norm
from inference.target.embeddings_only import EmbeddingsOnly, load_target
from inference.target.loading import load_tokenizer
from inference.target.target import Target
from inference.target.tokenizer import RenderError, text_ids, tokenize
from tests import assistants, families, toys
from tests.data.families import family_tokenizer
from tests.refusals import refuses
from tests.tokenizers import trained

Log = pytest.LogCaptureFixture


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_features_are_the_models_hidden_states(name: str) -> None:
    target = toys.target(name, torch.float64)
    token = torch.tensor([toys.prompt(4, 12)])
    found = target.features(token, torch.zeros_like(token), (0, 1))
    theirs = target.model(input_ids=token, output_hidden_states=True)
    near = 1e-5 if name == "gemma2" else 1e-9
    torch.testing.assert_close(found.hidden[:, :, 0], theirs.hidden_states[1], rtol=near, atol=near)
    torch.testing.assert_close(found.hidden[:, :, 1], theirs.hidden_states[2], rtol=near, atol=near)
    torch.testing.assert_close(found.last_hidden, theirs.hidden_states[-1], rtol=near, atol=near)
    torch.testing.assert_close(target.embeddings.logits(found.last_hidden), theirs.logits, rtol=near, atol=near)


def test_a_dynamic_rope_is_that_of_the_model_as_it_came_up_to_the_contexts_end() -> None:
    target = toys.target("dynamic rope", torch.float64)
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(toys.ROUTED["dynamic rope"]).double().eval()
    assert theirs.model.rotary_emb.rope_type == "dynamic"
    token = torch.tensor([toys.prompt(3, target.max_model_len)])
    with torch.no_grad():
        before, found = theirs(token).logits, target.model(token).logits
    torch.testing.assert_close(found, before, rtol=1e-9, atol=1e-9)


def test_what_auto_chose_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    LlamaForCausalLM(LlamaConfig(**toys.SIZES)).save_pretrained(tmp_path)
    toys.tokenizer().save_pretrained(tmp_path)
    for fast, dtype, said in [("bfloat16", "auto", True), ("float32", "auto", False), ("bfloat16", "bfloat16", False)]:
        monkeypatch.setattr("inference.target.config.fast_dtype", lambda _, fast=fast: DTYPES[fast])
        caplog.clear()
        assert Target.load(str(tmp_path), dtype, "cpu").dtype == DTYPES[fast]
        told = "a checkpoint in float32, run in bfloat16, fast here; model.dtype=float32 keeps it"
        assert (told in caplog.text) == said


def test_tokens_beyond_the_embedding_are_refused() -> None:
    tokenizer = toys.tokenizer()
    tokenizer.add_tokens(["<pad>", "<more>"])
    model = LlamaForCausalLM(LlamaConfig(**toys.SIZES))
    target = Target(model, tokenizer, "beyond")
    good, bad = pack([Sample("a", [1, 39, 2], [1, 1, 1])], 4), pack([Sample("b", [1, 41, 2], [0, 0, 0])], 4)
    check_known(good, [Prompt("p", [39], "")], tokenizer, target.embeddings.vocab_size)
    with pytest.raises(ValueError, match=r"the data holds token 41 \('<more>'\), but the target knows 40"):
        check_known(bad, [], tokenizer, target.embeddings.vocab_size)
    with pytest.raises(ValueError, match=r"^prompt p, held out of the data, holds token 40 \('<pad>'\)"):
        check_known(good, [Prompt("p", [1, 40, 2], "")], tokenizer, target.embeddings.vocab_size)


def test_a_pass_keeps_no_layer_that_nobody_asked_for() -> None:
    """The outputs of all layers of a deep target would fill the memory."""
    target = toys.target("llama", torch.float64)
    alive: list[weakref.ref[torch.Tensor]] = []

    def watch(_module: object, _args: object, output: object) -> None:
        alive.append(weakref.ref(output[0] if isinstance(output, tuple) else output))

    held = []
    handles = [layer.register_forward_hook(watch) for layer in target.decoder_layers]
    norm = target.base.norm.register_forward_hook(lambda *_: held.extend(each() is not None for each in alive))
    token = torch.tensor([toys.prompt(4, 12)])
    target.features(token, torch.zeros_like(token), (1,))
    for handle in (*handles, norm):
        handle.remove()
    assert held == [i in (1, len(target.decoder_layers) - 1) for i in range(len(target.decoder_layers))]
    assert held.count(False) > 0


def test_training_features_run_no_lm_head(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()

    def called(*_: object) -> None:
        raise AssertionError("lm_head ran")

    monkeypatch.setattr(target.embeddings.lm_head, "forward", called)
    token = torch.tensor([toys.prompt(4, 12)])
    assert target.features(token, torch.zeros_like(token), ()).last_hidden.shape == (1, 12, 32)


class ScaledLogits(LlamaForCausalLM):
    """A model whose logits are not lm_head(last hidden state)."""

    def forward(self, *args: object, **kwargs: object) -> object:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 3 + torch.arange(out.logits.shape[-1])
        return out


def test_a_wrong_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="lm_head"):
        Target(ScaledLogits(LlamaConfig(**toys.SIZES)), toys.tokenizer(), "scaled")


def test_an_attention_without_tree_masks_is_left_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "attention_mask", lambda *_: None)
    torch.manual_seed(1)
    target = Target(LlamaForCausalLM(LlamaConfig(**toys.SIZES)), toys.tokenizer(), "blind")
    assert target.takes_trees is False


def test_a_cache_that_cannot_be_rolled_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_tree_is_exact", lambda *_: False)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        Target(LlamaForCausalLM(LlamaConfig(**toys.SIZES)), toys.tokenizer(), "recurrent")


def test_unloadable_targets_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path="):
        Target.load(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="choose auto or one of"):
        Target.load(str(tmp_path), dtype="int3")


def test_fingerprint_knows_the_weights_not_the_dtype() -> None:
    assert toys.target("llama", torch.float64).spec.fingerprint == toys.target("llama").spec.fingerprint
    torch.manual_seed(7)
    other = Target(LlamaForCausalLM(LlamaConfig(**toys.SIZES)), toys.tokenizer(), "other")
    assert other.spec.fingerprint != toys.target("llama").spec.fingerprint


def test_fast_dtype_is_one_the_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_dtype(torch.device("cuda")) == torch.bfloat16, "of a plan"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for able, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", Mock(return_value=able))
        assert fast_dtype(torch.device("cuda")) == dtype
    for able, dtype in (("amx_bf16", torch.bfloat16), ("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: {able: True}, raising=False)
        assert fast_dtype(torch.device("cpu")) == dtype


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return the devices that were made the current one, of a machine with four GPUs."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(made))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made[-1].index)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


def test_a_gpu_has_the_index_that_tensors_there_have(current: list[torch.device]) -> None:
    assert [str(device_named(name)) for name in ("cuda", "cuda:2", "cpu")] == ["cuda:0", "cuda:2", "cpu"]
    assert str(use_device("cuda")) == "cuda:0"
    with pytest.raises(ValueError, match="cuda:4, and torch sees 4 accelerators"):
        use_device("cuda:4")
    assert not current


def test_a_gpu_that_is_named_is_the_one_that_a_single_process_works_on(current: list[torch.device]) -> None:
    assert use_device("cuda:3") == torch.device("cuda:3")
    assert current == [torch.device("cuda:3")]
    assert str(device_named("cuda")) == "cuda:3"


@pytest.mark.parametrize("generation", [True, False])
def test_what_ends_an_answer_is_the_configurations_and_the_tokenizers(tmp_path: Path, generation: bool) -> None:
    LlamaForCausalLM(LlamaConfig(**toys.SIZES | {"eos_token_id": [7, 9]})).save_pretrained(tmp_path)
    tokenizer = toys.tokenizer()
    tokenizer.eos_token = "w5"
    tokenizer.save_pretrained(tmp_path)
    if not generation:
        (tmp_path / "generation_config.json").unlink()
    assert Target.load(str(tmp_path), "float32", "cpu").eos == {5, 7, 9}


def test_a_tokenizer_that_fails_at_a_text_is_named(tmp_path: Path) -> None:
    """Without an unknown token, a word that is not in its list is an error of the library, when it comes."""
    made = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))  # which is not in it
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path), False)
    assert tokenize(found, "a b")["input_ids"] == [0, 1]
    refuses(f"^{re.escape(str(tmp_path))}: its tokenizer fails at a text", text_ids, "a c", found)
    with pytest.raises(UnicodeEncodeError):
        tokenize(found, ["a", "\ud800"])
    made = Tokenizer(WordLevel({"c": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer loads from there"):
        load_tokenizer(str(tmp_path), False)


def test_a_prompt_has_no_end_token_that_the_tokenizer_appends() -> None:
    made = deepcopy(trained("sentencepiece"))
    whole = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.backend_tokenizer.post_processor = whole
    for text in ("the cat", "a dog</s> ran", "the mat</s>", ""):
        assert text_ids(text, made) == trained("sentencepiece")(text)["input_ids"]
        assert made(text)["input_ids"] == [*text_ids(text, made), 1]
    assert text_ids("<s>the cat", made) == text_ids("the cat", made), "it begins with one beginning"
    made.bos_token = "</s>"
    made.backend_tokenizer.post_processor = processors.ByteLevel()
    assert text_ids("</s>", made) == [1], "a text that is nothing else stays"


RECORD = parse(
    {"id": "r", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 0, ""
)
BROKEN = ("{% for %}", "{{ 1|nothing }}", "{% break %}", "{% for a in [1] %}" * 30 + "{% endfor %}" * 30)
FAILING = (
    "{{ 1 / 0 }}", "{% for a in range(10 ** 9) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages.__class__.__mro__ }}", "{{ 1 + 'a' }}", "{% for a, b in [1] %}{% endfor %}", "{% include 'x' %}",
    "{{ raise_exception('no \x1b[2J\n way') }}", "{{ raise_exception('a' * 99999) }}",
)  # fmt: skip


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    made = copy(family_tokenizer("chatml", False))
    made.chat_template, made.name_or_path = template, "toy"
    return made


@pytest.mark.parametrize("template", [*FAILING, *BROKEN])
def test_what_a_template_raises_is_one_line(template: str) -> None:
    tokenizer = tokenizer_with(template)
    for render in (
        lambda: prompt_of(RECORD, tokenizer),
        lambda: samples_of(RECORD, tokenizer, "f", replace(MASKING, on_bad="fail"), Counter()),
        lambda: chat_ids([{"role": "user", "content": "a"}], tokenizer),
    ):
        with pytest.raises(ValueError, match=r"the chat template of toy (refuses it|is broken): .") as caught:
            render()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400
    assert isinstance(caught.value, RenderError) == (template in FAILING)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("gpt2", "float32")])
def test_the_ends_are_the_whole_targets(tmp_path: Path, name: str, dtype: str) -> None:
    path = assistants.save(toys.target(name).model, toys.tokenizer(), tmp_path / "target")
    whole, bare = Target.load(str(path), dtype, "cpu"), EmbeddingsOnly.load(str(path), dtype, "cpu", False)
    assert bare.spec == whole.spec
    assert (bare.dtype, bare.device) == (whole.dtype, whole.device)
    token = torch.arange(toys.VOCAB)
    assert torch.equal(bare.embeddings.embed(token), whole.embeddings.embed(token))
    state = torch.randn(3, 32, dtype=whole.dtype)
    assert torch.equal(bare.embeddings.logits(state), whole.embeddings.logits(state))
    count = whole.spec.num_layers
    assert torch.equal(bare.norm(state), final_norm(whole.base, count)(state))
    assert bare.tokenizer("w3 w5")["input_ids"] == whole.tokenizer("w3 w5")["input_ids"]
    held = {id(p): p.numel() for part in (bare.embeddings, bare.norm) for p in part.parameters() if not p.is_meta}
    ends = whole.embeddings.embedding, whole.embeddings.lm_head, final_norm(whole.base, count)
    assert sum(held.values()) == sum(p.numel() for p in {id(p): p for part in ends for p in part.parameters()}.values())


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "kimi_linear", "nemotron_h", "granitemoehybrid", "qwen3_moe"])
def test_the_ends_load_under_the_names_that_a_family_has_on_disk(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(families.config(name))
    path = assistants.save(model, toys.tokenizer(), tmp_path / "target")
    bare = EmbeddingsOnly.load(str(path), "float32", "cpu", False)
    assert bare.spec.fingerprint == fingerprint(model, str(path)), "each parameter's first values"
    assert torch.equal(bare.embeddings.lm_head_weight(), model.get_output_embeddings().weight)
    assert torch.equal(bare.embeddings.embedding.weight, model.get_input_embeddings().weight)


def test_a_parameter_that_cannot_be_read_by_itself_is_named_in_words(tmp_path: Path) -> None:
    path = assistants.save(toys.target().model, toys.tokenizer(), tmp_path / "target")
    file, name = Path(path, "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    turned = tensors.pop(name).T.contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"\(its files hold no {name} that can be read by itself\)"):
        EmbeddingsOnly.load(str(path), "float32", "cpu", False)
    save_file(tensors | {name: turned}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"\(its files hold {name} with rows and columns exchanged\)"):
        EmbeddingsOnly.load(str(path), "float32", "cpu", False)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_final_norm_makes_the_last_state(name: str) -> None:
    target, token = toys.target(name), torch.tensor([toys.prompt(0)])
    made = target.features(token, torch.zeros_like(token), (2,))
    normed = final_norm(target.base, 3)(made.hidden[:, :, 0])
    assert torch.allclose(normed, made.last_hidden, atol=1e-5)
    assert not torch.allclose(made.hidden[:, :, 0], made.last_hidden, atol=1e-2)


def test_of_several_norms_beside_the_layers_the_final_one_is_the_last() -> None:
    base = torch.nn.Module()
    base.before, base.layers = torch.nn.LayerNorm(4), torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    base.norm = torch.nn.LayerNorm(4)
    assert final_norm(base, 1) is base.norm


@pytest.mark.parametrize(
    ("given", "whole", "found"),
    [
        ({}, False, "ends"),
        ({}, True, "whole"),
        ({"quantize": "none", "adapter": "none"}, False, "ends"),
        ({"quantize": "int8"}, False, "whole"),
        ({"adapter": "a"}, False, "whole"),
    ],
)
def test_layers_are_loaded_where_they_or_other_weights_than_saved_are_wanted(
    given: dict[str, str], whole: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddingsOnly, "load", lambda *_: "ends")
    monkeypatch.setattr(Target, "of", lambda *_, **__: "whole")
    loaded: Any = load_target(model_config(path="x", **given), "cpu", with_layers=whole)
    assert loaded == found


def test_logits_of_some_tokens_have_their_bias_scale_and_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, state = TargetEmbeddings(toys.target().model), torch.randn(3, 32)
    ids = torch.tensor([3, 17, 39])
    assert embeddings.extra_ops() == []
    embeddings.lm_head = torch.nn.Linear(32, toys.VOCAB)
    assert embeddings.extra_ops() == ["a bias of its logits"]
    embeddings.factor, embeddings.softcap = 3.0, 2.0
    whole = embeddings.logits(state)
    torch.testing.assert_close(whole, 2 * (3 * embeddings.lm_head(state) / 2).tanh())
    for compiling in (True, False):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        torch.testing.assert_close(embeddings.logits(state, ids), whole[:, ids])


def test_what_cannot_be_loaded_so_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.path=\S*none: no tokenizer loads from there \(no such f") as error:
        EmbeddingsOnly.load(str(tmp_path / "none"), "float32", "cpu", False)
    assert "\n" not in str(error.value)
    path = assistants.save(toys.target("gemma3").model, toys.tokenizer(), tmp_path / "gemma")
    with pytest.raises(ValueError, match=r"be loaded without its layers \(they compute with more than weights"):
        EmbeddingsOnly.load(str(path), "float32", "cpu", False)
