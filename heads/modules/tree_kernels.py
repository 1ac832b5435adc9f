"""The Triton kernels of heads/modules/tree_attention.py, with its shape letters."""

import triton
import triton.language as tl


@triton.jit
def attend(
    query, key, value, mask, out, sums,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, m_b, m_t, m_s,
    scale, queries, keys, chunk, groups,
    SHARE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, WIDE_E: tl.constexpr, WIDE_F: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, ADDITIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from a block of rows to a chunk of the keys; write the weighted values and log2 of the weights' sum."""
    b, g = tl.program_id(0).to(tl.int64) // groups, tl.program_id(0).to(tl.int64) % groups
    c, chunks = tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # query heads that share keys, with all their queries
    head, t = g * SHARE + row // queries, row % queries
    valid_row = row < SHARE * queries
    e, f, offset = tl.arange(0, WIDE_E), tl.arange(0, WIDE_F), tl.arange(0, STEP)
    q = tl.load(
        query + b * q_b + head[:, None] * q_h + t[:, None] * q_t + e[None, :],
        valid_row[:, None] & (e < E)[None, :],
        0.0,
    )
    key, value, mask = key + b * k_b + g * k_g, value + b * v_b + g * v_g, mask + b * m_b
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE_F], tl.float32)
    for step in range(0, chunk, STEP):
        s = (c * chunk + step + offset).to(tl.int64)
        valid_key = s < keys
        k = tl.load(key + s[None, :] * k_s + e[:, None], valid_key[None, :] & (e < E)[:, None], 0.0)
        seen = tl.load(mask + t[:, None] * m_t + s[None, :] * m_s, valid_row[:, None] & valid_key[None, :], 0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        if ADDITIVE:
            score = tl.where(valid_key[None, :], score + seen.to(tl.float32) * 1.4426950408889634, float("-inf"))
        else:
            score = tl.where(seen != 0, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row whose keys so far are all masked
        weight, decay = tl.exp2(score - base[:, None]), tl.exp2(most - base)
        v = tl.load(value + s[:, None] * v_s + f[None, :], valid_key[:, None] & (f < F)[None, :], 0.0)
        total = total * decay + tl.sum(weight, 1)
        mean = mean * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        most = higher
    index = ((b * groups * SHARE + head) * queries + t) * chunks + c
    tl.store(sums + index, most + tl.log2(total), valid_row)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + index[:, None] * F + f[None, :], mean.to(out.dtype.element_ty), valid_row[:, None] & (f < F)[None, :]
    )


@triton.jit
def merge(
    parts, sums, out, o_b, o_h, o_t, heads, queries,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, F: tl.constexpr, WIDE_F: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a query, weighted by their sums."""
    row = tl.program_id(0).to(tl.int64)
    c, f = tl.arange(0, WIDE), tl.arange(0, WIDE_F)
    total = tl.load(sums + row * CHUNKS + c, c < CHUNKS, float("-inf"))
    most = tl.max(total, 0)
    weight = tl.exp2(total - tl.where(most == float("-inf"), 0.0, most))
    means = tl.load(parts + (row * CHUNKS + c[:, None]) * F + f[None, :], (c < CHUNKS)[:, None] & (f < F)[None, :], 0.0)
    whole = tl.sum(weight, 0)
    mean = tl.sum(weight[:, None] * means, 0) / tl.where(whole == 0.0, 1.0, whole)
    index = row // (heads * queries) * o_b + row // queries % heads * o_h + row % queries * o_t
    tl.store(out + index + f, mean.to(out.dtype.element_ty), f < F)
