"""Heads of other trainers with random weights, built, drafted with and saved by their own classes.

It runs in the Python of the peers' environment, without ours: benchmarks/peer_heads.py starts it once for each peer.
The folder that it is given holds what it reads of the target, and gets a folder and logits for each head. Logits are in
our convention: at row t and depth d those of token t + 1 + d.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SpecForge compiles its norms

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DEPTHS, BLOCK, PRUNED, LAYERS, MASK_TOKEN = 3, 5, 1024, [1, 6, 11, 16, 21], 5
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}  # modelopt's default


class Given:
    """The target: its folder and config, and what it says about a text."""

    def __init__(self, folder: Path, states: dict[str, Tensor]) -> None:
        self.folder, self.states, self.token = folder, states, states["token"]
        self.config = json.loads((folder / "config.json").read_text())

    def shifted(self, count: int) -> Tensor:
        """Return token t + count at row t."""
        return self.token.roll(-count, 1)

    def options(self, **more: Any) -> dict[str, Any]:
        """Return the target's config with the options of a head of one layer."""
        same = {key: value for key, value in self.config.items() if key not in ("architectures", "model_type", "dtype")}
        other = {"num_hidden_layers": 1, "tie_word_embeddings": False, "attn_implementation": "eager"}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": more.pop("theta", 50000.0)}}
        return same | other | rope | more  # rotary positions of another base than the default


def randomised(module: Any, states: dict[str, Tensor]) -> Any:
    """Give a head random weights, norms about one, and the target's embedding."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.data.copy_(states["embedding"])
        else:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.05)
    for name, buffer in module.named_buffers():
        if name in ("d2t", "t2d"):
            buffer.copy_(states[name] if len(buffer) == len(states[name]) else torch.zeros_like(buffer))
            if name == "t2d" and module.config.draft_vocab_size == len(buffer):
                buffer.fill_(True)
    return module.eval()


def eagle3_of_specforge(given: Given, folder: Path, **options: Any) -> Tensor:
    """SpecForge's, by the steps of its OnlineEagle3Model."""
    llama = import_module("specforge.modeling.draft.llama3_eagle")
    draft = randomised(llama.LlamaForCausalLMEagle3(llama.LlamaConfig(**given.options(**options))), given.states)
    state, cache, found = draft.project_hidden_states(given.states["fused"]), [[], []], []
    seen, length = torch.ones_like(given.token), given.token.shape[1]
    mask = draft.prepare_decoder_attention_mask(seen, state, 1, length, 0)
    for step in range(DEPTHS):
        embedded = draft.embed_input_ids(given.shifted(step + 1))
        state = draft.backbone(embedded, state, cache, mask, torch.arange(length)[None])
        found.append(draft.compute_logits(state))
    draft.save_pretrained(folder)
    return torch.stack(found)[:, 0]


def eagle3_of_automodel(given: Given, folder: Path, **options: Any) -> Tensor:
    """Automodel's, by the steps of its Eagle3TrainerModule."""
    llama = import_module("nemo_automodel.components.speculative.eagle.draft_llama")
    config = import_module("transformers").LlamaConfig(**given.options(**options))
    draft = randomised(llama.LlamaEagle3DraftModel(config), given.states)
    state, cache, found = draft.project_hidden_states(given.states["fused"]), [[], []], []
    for step in range(DEPTHS):
        state = draft(given.shifted(step + 1), state, torch.ones_like(given.token), cache_hidden=cache)
        found.append(draft.compute_logits(state))
    draft.save_pretrained(folder)
    return torch.stack(found)[:, 0]


def eagle3_of_angelslim(given: Given, folder: Path, **options: Any) -> Tensor:
    """AngelSlim's, by the steps of its Eagle3Trainer."""
    llama = import_module("angelslim.compressor.speculative.train.models.draft.llama_eagle3")
    draft = randomised(llama.Eagle3LlamaForCausalLM(llama.LlamaConfig(**given.options(**options))), given.states)
    state, cache, found = draft.combine_hidden_states(given.states["fused"]), [[], []], []
    seen, length = torch.ones_like(given.token, dtype=torch.bool), given.token.shape[1]
    mask = draft.prepare_decoder_attention_mask(seen, (1, length), state, 0)
    for step in range(DEPTHS):
        embedded = draft.embed_input_ids(given.shifted(step + 1))
        state, cache = draft.encode_layers(embedded, state, cache, mask, torch.arange(length)[None], True)
        found.append(draft.compute_logits(state))
    draft.save_pretrained(folder)
    return torch.stack(found)[:, 0]


def converted(given: Given, algorithm: str, config: dict[str, Any]) -> Any:
    """Return the target with a head of modelopt's."""
    speculative = import_module("modelopt.torch.speculative")
    model = import_module("transformers").AutoModelForCausalLM.from_pretrained(
        given.folder, dtype=torch.float32, attn_implementation="eager"
    )
    return speculative.convert(model, {"algorithm": algorithm, "config": config})


def eagle3_of_modelopt(given: Given, folder: Path, yarn: bool, **options: Any) -> Tensor:
    """modelopt's, by its own forward pass in training, which rolls its states on where others roll the tokens."""
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    architecture = {key: given.config[key] for key in sizes} | {"torch_dtype": "float32"} | options
    model = converted(given, "eagle", {
        "eagle_architecture_config": {**architecture, "_attn_implementation": "eager"}, "eagle_ttt_steps": DEPTHS,
        "eagle_use_torch_compile": False, "eagle_export_rope_scaling": YARN if yarn else {},
    })  # fmt: skip
    randomised(model.eagle_module, given.states)
    forward, found = model._eagle_forward, []

    def kept(*args: Any) -> Any:
        outputs = forward(*args)
        found.append(outputs[2].roll(-len(found), 1))
        return outputs

    model._eagle_forward = kept
    model.train()(input_ids=given.token)
    model.get_exporter().export(folder, torch.float32)
    return torch.stack(found)[:, 0]


def by_blocks(given: Given, forward: Callable[..., Tensor], markov: Any = None) -> Tensor:
    """Return a block head's logits, block after block, by the forward pass that all have from DFlash's authors.

    With DSpark's `markov` the root's slot drafts too, and the text's tokens correct the logits behind them.
    """
    found, length = [], given.token.shape[1]
    for row in range(length - BLOCK - 1):
        block = [int(given.token[0, row + 1]), *[MASK_TOKEN] * (BLOCK - 1)]
        inputs = given.states["embedding"][block][None], given.states["joined"][:, : row + 1]
        state = forward(*inputs, torch.arange(row + 1 + BLOCK)[None])
        logits = state @ given.states["lm_head"].T
        if markov is not None:
            before = given.token[:, row + 1 : row + 1 + BLOCK]
            logits = markov.apply_block_logits(logits, token_ids=before, hidden_states=state)
        found.append(logits[0, 0 if markov is not None else 1 :])
    return torch.nn.functional.pad(torch.stack(found, 1), (0, 0, 0, length - len(found)))


def block_of(module: str, name: str, **options: Any) -> Callable[[Given, Path], Tensor]:
    """Return the builder of a block head whose class is one of transformers' models; `options` are DSpark's."""

    def build(given: Given, folder: Path) -> Tensor:
        both = {"mask_token_id": MASK_TOKEN, "target_layer_ids": LAYERS, **options}
        layers = {"num_hidden_layers": 2, "num_target_layers": given.config["num_hidden_layers"]}
        config = given.options(**layers, block_size=BLOCK, dflash_config=both, **both)
        draft = randomised(
            getattr(import_module(module), name)(import_module("transformers").Qwen3Config(**config)), given.states
        )
        if hasattr(draft, "lm_head"):
            draft.lm_head.weight.copy_(given.states["lm_head"])
        draft.save_pretrained(folder)
        if not hasattr(draft, "_forward_backbone"):
            return by_blocks(given, lambda a, b, c: draft(c, None, a, b), getattr(draft, "markov_head", None))

        def forward(embedding: Tensor, features: Tensor, position: Tensor) -> Tensor:
            inputs = {"noise_embedding": embedding, "target_hidden_states": features}
            out: Tensor = draft._forward_backbone(position_ids=position, **inputs)
            return out

        return by_blocks(given, forward, draft.markov_head)

    return build


def dflash_of_modelopt(given: Given, folder: Path) -> Tensor:
    """modelopt's, built and exported by it."""
    model = converted(given, "dflash", {
        "dflash_block_size": BLOCK, "dflash_mask_token_id": MASK_TOKEN, "dflash_use_torch_compile": False,
        "dflash_architecture_config": {"num_hidden_layers": 2, "_attn_implementation": "eager"},
        "dflash_export_rope_scaling": {},
    })  # fmt: skip
    assert list(model.target_layer_ids) == [1, 21], model.target_layer_ids
    randomised(model.dflash_module, given.states)
    given.states["joined"] = torch.cat([given.states["joined"].chunk(len(LAYERS), -1)[i] for i in (0, -1)], -1)
    model.get_exporter().export(folder, torch.float32)
    return by_blocks(given, model.dflash_module)


WHOLE, THETA = {"draft_vocab_size": 2048}, 10000.0
DSPARK = {
    "num_anchors": 4, "enable_confidence_head": False, "confidence_head_with_markov": False, "markov_rank": 16,
    "markov_head_type": "vanilla",
}  # fmt: skip
THREE = {"num_aux_hidden_states": 3}  # Automodel's option
PEERS: dict[str, tuple[str, dict[str, Callable[..., Tensor]]]] = {
    "SpecForge": ("specforge", {
        "EAGLE-3": lambda given, out: eagle3_of_specforge(given, out, draft_vocab_size=PRUNED),
        "EAGLE-3, norms": lambda given, out: eagle3_of_specforge(given, out, fc_norm=True, **WHOLE),
        "DFlash": block_of("specforge.modeling.draft.dflash", "DFlashDraftModel"),
        "DSpark": block_of("specforge.modeling.draft.dspark", "DSparkDraftModel", **DSPARK),
    }),
    "Automodel": ("nemo-automodel", {
        "EAGLE-3": lambda given, out: eagle3_of_automodel(given, out, draft_vocab_size=PRUNED, **THREE),
        "EAGLE-3, norms": lambda given, out: eagle3_of_automodel(
            given, out, fc_norm=True, norm_output=True, **WHOLE, **THREE
        ),
        "DFlash": block_of("nemo_automodel.components.speculative.dflash.draft_qwen3", "Qwen3DFlashDraftModel"),
        "DSpark": block_of("nemo_automodel.components.speculative.dspark.draft_qwen3", "Qwen3DSparkModel", **DSPARK),
    }),
    "AngelSlim": ("angelslim", {
        "EAGLE-3": lambda given, out: eagle3_of_angelslim(given, out, draft_vocab_size=PRUNED, theta=THETA),
        "EAGLE-3, rope of base 50,000": lambda given, out: eagle3_of_angelslim(given, out, draft_vocab_size=PRUNED),
        "DFlash": block_of("angelslim.compressor.speculative.train.models.draft.qwen_dflash", "QwenDFlashDraftModel"),
    }),
    "modelopt": ("nvidia-modelopt", {
        "EAGLE-3": lambda given, out: eagle3_of_modelopt(given, out, False, draft_vocab_size=PRUNED),
        "EAGLE-3, its YaRN": lambda given, out: eagle3_of_modelopt(given, out, True, draft_vocab_size=PRUNED),
        "DFlash": dflash_of_modelopt,
    }),
}  # fmt: skip


INNER = ("models", "models.draft", "data")


def bare(*names: str) -> None:
    """Import packages without their `__init__.py`: AngelSlim's wheel lacks a folder that they ask for."""
    for name in names:
        module = sys.modules[name] = ModuleType(name)
        place = name.replace(".", "/")
        module.__path__ = [f"{path}/{place}" for path in sys.path if (Path(path) / place).is_dir()]


def main() -> None:
    """Build every head of a peer, whose name, target and folder the command line holds; print the peer's version."""
    peer, out = sys.argv[1], Path(sys.argv[3])
    distribution, builders = PEERS[peer]
    print(version(distribution), flush=True)
    if peer == "AngelSlim":
        inner = "angelslim.compressor.speculative.train"
        bare(*(inner.rsplit(".", i)[0] for i in (3, 2, 1)), inner, *(f"{inner}.{end}" for end in INNER))
    for head, build in builders.items():
        folder = out / f"{peer} {head}"
        folder.mkdir(parents=True)
        with torch.no_grad():
            logits = build(Given(Path(sys.argv[2]), load_file(out / "states.safetensors")), folder)
        save_file({"logits": logits.float().contiguous()}, out / f"{peer} {head}.logits")


if __name__ == "__main__":
    main()
