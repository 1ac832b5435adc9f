"""What a log holds: its requests, lengths and repeated text, and how sure the target is along it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data.batches import pack, sample_arrays
from data.text.filters import Counts
from data.text.masks import Sample
from inference.target.target import Target

WINDOW = 8  # tokens in a row that count as repeated where they came before
MOST = 4_000_000  # tokens that are looked at for repeats
ROWS = 8  # packed rows in a pass


def statistics(samples: Sequence[Sample], counts: Counts) -> dict[str, Any]:
    """Return the numbers of a log as it is trained on."""
    lengths, hashes, seen = [], [], 0
    powers = np.uint64(1_000_003) ** np.arange(WINDOW, dtype=np.uint64)  # modulo 2^64
    for token, _ in sample_arrays(samples):
        lengths.append(len(token))
        if len(token) >= WINDOW and seen < MOST:
            windows = np.lib.stride_tricks.sliding_window_view(token.astype(np.uint64), WINDOW)
            hashes.append((windows * powers).sum(1, dtype=np.uint64))
            seen += len(token)
    every = np.concatenate(hashes) if hashes else np.zeros(1, dtype=np.uint64)
    return {
        "requests": sum(counts.records.values()) + counts.held_out,
        "samples": len(lengths),
        "tokens": int(sum(lengths)),
        "trained": counts.trained,
        "lengths": [int(length) for length in np.quantile(lengths, [0.05, 0.5, 0.95])],
        "duplicates": counts.duplicates,
        "repeated": 1 - len(np.unique(every)) / len(every),
    }


@torch.inference_mode()
def certainty(target: Target, samples: Sequence[Sample], length: int, rows: int, seed: int) -> dict[str, float]:
    """Return the mean entropy of the target's distribution in nats along sampled rows, where a head would be trained.

    `greedy` is the share of these tokens that the target itself would have chosen greedily.
    """
    packed = pack(samples, length)
    chosen = torch.randperm(len(packed.token), generator=torch.Generator().manual_seed(seed))[:rows]
    entropy, greedy, count = 0.0, 0.0, 0
    for index in chosen.split(ROWS):
        token, document = packed.token[index].long(), packed.document[index].long()
        features = target.features(token, document, ())
        follows = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0) & (packed.mask[index][:, 1:] > 0)
        log = target.embeddings.logits(features.last[:, :-1][follows.to(target.device)]).float().log_softmax(-1)
        entropy += float(-(log.exp() * log).sum())
        greedy += float((log.argmax(-1).cpu() == token[:, 1:][follows]).sum())
        count += len(log)
    return {"entropy": entropy / max(count, 1), "greedy": greedy / max(count, 1), "rows": len(chosen)}


def line(log: dict[str, Any]) -> str:
    """Return the numbers of both in a line."""
    low, middle, high = log["lengths"]
    return (
        f"log: {log['requests']:,} requests, {log['duplicates']:,} of them copies; {log['samples']:,} samples of "
        f"{log['tokens']:,} tokens ({low}, {middle}, {high} long at 5, 50, 95 %), {log['repeated']:.0%} of all "
        f"{WINDOW} tokens in a row repeated; the target's entropy {log['entropy']:.2f} nats a token, "
        f"{log['greedy']:.0%} of them its greedy choice ({log['rows']:.0f} rows)"
    )
