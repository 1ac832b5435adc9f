#!/usr/bin/env bash
# transformers 5.17.0: the tokenizer of a GGUF file has the file's BOS token as its EOS token, whatever tokenizer.ggml.eos_token_id
# says. transformers 5.18.0 reads it right.
# Seen: eos_token "<s>" under 5.17.0 and "</s>" under 5.18.0, for tokenizer.ggml.eos_token_id 2.
# headstart takes the id from the file's metadata (heads/common/gguf.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 gguf==0.19.0
cd "$folder"
cat > look.py <<'PYTHON'
import sys

import numpy as np
import transformers
from gguf import GGUFWriter
from transformers import AutoTokenizer

writer = GGUFWriter("model.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(1)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_tokenizer_model("gpt2")
tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
writer.add_token_list(tokens)
writer.add_token_types([3] * 3 + [1] * 4)
writer.add_token_merges(["a b", "b a"])
writer.add_unk_token_id(0)
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
eos = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf").eos_token
print(transformers.__version__, eos)
assert eos == sys.argv[1], eos
PYTHON
for seen in "5.17.0 <s>" "5.18.0 </s>"; do
    venv/bin/pip install --quiet "transformers==${seen% *}" accelerate==1.15.0
    venv/bin/python look.py "${seen#* }"
done
