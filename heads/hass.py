"""HASS (Zhang et al., arXiv 2408.15766): EAGLE's head, trained on the features that it will meet when it drafts.

Harmonised context alignment trains step j on the predictions of step j - 1: a drafted row attends to true rows up to
where its chain began and to the chain's own rows after that, as `unroll` does with more than one depth. The gradient
does not run from a step into the one before it. The other half, distilling the target's top-k tokens alone, is the loss
`top_k`. The trained head is an EAGLE head and decodes as one.
"""

from heads.eagle import Eagle


class Hass(Eagle):
    """An EAGLE head whose training steps do not reach into each other."""

    detach = True
