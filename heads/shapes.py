"""Shapes that many signatures have, in the letters of heads/base.py."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Sequences = Int[Tensor, "B T"]  # a whole number for each row: its token, document or position
PerSequence = Int[Tensor, "B"]
RowMask = Bool[Tensor, "B T"]
Rows = Float[Tensor, "B T D"]  # a state for each row
LayerRows = Float[Tensor, "B T L D"]  # a state of each row after each layer that is read
RowInputs = Float[Tensor, "B T X"]
Paths = Int[Tensor, "B T d"] | None  # the row whose token each row drafts at each depth; None: t + depth
Anchors = Int[Tensor, "B n"] | None  # the rows to draft from, in order; None for all
States = Float[Tensor, "*n D"]
Inputs = Float[Tensor, "*n X"]  # states of another width than the model's
TokenIds = Int[Tensor, "*n"]
Logits = Float[Tensor, "*n W"]  # over the head's own vocabulary
Nodes = Int[Tensor, "B N"]  # a whole number for each node of a level, or each query
NodeStates = Float[Tensor, "B N D"]
HeadRows = Float[Tensor, "B H T E"]  # a row of each attention head
HeadOutputs = Float[Tensor, "B H T F"]  # outputs of the values' width
KeyRows = Float[Tensor, "B G T E"]
Advanced = tuple[NodeStates, NodeStates]  # a step's states, and its lm_head's inputs
