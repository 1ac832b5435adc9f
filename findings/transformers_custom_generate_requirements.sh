#!/usr/bin/env bash
# transformers 5.24.0: a folder's custom_generate/requirements.txt is enforced when the model is loaded with
# trust_remote_code=True, also by one who never calls generate (a converter, an exporter). Seen: loads without
# trust_remote_code; with it ImportError "Missing requirements in your local environment".
# headstart publishes folders without that file and checks versions where its own code runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
AutoModelForCausalLM.from_config(config).save_pretrained("model")
code = Path("model/custom_generate")
code.mkdir()
(code / "generate.py").write_text("def generate(model, *args, **kwargs):\n    return None\n")
(code / "requirements.txt").write_text("transformers>=99\n")
AutoModelForCausalLM.from_pretrained("model", trust_remote_code=False)
try:
    AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
except ImportError as error:
    print("with trust_remote_code:", str(error).splitlines()[0])
    assert "Missing requirements" in str(error)
else:
    raise SystemExit("it loads with trust_remote_code")
PYTHON
