"""Triton kernels of absorbed decoding: split over the cached rows, then an exact merge.

The file runs in two ways: compiled, and interpreted on a CPU as a second copy of the module (triton_backend.py). It
therefore holds kernels only and names nothing of Triton's own jitted library, which the interpreter can take only
where TRITON_INTERPRET was set before the first import. Annotations are values here, not strings: Triton reads them.

Two faults of the interpreter are worked around where `INTERPRET` is true (seed 1 is silent on it; measured): its dot
multiplies the bit patterns of bfloat16, and its cast to bfloat16 truncates.
"""

import triton
import triton.language as tl


@triton.jit
def _round_to_bfloat16(x):
    """Float32 rounded to the nearest bfloat16, ties to even, still as float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_compute(x, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):
    """A stored tile in the dtype of the dots; the interpreter widens bfloat16 by its bits."""
    if INTERPRET and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(COMPUTE)


@triton.jit
def _round_to_rows(x, ROUND: tl.constexpr, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):
    """Float32 rounded to the dtype that rows are computed in, then in the dtype of the dots."""
    if ROUND == "bfloat16":
        if INTERPRET:
            x = _round_to_bfloat16(x)
        else:
            x = x.to(tl.bfloat16)
    elif ROUND == "float16":
        x = x.to(tl.float16)
    return x.to(COMPUTE)


@triton.jit
def _weights(p, COMPUTE: tl.constexpr, EMULATE: tl.constexpr):
    """Softmax weights in the dtype of the second dot; EMULATE: bfloat16's values in float32's clothes."""
    if EMULATE:
        p = _round_to_bfloat16(p)
    return p.to(COMPUTE)


@triton.jit
def _query_part(start, ok, AT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers AT … AT + WIDTH of each packed query row; 0 past the last row."""
    col = tl.arange(0, BLOCK)
    return tl.load(start[:, None] + (AT + col)[None, :], mask=ok[:, None] & (col < WIDTH)[None, :], other=0.0)


@triton.jit
def _plain_tile(base, valid, AT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Numbers AT … AT + WIDTH of the rows at pointers `base` (N,); 0 where `valid` (N,) is false."""
    col = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if WIDTH < BLOCK:
        mask = mask & (col < WIDTH)[None, :]
    x = tl.load(base[:, None] + (AT + col)[None, :], mask=mask, other=0.0)  # (N, BLOCK)
    return _to_compute(x, COMPUTE, INTERPRET)


@triton.jit
def _scaled_tile(base, valid, AT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                 SCALES_AT: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
                 ROUND: tl.constexpr, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Latents AT … AT + WIDTH of FP8 rows, times the float32 scale of their group.

    An E4M3 byte is a float16 of the same sign and mantissa whose exponent is 8 too small, subnormals included; so no
    FP8 unit is needed (sm_80 and sm_86 have none).
    """
    col = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if WIDTH < BLOCK:
        mask = mask & (col < WIDTH)[None, :]
    byte = tl.load(base[:, None] + (AT + col)[None, :], mask=mask, other=0).to(tl.int32)  # (N, BLOCK)
    half = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    x = tl.where((byte & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    scale_at = (base + SCALES_AT).to(tl.pointer_type(tl.float32), bitcast=True)  # (N,)
    if BLOCK <= GROUP:
        x = x * tl.load(scale_at + AT // GROUP, mask=valid, other=0.0)[:, None]
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        group = AT // GROUP + tl.arange(0, GROUPS)
        scale = tl.load(
            scale_at[:, None] + group[None, :], mask=valid[:, None] & (group < SCALES)[None, :], other=0.0
        )  # (N, GROUPS)
        x = tl.reshape(tl.reshape(x, (x.shape[0], GROUPS, GROUP)) * scale[:, :, None], (x.shape[0], BLOCK))
    return _round_to_rows(x, ROUND, COMPUTE, INTERPRET)


@triton.jit
def _latent_tile(base, valid, AT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                 SCALES_AT: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
                 ROUND: tl.constexpr, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Latents AT … AT + WIDTH, whatever the format of the rows."""
    if GROUP:
        x = _scaled_tile(base, valid, AT, WIDTH, BLOCK, SCALES_AT, SCALES, GROUP, ROUND, COMPUTE, INTERPRET)
    else:
        x = _plain_tile(base, valid, AT, WIDTH, BLOCK, COMPUTE, INTERPRET)
    return x


@triton.jit
def _rope_tile(base, valid, D_C: tl.constexpr, D_R: tl.constexpr, BLOCK_R: tl.constexpr,
               ROPE_AT: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr, COMPUTE: tl.constexpr,
               INTERPRET: tl.constexpr):  # fmt: skip
    """Rotated keys of the rows; behind FP8 latents they start after the scales, counted in bytes."""
    if GROUP:
        start = (base + ROPE_AT).to(tl.pointer_type(ROPE), bitcast=True)
        x = _plain_tile(start, valid, 0, D_R, BLOCK_R, COMPUTE, INTERPRET)
    else:
        x = _plain_tile(base, valid, D_C, D_R, BLOCK_R, COMPUTE, INTERPRET)
    return x


@triton.jit
def _row_pointers(pool, places, n, valid, page_stride, row_stride, PAGE: tl.constexpr, SPARSE: tl.constexpr):
    """Pointers to the rows of keys `n`, 64 bits wide: a pool may hold more than 2^31 numbers.

    `places` points to a sequence's block table, or, where sparse, to a query's physical indices.
    """
    if SPARSE:
        place = tl.load(places + n, mask=valid, other=0).to(tl.int64)
        page = place // PAGE
        slot = place % PAGE
    else:
        page = tl.load(places + n // PAGE, mask=valid, other=0).to(tl.int64)
        slot = (n % PAGE).to(tl.int64)
    return pool + page * page_stride + slot * row_stride


@triton.jit
def _attend(peak, total, acc, tail_acc, q, q_tail, q_rope, pool, places, page_stride, row_stride, n0,
            n1, visible, scale, D_C: tl.constexpr, D_R: tl.constexpr, BLOCK_C: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
            SCALES_AT: tl.constexpr, ROPE_AT: tl.constexpr, ROPE: tl.constexpr, ROUND: tl.constexpr,
            COMPUTE: tl.constexpr, INTERPRET: tl.constexpr, EMULATE: tl.constexpr, PAGE: tl.constexpr,
            SPARSE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Online softmax over the keys n0 … n1 (seed 1, 0x0A): every step rescales what it has by the new maximum.

    It takes and returns the running maximum `peak` (M,), base 2, sum `total` (M,) and weighted latent `acc` (M, C),
    `tail_acc` (M, T). `q` (M, C), `q_tail` (M, T) and `q_rope` (M, R) are the parts of the query; a row sees the keys
    below `visible` (M,), which no row has beyond the segment's length.
    """
    for start in tl.range(n0, n1, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        valid = n < n1
        base = _row_pointers(pool, places, n, valid, page_stride, row_stride, PAGE, SPARSE)  # (N,)
        kv = _latent_tile(base, valid, 0, BLOCK_C if BLOCK_T else D_C, BLOCK_C, SCALES_AT, SCALES, GROUP, ROUND,
                          COMPUTE, INTERPRET)  # fmt: skip
        s = tl.dot(q, tl.trans(kv), input_precision="ieee")  # (M, N)
        if BLOCK_T:
            kv_tail = _latent_tile(base, valid, BLOCK_C, D_C - BLOCK_C, BLOCK_T, SCALES_AT, SCALES, GROUP, ROUND,
                                   COMPUTE, INTERPRET)  # fmt: skip
            s = tl.dot(q_tail, tl.trans(kv_tail), acc=s, input_precision="ieee")
        if D_R:
            k_rope = _rope_tile(base, valid, D_C, D_R, BLOCK_R, ROPE_AT, GROUP, ROPE, COMPUTE, INTERPRET)
            s = tl.dot(q_rope, tl.trans(k_rope), acc=s, input_precision="ieee")
        s = tl.where(n[None, :] < visible[:, None], s * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.reduce(s, 1, tl.standard._elementwise_max))
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.math.exp2(peak - finite)
        p = tl.math.exp2(s - finite[:, None])
        total = total * shrink + tl.reduce(p, 1, tl.standard._sum_combine)
        weight = _weights(p, COMPUTE, EMULATE)
        acc = tl.dot(weight, kv, acc=acc * shrink[:, None], input_precision="ieee")
        if BLOCK_T:
            tail_acc = tl.dot(weight, kv_tail, acc=tail_acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc, tail_acc


@triton.jit
def _store_result(OUT, LSE, SINKS, at, head, ok, peak, total, acc, tail_acc, D_C: tl.constexpr,
                  BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, HAS_SINKS: tl.constexpr):  # fmt: skip
    """Output and natural-log LSE of rows whose keys are all in: 0 and −inf where nothing was seen.

    A sink takes its share of the output, exp(lse) / (exp(lse) + exp(sink)), and leaves the LSE alone (FlashMLA's
    `attn_sink`).
    """
    seen = total != 0  # NaN is seen: what made it must not vanish
    full = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (peak + tl.math.log2(full)) * 0.6931471805599453, float("-inf"))  # ln 2
    share = 1.0 / full
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=ok, other=float("-inf"))
        share = tl.where(seen, share / (1.0 + tl.math.exp(sink - tl.where(seen, lse, 0.0))), 0.0)
    tl.store(LSE + at, lse, mask=ok)
    col = tl.arange(0, BLOCK_C)
    mask = ok[:, None] & (col < D_C)[None, :]
    tl.store(OUT + at[:, None] * D_C + col[None, :], (acc * share[:, None]).to(OUT.dtype.element_ty), mask=mask)
    if BLOCK_T:
        tail = BLOCK_C + tl.arange(0, BLOCK_T)
        mask = ok[:, None] & (tail < D_C)[None, :]
        value = tail_acc * share[:, None]
        tl.store(OUT + at[:, None] * D_C + tail[None, :], value.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _store_partial(PARTIAL, PARTIAL_LSE, at, ok, peak, total, acc, tail_acc, D_C: tl.constexpr,
                   BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Normalised output and base-2 LSE of one split; of a row that saw nothing, the LSE −inf alone."""
    seen = total != 0  # NaN is seen: what made it must not vanish
    full = tl.where(seen, total, 1.0)
    tl.store(PARTIAL_LSE + at, tl.where(seen, peak + tl.math.log2(full), float("-inf")), mask=ok)
    ok = ok & seen
    col = tl.arange(0, BLOCK_C)
    tl.store(PARTIAL + at[:, None] * D_C + col[None, :], acc / full[:, None],
             mask=ok[:, None] & (col < D_C)[None, :])  # fmt: skip
    if BLOCK_T:
        tail = BLOCK_C + tl.arange(0, BLOCK_T)
        tl.store(PARTIAL + at[:, None] * D_C + tail[None, :], tail_acc / full[:, None],
                 mask=ok[:, None] & (tail < D_C)[None, :])  # fmt: skip


@triton.jit
def _span(first, last, length, BLOCK_N: tl.constexpr):
    """Keys of a segment that lie in its blocks first … last; either may lie outside."""
    n0 = tl.maximum(first, 0) * BLOCK_N
    return n0, tl.minimum(last * BLOCK_N, length)


@triton.jit
def split_kernel(Q, POOL, PLACES, LENGTHS, EXTRA_POOL, EXTRA_PLACES, EXTRA_LENGTHS, SINKS, OUT, LSE,
                 PARTIAL, PARTIAL_LSE, scale, q_batch, q_token, q_head, page_stride, row_stride,
                 places_stride, extra_page, extra_row, extra_places, ROWS, H: tl.constexpr,
                 S_Q: tl.constexpr, TOKENS: tl.constexpr, CAUSAL: tl.constexpr, SPARSE: tl.constexpr,
                 EXTRA: tl.constexpr, HAS_SINKS: tl.constexpr, D_C: tl.constexpr, D_R: tl.constexpr,
                 BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
                 GROUP: tl.constexpr, SCALES: tl.constexpr, SCALES_AT: tl.constexpr,
                 ROPE_AT: tl.constexpr, ROPE: tl.constexpr, ROUND: tl.constexpr, COMPUTE: tl.constexpr,
                 INTERPRET: tl.constexpr, EMULATE: tl.constexpr, PAGE: tl.constexpr,
                 EXTRA_PAGE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One tile of packed rows over one split of one sequence's keys.

    A group is a sequence with all its queries, S_Q · H rows that share the keys; where sparse, one query of a
    sequence (TOKENS queries each), H rows. Grid: (groups · SPLITS · row tiles,), fixed by the shape. Each group cuts
    its own length, read here, into at most SPLITS runs of blocks, so a captured graph follows lengths that change.
    """
    tiles = (ROWS + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    rows = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)  # (M,)
    split = (pid // tiles) % SPLITS
    group = (pid // (tiles * SPLITS)).to(tl.int64)
    ok = rows < ROWS
    query = rows // H
    head = rows % H
    start = Q + (group // TOKENS) * q_batch + ((group % TOKENS) + query) * q_token + head.to(tl.int64) * q_head
    length = tl.load(LENGTHS + group).to(tl.int32)
    blocks = (length + BLOCK_N - 1) // BLOCK_N
    extra_length = length
    extra_blocks = blocks * 0
    if EXTRA:
        extra_length = tl.load(EXTRA_LENGTHS + group).to(tl.int32)
        extra_blocks = (extra_length + BLOCK_N - 1) // BLOCK_N
    run = (blocks + extra_blocks + SPLITS - 1) // SPLITS
    first = split * run
    if CAUSAL:
        visible = length - (S_Q - 1 - query)
    else:
        visible = length + query * 0
    q = _to_compute(_query_part(start, ok, 0, BLOCK_C if BLOCK_T else D_C, BLOCK_C), COMPUTE, INTERPRET)
    q_tail = q
    q_rope = q
    if BLOCK_T:
        q_tail = _to_compute(_query_part(start, ok, BLOCK_C, D_C - BLOCK_C, BLOCK_T), COMPUTE, INTERPRET)
    if D_R:
        q_rope = _to_compute(_query_part(start, ok, D_C, D_R, BLOCK_R), COMPUTE, INTERPRET)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_C], 0.0, tl.float32)
    tail_acc = tl.full([BLOCK_M, BLOCK_T if BLOCK_T else 1], 0.0, tl.float32)
    n0, n1 = _span(first, first + run, length, BLOCK_N)
    peak, total, acc, tail_acc = _attend(
        peak, total, acc, tail_acc, q, q_tail, q_rope, POOL, PLACES + group * places_stride,
        page_stride, row_stride, n0, n1, visible, scale, D_C, D_R, BLOCK_C, BLOCK_T, BLOCK_R, GROUP,
        SCALES, SCALES_AT, ROPE_AT, ROPE, ROUND, COMPUTE, INTERPRET, EMULATE, PAGE, SPARSE, BLOCK_N,
        STAGES)  # fmt: skip
    if EXTRA:
        n0, n1 = _span(first - blocks, first + run - blocks, extra_length, BLOCK_N)
        peak, total, acc, tail_acc = _attend(
            peak, total, acc, tail_acc, q, q_tail, q_rope, EXTRA_POOL, EXTRA_PLACES + group *
            extra_places, extra_page, extra_row, n0, n1, extra_length + query * 0, scale, D_C, D_R,
            BLOCK_C, BLOCK_T, BLOCK_R, GROUP, SCALES, SCALES_AT, ROPE_AT, ROPE, ROUND, COMPUTE,
            INTERPRET, EMULATE, EXTRA_PAGE, SPARSE, BLOCK_N, STAGES)  # fmt: skip
    if SPLITS == 1:
        _store_result(OUT, LSE, SINKS, group * ROWS + rows, head, ok, peak, total, acc, tail_acc, D_C, BLOCK_C,
                      BLOCK_T, HAS_SINKS)  # fmt: skip
    else:
        _store_partial(PARTIAL, PARTIAL_LSE, (group * SPLITS + split) * ROWS + rows, ok, peak, total, acc, tail_acc,
                       D_C, BLOCK_C, BLOCK_T)  # fmt: skip


@triton.jit
def merge_kernel(PARTIAL, PARTIAL_LSE, SINKS, OUT, LSE, ROWS, H: tl.constexpr, D_C: tl.constexpr,
                 SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_S: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """Exact merge of the splits of one row by their LSE (seed 1, 0x0C), BLOCK_D numbers at a time.

    PARTIAL is (groups, SPLITS, ROWS, D_C), PARTIAL_LSE without the last axis, base 2. What a split that saw nothing
    left in PARTIAL is not read. Grid: (groups · ROWS, ⌈D_C / BLOCK_D⌉).
    """
    pid = tl.program_id(0)
    group = (pid // ROWS).to(tl.int64)
    row = pid % ROWS
    split = tl.arange(0, BLOCK_S)
    at = (group * SPLITS + split) * ROWS + row  # (S,)
    parts = tl.load(PARTIAL_LSE + at, mask=split < SPLITS, other=float("-inf"))
    peak = tl.reduce(parts, 0, tl.standard._elementwise_max)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.math.exp2(parts - finite)  # (S,)
    total = tl.reduce(weight, 0, tl.standard._sum_combine)
    seen = total != 0  # NaN is seen: what made it must not vanish
    full = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (finite + tl.math.log2(full)) * 0.6931471805599453, float("-inf"))  # ln 2
    share = 1.0 / full
    if HAS_SINKS:
        sink = tl.load(SINKS + row % H)
        share = tl.where(seen, share / (1.0 + tl.math.exp(sink - tl.where(seen, lse, 0.0))), 0.0)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (parts > float("-inf"))[:, None] & (col < D_C)[None, :]
    partial = tl.load(PARTIAL + at[:, None] * D_C + col[None, :], mask=mask, other=0.0)  # (S, D)
    value = tl.reduce(partial * weight[:, None], 0, tl.standard._sum_combine) * share
    row_at = group * ROWS + row
    tl.store(OUT + row_at * D_C + col, value.to(OUT.dtype.element_ty), mask=col < D_C)
    if tl.program_id(1) == 0:
        tl.store(LSE + row_at, lse)
