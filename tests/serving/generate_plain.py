"""Generate by plain transformers, in an environment that has no headstart, with a head from the Hub and without it.

The job on stdin holds `target`, `head`, `prompts` of token ids and `tokens` of each answer.
"""

import json
import sys
from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)
    asked = {"max_new_tokens": job["tokens"], "do_sample": False, "return_dict_in_generate": True}
    same, tokens, passes = [], 0, 0
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        plain = model.generate(ids, **asked)
        drafted = model.generate(ids, custom_generate=job["head"], trust_remote_code=True, **asked)
        same.append(torch.equal(plain.sequences, drafted.sequences))
        tokens, passes = tokens + drafted.sequences.shape[1] - len(prompt) - 1, passes + drafted.passes
    print(json.dumps({"same": same, "tau": tokens / passes, "alone": find_spec("heads") is None}))


if __name__ == "__main__":
    main()
