"""A smaller causal LM drafts: speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Any model that transformers loads, with the target's tokenizer or, over the shared tokens (TLI, arXiv 2502.05202), with
another. It drafts level by level as heads do, so that every tree policy applies; a chain may also stop early.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.base import LevelNodes, LevelOutput, Tokens
from heads.common.typed import Fraction, OneOf
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig, grow, sample_chains
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.config import DTYPES
from inference.target.target import Target
from inference.target.tokenizer import UNFINISHED, decode
from inference.verification.tree import PerNode, root

ROOT = -1  # index of the last token read, the parent of the first drafted nodes


class Vocabulary:
    """The map between the target's tokens and the assistant's.

    With the target's own tokenizer (`match=same`) all tokens are shared, except padding of one of the lm_heads. With
    another one (`match=tli`) it is token-level intersection (Timor et al., arXiv 2502.05202): q is renormalised over
    the shared tokens, so it is a distribution of the target's tokens and p/q verification stays exact. The target's
    other tokens are spelled with the assistant's.

    Raises:
        ValueError: the tokenizers differ, or share no token.
    """

    def __init__(self, target: Target, assistant: Target, match: str) -> None:
        self.target_tokenizer, self.assistant_tokenizer = target.tokenizer, assistant.tokenizer
        self.size = target.embeddings.vocab_size
        self.is_same, self.texts, self.ids = match == "same", {}, {}
        if self.is_same:
            if self.target_tokenizer.get_vocab() != self.assistant_tokenizer.get_vocab():
                raise ValueError(f"{assistant.name} has another tokenizer than {target.name}: use match=tli")
            pairs = {token: token for token in range(self.size)}
        else:
            self.texts = token_texts(target)
            self.ids = {text: token for token, text in token_texts(assistant).items()}  # byte tokens come first
            id_of = {text: token for token, text in self.texts.items()}
            others = _special(self.assistant_tokenizer)
            pairs = {token: self.ids[text] for text, token in id_of.items() if text in self.ids}
            pairs |= {token: others[name] for name, token in _special(self.target_tokenizer).items() if name in others}
            ends = self.target_tokenizer.eos_token_id, self.assistant_tokenizer.eos_token_id
            if None not in ends and ends[0] not in pairs and ends[1] not in pairs.values():
                pairs[ends[0]] = ends[1]
        self.shared = {a: b for a, b in pairs.items() if a < self.size and b < assistant.embeddings.vocab_size}
        if not self.shared:
            raise ValueError(f"{assistant.name} shares no token with {target.name}: choose another one")
        self.target_ids, self.assistant_ids = torch.tensor([*self.shared.items()], device=assistant.device).T
        self.counterpart = torch.zeros(self.size, dtype=torch.long, device=assistant.device)
        self.counterpart[self.target_ids] = self.assistant_ids

    def prompt(self, token: Tokens) -> Tokens:
        """Encode the prompt's text as the assistant was trained to read it: after its BOS token, if it has one."""
        if self.is_same:
            return self.translate(token)
        first = self.assistant_tokenizer("a")["input_ids"][:1]
        text = self.assistant_tokenizer(decode(self.target_tokenizer, token), add_special_tokens=False)
        return (first if first == [self.assistant_tokenizer.bos_token_id] else []) + text["input_ids"]

    def translate(self, token: Tokens) -> Tokens:
        """Return for each token its one counterpart, or its text spelled longest token first."""
        own_tokens = Tokens()
        for t in token:
            rest, spelled = ("", [self.shared[t]]) if t in self.shared else (self.texts.get(t, ""), [])
            while rest:
                length = next((n for n in range(len(rest), 0, -1) if rest[:n] in self.ids), None)
                if length is None:  # the assistant cannot spell it: it is left out
                    break
                spelled.append(self.ids[rest[:length]])
                rest = rest[length:]
            else:
                own_tokens += spelled
        return own_tokens

    def to_assistant(self, token: PerNode) -> PerNode:
        """Return the counterparts; one without is 0: its probability is 0, and its node's logits are not used."""
        return self.counterpart[token.to(self.counterpart.device)]

    def to_target(self, logits: Float[Tensor, "N A"]) -> Float[Tensor, "N V"]:
        """Return the logits at the target's ids, -inf for tokens that are not shared."""
        if self.is_same and logits.shape[1] == self.size:
            return logits
        scattered = logits.new_full((len(logits), self.size), float("-inf"))
        scattered[:, self.target_ids] = logits[:, self.assistant_ids]
        return scattered


def token_texts(model: Target) -> dict[int, str]:
    """Return the text that each token adds inside a text, without special tokens and parts of characters.

    "Ġthe" of a byte-level BPE, "▁the" of a sentencepiece model and the word "the" of a word-level one are all " the".
    """
    tokenizer = model.tokenizer
    before = tokenizer("the", add_special_tokens=False).input_ids[-1:]
    shown = len(decode(tokenizer, before))
    tokens = sorted({*tokenizer.get_vocab().values()} - {*_special(model.tokenizer).values()})
    texts = {t: decode(tokenizer, [*before, t])[shown:] for t in tokens if t < model.embeddings.vocab_size}
    return {t: text for t, text in texts.items() if text and UNFINISHED not in text}


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    added = {str(t): token_id for token_id, t in tokenizer.added_tokens_decoder.items() if t.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


class Assistant(HostDrafter):
    """Another causal LM as the drafter."""

    @dataclass(frozen=True)
    class Config:
        """The model, with the target's dtype or device for a null, its vocabulary and its tree policy.

        On another device than the target's, tokens and logits are copied at every pass. A chain stops after a token
        whose probability at temperature 1 is below `confidence`.
        """

        model: str
        dtype: str | None
        device: str | None
        trust_remote_code: bool
        match: Annotated[str, OneOf(("same", "tli"))]
        tree: TreeConfig
        confidence: Fraction

        def __post_init__(self) -> None:
            if self.tree.kind != "chain" and self.confidence > 0:
                raise ValueError(
                    f"drafter.assistant.tree.kind is {self.tree.kind!r}: only a chain stops by confidence; set "
                    "confidence=0, or tree.kind=chain"
                )

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name = config, name
        self.tree = config.tree.label
        same = next(name for name, kind in DTYPES.items() if kind == target.dtype)
        device = config.device or str(target.device)
        try:
            self.model = Target.load(config.model, config.dtype or same, device, config.trust_remote_code)
            if self.model.recurrence is not None:
                raise ValueError(
                    f"{self.model.incompatibility}, and a revised text needs those of others: choose another one"
                )
        except ValueError as error:
            raise ValueError(f"drafter.assistant.model={config.model} cannot be used: {error}") from error
        if config.tree.kind != "chain" and not self.model.takes_trees:
            raise ValueError(
                f"drafter.assistant.tree.kind is {config.tree.kind!r}, but the attention of {config.model} does not "
                "honour a tree mask: set tree.kind=chain"
            )
        self.vocabulary = Vocabulary(target, self.model, config.match)
        self.device, self.eos = target.device, target.eos

    def start(self, prompt: Tokens) -> "AssistantState":
        """Begin a sequence with the prompt in the assistant's tokens."""
        return AssistantState(self, prompt)


class AssistantState(DrafterState):
    """An assistant's state for one sequence: its KV cache has the text and then the drafted nodes of one tree.

    Nodes are numbered in order of expansion. It is an `Expander`, so that every tree policy grows from it.
    """

    vocab = None

    def __init__(self, drafter: Assistant, prompt: Tokens) -> None:
        self.config, self.vocabulary, self.device = drafter.config, drafter.vocabulary, drafter.device
        self.model, self.eos, self.cache = drafter.model, drafter.eos, drafter.model.cache()
        self.token: Tokens = []  # the text in the KV cache
        self.drop_drafts()
        self.text = self.vocabulary.prompt(prompt)
        self.level: LevelOutput | None = None  # at the next root
        self.max_depth = 0  # depth limit of the current tree, from the contexts of both models

    def drop_drafts(self) -> None:
        """Forget the drafted nodes."""
        self.below: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self.path: list[list[int]] = []  # each node's path from the root on, itself the last
        self.nodes = [ROOT]  # the nodes of the last level

    @torch.inference_mode()
    def update(self, commit: CommittedTokens) -> None:
        """Prefill the committed tokens; accepted nodes that were expanded are in the cache already."""
        self.text += self.vocabulary.translate(commit.token)
        self.level = self.answer(self.read(self.text)) if 0 < len(self.text) <= self.model.max_model_len else None

    def read(self, token: Tokens) -> Float[Tensor, "1 A"]:
        """Make `token`, one or more, the whole text; return the assistant's logits of the next token.

        The common prefix of the text and the drafted nodes that match are kept, so that a pass runs over only the
        missing tokens: after a verification those that no expanded node has, the next root included.
        """
        common = len(self.token)
        if token[:common] != self.token:
            common = next(i for i in range(common) if self.token[i : i + 1] != token[i : i + 1])
        common = min(common, len(token) - 1)  # the last one is run for its logits in any case
        nodes: list[int] = []  # the expanded nodes with the next tokens, from the root on
        for t in token[common:-1] if common == len(self.token) else ():
            node = self.below.get((nodes[-1] if nodes else ROOT, t))
            if node is None:
                break
            nodes.append(node)
        self.cache.keep(common, nodes)
        missing = torch.tensor(token[common + len(nodes) :], device=self.model.device)
        logits = self.model.prefill(missing, self.cache).logits
        assert logits is not None
        self.token = list(token)
        self.drop_drafts()
        return logits[0]

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """Grow the tree; draft nothing if the text is longer than the assistant's context."""
        self.max_depth = min(context.max_draft_depth, self.model.max_model_len - len(self.text))
        if self.level is None or self.max_depth < 1:
            return Proposal(root(context.token[-1], self.device))
        if self.config.tree.kind == "chain":
            return self.chains(self.level, [context._replace(max_draft_depth=self.max_depth)])[0]
        return grow(self, None, self.level, self.config.tree, context)

    def chains(self, level: LevelOutput, contexts: Sequence[DraftContext]) -> list[Proposal]:
        """Sample a chain after each node of a level, up to an end token or a token below `confidence`."""
        return sample_chains(self, level, self.config.tree.depth, contexts, self.config.confidence, self.eos)

    def expand(self, state: Any, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score one more tree level (see `DraftHead.expand`); the keys and values are in the assistant's cache."""
        return self.answer(self.branch(nodes.token[0], [self.nodes[parent] for parent in nodes.parent[0].tolist()]))

    def branch(self, token: PerNode, above: list[int]) -> Float[Tensor, "N A"]:
        """Run a new node with a token of the target after each node of `above`; return the assistant's own logits.

        ROOT in `above` is the last token read.
        """
        own_token = self.vocabulary.to_assistant(token)
        model, device, paths = self.model, self.model.device, self.path
        first = len(paths)
        text = len(self.token)
        self.nodes = list(range(first, first + len(above)))
        for node, parent, t in zip(self.nodes, above, own_token.tolist(), strict=True):
            self.below[parent, t] = node
            paths.append([*(() if parent == ROOT else paths[parent]), node])
        depth = torch.tensor([len(path) for path in paths], device=device)
        key_position = torch.cat([torch.arange(text, device=device), text - 1 + depth])[None]
        position = key_position[:, self.cache.length :]
        attn_mask = None
        # A chain attends to everything before it, which needs no mask.
        if any(len(paths[node]) < len(paths) for node in self.nodes):
            attn_mask = torch.zeros(1, len(above), text + len(paths), dtype=torch.bool, device=device)
            attn_mask[..., :text] = True
            for row, node in enumerate(self.nodes):
                attn_mask[0, row, [text + ancestor for ancestor in paths[node]]] = True
        last = model.run(own_token[None], position, attn_mask, self.cache, key_position=key_position).last_hidden
        return model.embeddings.logits(last)[0]

    def answer(self, logits: Tensor) -> LevelOutput:
        """Return the assistant's logits "N A" as a level in the target's vocabulary and on its device."""
        logits = self.vocabulary.to_target(logits).to(self.device)
        return LevelOutput(logits[None], logits[None, :, :0])
