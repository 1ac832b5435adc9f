#!/usr/bin/env bash
# transformers 5.24.0: with prompt_lookup_num_tokens, greedy generate does not stop at stop_strings (nor at a criterion of the
# caller's) where the string ends inside of an accepted draft: criteria see the text after a whole step alone, and the end token is
# the only one that is looked for within it. Text runs on to max_new_tokens. A draft changes no token, so one expects the same end.
# Seen, a model that repeats its prompt, stop string "f": plain "cdef"; with the lookup "cdefghabcdefghab".
# headstart's custom_generate cuts at the first stop string (heads/formats/custom_generate/generate.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, TokenizersBackend

words = "abcdefgh"
vocabulary = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
vocabulary.pre_tokenizer, vocabulary.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = TokenizersBackend(tokenizer_object=vocabulary)
V = len(words)
sizes = {"vocab_size": V, "hidden_size": V, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)).eval()
with torch.no_grad():  # without attention and MLP each token is followed by the next letter, after h by a
    model.model.embed_tokens.weight.copy_(torch.eye(V))
    model.lm_head.weight.copy_(torch.eye(V).roll(1, 0))
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
prompt = tokenizer("abcdefghab", return_tensors="pt")
texts = []
for drafts in ({}, {"prompt_lookup_num_tokens": 6}):
    given = {"do_sample": False, "max_new_tokens": 16, "stop_strings": ["f"], "tokenizer": tokenizer, **drafts}
    tokens = model.generate(**prompt, **given, pad_token_id=0)[0, prompt["input_ids"].shape[1] :]
    texts.append(tokenizer.decode(tokens))
    print(drafts, texts[-1])
assert texts == ["cdef", "cdefghabcdefghab"]
PYTHON
