"""A target without its decoder layers: embedding, final norm and lm_head, read from the checkpoint.

Training from stored features needs no more, so a head can be trained on a device that could not hold the target.
"""

import logging
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedTokenizerBase

from heads.common.target_config import UNFIT, read_target_config, reason
from heads.formats.checkpoint import tensor_files
from inference.target.checkpoint import fingerprint_on_disk, stored_names
from inference.target.config import ModelConfig, device_named, dtype_named
from inference.target.embeddings import TargetEmbeddings, final_norm
from inference.target.loading import load_tokenizer
from inference.target.target import Target

log = logging.getLogger(__name__)


class EmbeddingsOnly:
    """A target without its decoder layers; its spec is the whole target's."""

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        chosen_device: torch.device,
    ) -> None:
        self.name, self.tokenizer, self.device = name, tokenizer, chosen_device
        self.config: Any = model.config.get_text_config()
        self.embeddings = TargetEmbeddings(model)
        self.norm = final_norm(model.base_model, self.config.num_hidden_layers)
        self.dtype: torch.dtype = self.embeddings.lm_head.weight.dtype
        self.spec = self.embeddings.spec(name, fingerprint_on_disk(model, name))
        self.quantized: str | None = None  # a quantised target is not loaded in this way

    @classmethod
    def load(cls, path: str, dtype: str, device: str | None, trust_remote_code: bool) -> "EmbeddingsOnly":
        """Load the embedding, final norm and lm_head of a checkpoint; arguments as in `Target.load`.

        Raises:
            ValueError: no tokenizer loads, or they cannot be loaded without the layers, and why.
        """
        chosen_device = device_named(device)
        kind = dtype_named(dtype, chosen_device, path, trust_remote_code)
        tokenizer = load_tokenizer(path, trust_remote_code)
        try:
            config: Any = read_target_config(path, trust_remote_code)
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError("its weights are quantised")
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            model.tie_weights()
            count = model.config.get_text_config().num_hidden_layers
            parts = [model.get_input_embeddings(), model.get_output_embeddings(), final_norm(model.base_model, count)]
            if any(len(list(module.buffers())) for module in parts):
                raise ValueError("they compute with more than weights")
            files, loaded = tensor_files(path), {}
            stored = stored_names(model, files)
            names = {id(value): name for name, value in model.named_parameters()}
            for module in parts:  # tied weights have one name, and stay tied
                for own_name, parameter in list(module.named_parameters(recurse=False)):
                    name = names[id(parameter)]
                    if name not in stored:
                        raise ValueError(f"its files hold no {name} that can be read by itself")
                    if name not in loaded:
                        with safe_open(files[stored[name]], "pt") as opened:
                            tensor = opened.get_tensor(stored[name]).to(chosen_device, kind)
                        loaded[name] = nn.Parameter(tensor, requires_grad=False)
                    setattr(module, own_name, loaded[name])
            return cls(model.eval().requires_grad_(False), tokenizer, path, chosen_device)
        except UNFIT as error:
            problem = f"its embeddings cannot be loaded without its layers ({reason(error)})"
            raise ValueError(f"model.path={path}: {problem}") from error


AnyTarget = Target | EmbeddingsOnly  # with or without its decoder layers


def load_target(model: ModelConfig, device: str, *, with_layers: bool) -> AnyTarget:
    """Return the target on a device; unless `with_layers`, without its decoder layers if possible.

    Raises:
        ValueError: it cannot be loaded.
    """
    if not with_layers and model.as_saved:
        try:
            return EmbeddingsOnly.load(model.path, model.dtype, device, model.trust_remote_code)
        except ValueError as error:
            log.warning("%s; the whole target is loaded", error)
    return Target.of(model, device=device)
