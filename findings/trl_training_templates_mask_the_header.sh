#!/usr/bin/env bash
# trl 1.16.0: assistant_only_loss takes its mask from the `generation` blocks of TRL's own training templates, and those of three
# families begin before the prompt that the model goes on from. Seen, as text that is masked as the assistant's and that
# add_generation_prompt writes for it: Qwen2.5 "\n" of the header, gpt-oss "<|start|>assistant", DeepSeek V3 "<|Assistant|>" (in
# its own wide bars). Qwen3's begins where the model does. So the header counts among the trained tokens, one to three a turn.
# headstart takes the mask from where the prompt with add_generation_prompt ends, and no header is trained under these templates.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 jinja2
"$folder/venv/bin/pip" install --quiet --no-deps trl==1.16.0
cd "$folder"
venv/bin/python - <<'PYTHON'
from importlib.util import find_spec
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

(package,) = find_spec("trl").submodule_search_locations
chat = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine, thanks."}]
starts = {}
for family in ("qwen2_5", "gptoss", "deepseekv3", "qwen3"):
    template = (Path(package) / "chat_templates" / f"{family}_training.jinja").read_text(encoding="utf-8")
    whole, spans = render_jinja_template(
        [chat], chat_template=template, return_assistant_tokens_mask=True, bos_token="<s>", eos_token="</s>"
    )
    prompt, _ = render_jinja_template(
        [chat[:1]], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    shared = next(i for i in range(len(whole[0])) if whole[0][i] != prompt[0][i : i + 1])
    (begin, end), *_ = spans[0]
    starts[family] = whole[0][begin:shared]
    print(family, "masked:", repr(whole[0][begin:end]), "of it in the prompt already:", repr(starts[family]))
assert starts == {"qwen2_5": "\n", "gptoss": "<|start|>assistant", "deepseekv3": "<\uff5cAssistant\uff5c>", "qwen3": ""}
PYTHON
