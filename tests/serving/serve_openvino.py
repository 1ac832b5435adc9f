"""Serve prompts by OpenVINO GenAI: a job on stdin, its tokens and the target's passes on stdout.

The job holds `target` and, for speculation, `head`, folders of converted models, `prompts` of token ids, `tokens` of
each answer and `options` of the generation.
"""

import json
import sys
from typing import Any

import numpy
import openvino
import openvino_genai as genai

job = json.load(sys.stdin)
exact: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
scheduler = genai.SchedulerConfig()
scheduler.enable_prefix_caching = False  # which DFlash refuses
draft = {"draft_model": genai.draft_model(job["head"], "CPU", **exact)} if "head" in job else {}
pipe = genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **draft, **exact)
config = pipe.get_generation_config()
for key, value in {"max_new_tokens": job["tokens"], **job["options"]}.items():
    setattr(config, key, value)
tokens, passes = [], 0
for prompt in job["prompts"]:
    answer = pipe.generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
    tokens.append(list(answer.tokens[0]))
    if draft:
        passes += len(answer.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations)
print(json.dumps({"tokens": tokens, "passes": passes}))
