#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer reads the tokenizer.json of a folder whose config.json says model_type "qwen2" (or "qwen3_5") with
# Qwen2's pre-tokenizer in place of the file's, whatever tokenizer_class it names, without a warning. A model of that architecture
# with a tokenizer of its own so gets other tokens than from the tokenizers library and the engines that read the file;
# save_pretrained then writes the changed one. Seen for "in 2024": the file, and model_type llama or qwen3, "in" " 2024"; qwen2
# and qwen3_5 "in" " " "2" "0" "2" "4".
# headstart takes tokens as transformers does, so that a head trains on those; compare them with your server's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(["in 2024 and 2025 "] * 5, trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters))
for kind in ("llama", "qwen3", "qwen2", "qwen3_5"):
    folder = Path(kind)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.save_pretrained(folder / "saved")
    saved = Tokenizer.from_file(str(folder / "saved/tokenizer.json"))
    read = [tokens.encode("in 2024").tokens for tokens in (tokenizer, saved)]
    print(kind, type(loaded).__name__, "file:", read[0], "AutoTokenizer:", loaded.tokenize("in 2024"), "saved:", read[1])
    assert read[0] == ["in", "Ġ2024"] and loaded.tokenize("in 2024") == read[1]
    assert read[1] == (["in", "Ġ", "2", "0", "2", "4"] if kind in ("qwen2", "qwen3_5") else read[0])
PYTHON
