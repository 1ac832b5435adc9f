"""Trial of a published head: on a few prompts it must accept the drafts that the run's own head accepts.

Decoding is greedy, by the head's own tree, or by a chain for a format without trees. An export is tried before the
upload, and every head again after the download.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from data.text.prompts import load_prompts
from eval.inputs.drafters import own_prompts
from eval.measures import metrics
from heads.common.errors import one_line
from heads.common.files import last_good
from heads.common.progress import progress
from heads.common.typed import typed
from heads.formats.hub import load_found, on_hub, target_path
from heads.formats.store import read_config
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, check_tree
from inference.target.config import DTYPES
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.release.config import PublishConfig

SLACK = 0.05  # relative difference of τ: a format may round a product of two of the head's matrices


class Trial:
    """A trial: prompts and decoding parameters, and the generations with the run's own head as the reference."""

    def __init__(self, target: Target, prompts: list[list[int]], tree: TreeConfig, tokens: int, trained: Any) -> None:
        self.target, self.prompts, self.tree, self.settings = target, prompts, tree, RequestParams(tokens, GREEDY)
        self.reference = self._decode(trained)

    def check(self, folder: Path, complaint: str, remedy: str = "") -> str:
        """Decode with the head of another folder, and return a message about its τ.

        Refuse different tokens or a different τ, in one line with difference and remedy.
        """
        generations = self._decode(load_found(folder, self.target.embeddings, self.target.spec))
        tau, before = (metrics.acceptance(results).tau or 0.0 for results in (generations, self.reference))
        same = [result.tokens for result in generations] == [result.tokens for result in self.reference]
        if not same or abs(tau - before) > SLACK * before:
            what = "τ is" if same else "other tokens came out, τ is"
            raise ValueError(f"{complaint}, {what} {tau:.2f} by it, and {before:.2f} by the run's own head{remedy}")
        return f"τ {tau:.2f} over {len(self.prompts)} prompts, greedy by {self.tree.label}, as the run's own head"

    def _decode(self, head: Any) -> list[Generation]:
        head = head.to(device=self.target.device, dtype=self.target.dtype).eval()
        drafter = HeadDrafter(head, self.tree, "head")
        return [speculate(self.target, drafter, prompt, self.settings) for prompt in progress(self.prompts, "decoding")]


def begin(run: Path, config: PublishConfig) -> Trial | str:
    """Decode with the run's own head, or return the reason why this machine cannot; refuse another target's head."""
    head, file = last_good(run / "head"), own_prompts(str(run))
    if not config.verify_prompts:
        return "verify_prompts=0"
    if file is None:
        return "the run holds no prompts.jsonl"
    content = read_config(head)
    path = config.target or target_path(content["target"]["name"])
    if on_hub(path) and not isinstance(try_to_load_from_cache(path, "config.json"), str):  # nothing is downloaded
        return f"{path} is not on this machine; give target=FOLDER of it"
    try:
        target = Target.load(path, adapter=content["target"].get("adapter"))
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return f"the target cannot be loaded here ({one_line(error)})"
    tree = typed(TreeConfig, content["tree"])
    if config.format is not None:
        tree = TreeConfig("chain", config.draft_tokens, 0, 0, [], [])
    check_tree(target, tree, "head")
    prompts = [prompt.token for prompt in load_prompts(file, target.tokenizer, config.verify_prompts)]
    prompts = [token for token in prompts if len(token) < target.context - 1]
    if not prompts:
        return "no prompt of the run leaves room in the target's context"
    trained = load_found(head, target.embeddings, target.spec)
    if config.format is not None:
        trained = trained.to(dtype=DTYPES[config.dtype])
    return Trial(target, prompts, tree, config.verify_tokens, trained)
