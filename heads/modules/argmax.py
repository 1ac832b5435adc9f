"""An argmax of logits that is fast on a CPU."""

from heads.shapes import Logits, TokenIds

BLOCK = 128  # tokens of a block; only the best block is searched for the index of the maximum
FEW = 4096  # below this number of tokens a full search is faster


def argmax(scores: Logits) -> TokenIds:
    """Return the argmax of each row, the first among ties; on a CPU several times faster than `torch.argmax`.

    On a CPU torch vectorises max but not argmax, so the block that contains the maximum is found first.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size % BLOCK or size <= FEW:
        return scores.max(-1).indices  # twice as fast as argmax in bf16
    blocks = scores.unflatten(-1, (size // BLOCK, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    block = blocks.take_along_dim(best[..., None, None], -2)[..., 0, :]
    return best * BLOCK + block.argmax(-1)
