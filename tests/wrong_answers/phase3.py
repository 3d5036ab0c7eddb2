"""What goes wrong in phase 3's exercises."""

from wrong_answers import Wrong


def _hidden(masked):
    """The causal mask of the whole forward kernel as an expression of s and of seen, whether a key is visible."""
    return {
        "from phase2_tiling": "from phase1_softmax.online_softmax import online_softmax_step\nfrom phase2_tiling",
        "        visible = (offs_n < seq_k)[None, :]\n": (
            "        seen = (offs_n < seq_k)[None, :]\n"
            '        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale\n'
        ),
        "visible = visible & (offs_m": "seen = seen & (offs_m",
        "m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)": (
            f's = tl.where((offs_n < seq_k)[None, :], {masked}, float("-inf"))\n'
            "        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)\n"
            '        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")'
        ),
    }


_BLOCK_POINTERS = {
    "    for start_n in range(0, end_n, BLOCK_N):\n": "".join(
        f"    {x}_tile = tl.make_block_ptr({x}_head, (seq_k, HEAD_DIM), (stride_{x}[2], stride_{x}[3]), (0, 0), "
        "(BLOCK_N, BLOCK_D), (1, 0))\n"
        for x in "kv"
    )
    + "    start_n = 0\n    while start_n < end_n:\n",
    "scale, visible)": "scale, visible)\n        start_n += BLOCK_N\n"
    "        k_tile, v_tile = tl.advance(k_tile, (BLOCK_N, 0)), tl.advance(v_tile, (BLOCK_N, 0))",
    **{
        f"load_tile({x}_head, stride_{x}, offs_n, offs_d, seq_k, HEAD_DIM)": (
            f'tl.load({x}_tile, boundary_check=(0, 1), padding_option="zero")'
        )
        for x in "kv"
    },
}


WRONG = {
    "grouped_heads": [
        Wrong(
            "by modulo", {"h // group": "h % (heads_q // group)"}, "query head 1 reads k and v of key head 1; it should"
        ),
        Wrong(
            "within the group",
            {"h // group": "h % group"},
            "reads k and v of key head 1; it should read 0 (h // group)",
        ),
        Wrong("the query head's keys", {"h_kv = h // group": "h_kv = h"}, "it should read 0 (h // group)"),
        Wrong(
            "offsets of 32 bits",
            {"(tl.program_id(0) // tiles_m).to(tl.int64)": "tl.program_id(0) // tiles_m"},
            "64",
            section="2.3",
        ),
        Wrong(
            "the head's number is left at 32 bits",
            {"pid_bh // heads_q, pid_bh % heads_q": ("pid_bh // heads_q, tl.program_id(0) // tiles_m % heads_q")},
            "heads 2^30 elements apart: the third is not found",
        ),
        Wrong("the batch stride of k is forgotten", {"k_ptr += b * stride_k[0] + ": "k_ptr += "}, "reads k of batch 0"),
        Wrong(
            "v with k's strides",
            {
                "b * stride_v[0] + h_kv * stride_v[1]": "b * stride_k[0] + h_kv * stride_k[1]",
                "load_tile(v_ptr, stride_v": "load_tile(v_ptr, stride_k",
            },
            "v is read with the strides of k: it has",
        ),
        Wrong(
            "v_ptr moved by k's strides",
            {"b * stride_v[0] + h_kv * stride_v[1]": "b * stride_k[0] + h_kv * stride_k[1]"},
            "v is read with the strides of k between heads",
        ),
        Wrong(
            "v's batches by k's stride",
            {"b * stride_v[0] + h_kv": "b * stride_k[0] + h_kv"},
            "v is read with the strides of k between batches",
            at_once=True,
        ),
        Wrong("the query head's values", {"h_kv * stride_v[1]": "h * stride_v[1]"}, "k is found: look at v_ptr"),
        Wrong("q stands still", {"    q_ptr += b * stride_q[0] + h * stride_q[1]\n": ""}, "Is q_ptr moved?"),
        Wrong(
            "o stands still", {"    o_ptr += b * stride_o[0] + h * stride_o[1]\n": ""}, "does o_ptr stand at its head?"
        ),
        Wrong(
            "batch and head swapped",
            {"b, h = pid_bh // heads_q, pid_bh % heads_q": "h, b = pid_bh // heads_q, pid_bh % heads_q"},
            "b is the number of the head // heads_q",
        ),
        Wrong(
            "the tile from the front",
            {
                "pid_m = tl.program_id(0) % tiles_m": "pid_m = tl.program_id(0) // heads_q",
                "(tl.program_id(0) // tiles_m)": "(tl.program_id(0) % heads_q)",
            },
            "the number % tiles_m",
        ),
        Wrong(
            "heads fastest",
            {
                "pid_m = tl.program_id(0) % tiles_m": "pid_m = tl.program_id(0) // heads_q % tiles_m",
                "(tl.program_id(0) // tiles_m)": (
                    "(tl.program_id(0) // (heads_q * tiles_m) * heads_q + tl.program_id(0) % heads_q)"
                ),
            },
            "the tile runs fastest",
            at_once=True,
        ),
        Wrong(
            "heads of all batches fastest",
            {
                "pid_m = tl.program_id(0) % tiles_m": (
                    "all_heads = tl.num_programs(0) // tiles_m\n    pid_m = tl.program_id(0) // all_heads"
                ),
                "(tl.program_id(0) // tiles_m)": "(tl.program_id(0) % all_heads)",
            },
            "the tile runs fastest",
            at_once=True,
        ),
        Wrong(
            "the other operator",
            {
                "pid_m = tl.program_id(0) % tiles_m": "pid_m = tl.program_id(0) // tiles_m",
                "(tl.program_id(0) // tiles_m)": "(tl.program_id(0) % tiles_m)",
            },
            "the number % tiles_m",
        ),
    ],
    "classify_tiles": [
        Wrong(
            "top-left alignment",
            {"    first = tile_m * block_m + seq_k - seq_q": "    first = tile_m * block_m"},
            "top-left",
        ),
        Wrong(
            "the end is not bounded",
            {"min(seq_k, seen_by_first + block_m - 1)": "seen_by_first + block_m - 1"},
            "there are",
        ),
        Wrong(
            "a full tile too few",
            {"if last_key <= first else": "if last_key < first else"},
            "says 'full': its first query sees its last key",
        ),
        Wrong(
            "full by the tile's last query",
            {"if last_key <= first else": "if last_key <= first + block_m - 1 else"},
            "says 'partial': its first query does not see its last key",
        ),
        Wrong(
            "the shift the wrong way round",
            {"    first = tile_m * block_m + seq_k - seq_q": "    first = tile_m * block_m + seq_q - seq_k"},
            "kind: this is right for j <= i + seq_q - seq_k: is the shift the wrong way round? (kind(0, 0, 32, 32, 70,",
        ),
        Wrong(
            "the bounds' shift the wrong way round",
            {"= tile_m * block_m + seq_k - seq_q + 1": "= tile_m * block_m + seq_q - seq_k + 1"},
            "loop_bounds: this is right for j <= i + seq_q - seq_k: is the shift the wrong way round? (loop_bounds(",
        ),
        Wrong(
            "loop_bounds is not begun",
            {"    seen_by_first =": "    raise NotImplementedError\n    seen_by_first ="},
            "kind is right; loop_bounds is still to be written (line",
        ),
        Wrong("the end is negative", {"(max(0, seen_by_last) +": "(seen_by_last +"}, "Can either bound be negative?"),
        Wrong(
            "full is negative",
            {"full = max(0, seen_by_first)": "full = seen_by_first"},
            "Can either bound be negative?",
        ),
        Wrong(
            "full is rounded up",
            {"max(0, seen_by_first) // block_n": "(max(0, seen_by_first) + block_n - 1) // block_n"},
            "walked without a mask, though not all pairs are visible: attention is wrong, first in query",
        ),
        Wrong(
            "all tiles are masked",
            {"full = max(0, seen_by_first) // block_n": "full = 0"},
            "attention is right, but tile 0 is masked for nothing",
        ),
        Wrong(
            "the end is rounded down",
            {"(max(0, seen_by_last) + block_n - 1) // block_n": "max(0, seen_by_last) // block_n"},
            "not visited: attention is wrong, first in query",
        ),
        Wrong(
            "the end counts the partial tiles alone",
            {"    return full, end": "    return full, end - full"},
            "the end counts all tiles that are visited",
        ),
        Wrong(
            "a tile past the diagonal is visited",
            {"    return full, end": "    return full, min(end + 1, (seq_k + block_n - 1) // block_n)"},
            "visited for nothing",
        ),
        Wrong("the diagonal is not visited", {"- seq_q + 1": "- seq_q"}, "loop_bounds: the diagonal is hidden"),
        Wrong(
            "top-left bounds",
            {"seen_by_first = tile_m * block_m + seq_k - seq_q": "seen_by_first = tile_m * block_m"},
            "loop_bounds: this is right for top-left",
        ),
        Wrong("bounds in float", {"seen_by_first) // block_n": "seen_by_first) / block_n"}, "divide with //"),
    ],
    "whole_forward": [
        Wrong(
            "v with k's strides",
            {"v_head, stride_v, offs_n": "v_head, stride_k, offs_n"},
            "heads in other places",
            section="2.2",
        ),
        Wrong("heads by the remainder", {"(k_ptr, stride_k, head // group": "(k_ptr, stride_k, head % group"}, "lse"),
        Wrong(
            "the own key hidden", {">= offs_n[None": "> offs_n[None"}, "causal, fewer keys than queries", section="3.3"
        ),
        Wrong("bottom right alone", {"seq_q if bottom_right else 0": "seq_q"}, "causal, fewer keys than queries"),
        Wrong(
            "no loop bound",
            {"tl.minimum(seq_k, (pid_m + 1) * BLOCK_M + shift)": "seq_k"},
            "20 tiles are visited, where 16",
        ),
        Wrong(
            "past the keys",
            {"tl.minimum(seq_k, (pid_m + 1) * BLOCK_M + shift)": "(pid_m + 1) * BLOCK_M + shift"},
            "are visited",
        ),
        Wrong(
            "lse in base 2", {"m_i + tl.log(l_safe)": "m_i + tl.log2(l_safe)"}, "lse FAIL", at_once=True, section="4.1"
        ),
        Wrong("no guard", {"tl.where(l_i == 0.0, 1.0, l_i)": "l_i"}, "no keys"),
        Wrong("the mask the wrong way round", {">= offs_n[None": "<= offs_n[None"}, "the wrong way round"),
        Wrong("the future alone", {"+ shift >= offs_n[None": "+ shift < offs_n[None"}, "the wrong way round"),
        Wrong(
            "the flag is ignored",
            {"k.shape[2] - seq_q if bottom_right else 0": "0"},
            "bottom-right, 20 queries and 50 keys: this is the top-left alignment",
            section="3.4",
        ),
        Wrong(
            "the shift the wrong way round",
            {"k.shape[2] - seq_q if": "seq_q - k.shape[2] if"},
            "20 queries and 50 keys: no row sees a key, where all do: has the shift the wrong sign?",
        ),
        Wrong(
            "the walk ends as top-left",
            {"(pid_m + 1) * BLOCK_M + shift)": "(pid_m + 1) * BLOCK_M)"},
            "the walk ends where it does in the top-left alignment",
        ),
        Wrong(
            "the walk is as long as top-left at least",
            {"(pid_m + 1) * BLOCK_M + shift)": "(pid_m + 1) * BLOCK_M + tl.maximum(shift, 0))"},
            "causal bottom-right, 120 queries, 72 keys, head_dim 24, tiles of 32 and 16: 16 tiles are visited, where 9",
            at_once=True,
        ),
        Wrong(
            "rows without a key are NaN",
            {"tl.where(l_i == 0.0, 1.0, l_i)": "tl.where(end_n <= 0, 1.0, l_i)"},
            "all logits are -inf",
        ),
        Wrong(
            "rows without a key are not stored",
            {"m_i + tl.log(l_safe), mask=offs_m < seq_q": "m_i + tl.log(l_safe), mask=(offs_m < seq_q) & (l_i > 0)"},
            "never stored",
        ),
        Wrong("lse m + l", {"m_i + tl.log(l_safe)": "m_i + l_safe"}, "the LSE is m + l without the logarithm"),
        Wrong("lse m - log(l)", {"m_i + tl.log(l_safe)": "m_i - tl.log(l_safe)"}, "the LSE is m - log(l)"),
        Wrong("lse without the maximum", {"m_i + tl.log(l_safe)": "tl.log(l_safe)"}, "without the maximum"),
        Wrong(
            "lse without its batch",
            {"lse_ptr + head.to": "lse_ptr + (head % heads_q).to"},
            "o is complete, and lse is not",
            section="4.1",
        ),
        Wrong(
            "q is loaded to BLOCK_D", {"offs_d, seq_q, HEAD_DIM)  #": "offs_d, seq_q, BLOCK_D)  #"}, "end at HEAD_DIM?"
        ),
        Wrong(
            "k is loaded to BLOCK_D",
            {"k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM": "k_head, stride_k, offs_n, offs_d, seq_k, BLOCK_D"},
            "end at HEAD_DIM?",
        ),
        Wrong(
            "pieces of the course",
            {"import torch\n": "from phase3_forward.given import finish\n\nimport torch\n"},
            "takes from phase 3's modules",
        ),
        Wrong(
            "lse of a row without weights",
            {"m_i + tl.log(l_safe)": "tl.where((l_i == 0.0) & (end_n > 0), 0.0, m_i + tl.log(l_safe))"},
            "all logits are -inf",
            at_once=True,
        ),
        Wrong("a small number in l", {"tl.where(l_i == 0.0, 1.0, l_i)": "l_i + 1e-6"}, "Is something added to l?"),
        Wrong(
            "key heads of batch 1 are counted among the query heads",
            {"(k_ptr, stride_k, head // group, heads_q // group": "(k_ptr, stride_k, head // group, heads_q"},
            "query heads share key heads",
        ),
        Wrong(
            "tiles of its own",
            {"tiles = runtime.tile_sizes(head_dim, q.dtype)": "tiles = dict(BLOCK_M=64, BLOCK_N=64)"},
            "Are the tiles those of runtime.tile_sizes?",
        ),
        Wrong("missing keys seen", {"(offs_n < seq_k)[None, :]": "(offs_n <= seq_k)[None, :]"}, "one head"),
        Wrong(
            "padded columns stored",
            {"seq_q, HEAD_DIM, acc": "seq_q, BLOCK_D, acc"},
            "o   FAIL  fn stored outside of it: 24 behind it",
        ),
        Wrong("o with q's strides", {"out.stride(),": "q.stride(),"}, "heads in other places"),
        Wrong(
            "copies",
            {"runtime.to_kernel_dtype(q, k, v, o)": "runtime.to_kernel_dtype(q.contiguous(), k, v, o)"},
            "in place",
        ),
        Wrong(
            "PyTorch's attention",
            {
                "    tiles = runtime.tile_sizes(head_dim, q.dtype)\n": (
                    "    return torch.nn.functional.scaled_dot_product_attention(q, k, v), lse\n"
                    "    tiles = runtime.tile_sizes(head_dim, q.dtype)\n"
                )
            },
            "the kernel computes",
        ),
        Wrong(
            "a last stride of 1",
            {"(q_head, stride_q, offs_m": "(q_head, (stride_q[2], 1), offs_m"},
            "columns in other places",
        ),
        Wrong(
            "tiles of 8 columns",
            {"max(16, triton.next_power_of_2(head_dim))": "triton.next_power_of_2(head_dim)"},
            "the compiler refuses the launch for q, k, v",
            section="3.1",
        ),
        Wrong(
            "the state as wide as head_dim",
            {"acc = tl.zeros((BLOCK_M, BLOCK_D)": "acc = tl.zeros((BLOCK_M, HEAD_DIM)"},
            "a tile is padded to the next one",
            kind="error",
        ),
        Wrong(
            "o is not brought back to bf16",
            {"return out.to(o.dtype), lse": "return o, lse"},
            "nothing is stored in the o",
        ),
        Wrong(
            "the shift is never negative",
            {"k.shape[2] - seq_q if bottom_right": "max(0, k.shape[2] - seq_q) if bottom_right"},
            "bottom-right, 50 queries and 24 keys: this is the top-left alignment",
        ),
        Wrong(
            "scale or",
            {"    scale = validate.check_qkv(": "    scale = scale or None\n    scale = validate.check_qkv("},
            "a scale of 0",
        ),
        Wrong(
            "a program too many",
            {"* batch * heads_q,)\n    with": "* batch * heads_q + 1,)\n    with"},
            "stored outside",
        ),
        Wrong(
            "bf16 as it is",
            {"runtime.to_kernel_dtype(q, k, v, o)": "(q, k, v, o)"},
            "convert before the launch",
            kind="error",
        ),
        Wrong(
            "o as q lies",
            {"o = torch.empty(q.shape, dtype=q.dtype, device=q.device)": "o = torch.empty_like(q)"},
            "contiguous",
        ),
        Wrong("no lse mask", {", mask=offs_m < seq_q)": ")"}, "lse FAIL  fn stored outside of it: 14 behind it"),
        Wrong(
            "rows that are never stored", {"triton.cdiv(seq_q, tiles": "(seq_q // tiles"}, "elements were never stored"
        ),
        Wrong(
            "all strides ignored",
            {
                old: new
                for x, head, seq in (("q", "head", "seq_q"), *((x, "head // group", "seq_k") for x in "kv"))
                for old, new in (
                    (f"head_base({x}_ptr, stride_{x}, {head}, ", f"contiguous({x}_ptr, {head}, {seq} * HEAD_DIM, "),
                    (f"({x}_head, stride_{x}, ", f"({x}_head, (0, 0, HEAD_DIM, 1), "),
                )
            }
            | {
                "# your code: the kernel": (
                    "@triton.jit\ndef contiguous(base_ptr, head, size, heads):\n    return base_ptr + head * size\n\n\n"
                )
            },
            "q, k and v are read as if contiguous",
        ),
        Wrong(
            "-1e6 is added to hidden keys",
            _hidden("s + tl.where(seen, 0.0, -1e6)"),
            "logits in the millions",
            at_once=True,
        ),
        Wrong("-1e6 in place of hidden logits", _hidden("tl.where(seen, s, -1e6)"), "hidden keys keep some weight"),
        Wrong("-1e9 in place of hidden logits", _hidden("tl.where(seen, s, -1e9)"), "logits in the billions"),
        Wrong(
            "block pointers through while",
            _BLOCK_POINTERS,
            "torch.float16, on sm_90:\nCurrently we only support tensor pointer usages inside a `scf::ForOp`",
        ),
        Wrong(
            "queries past the end are loaded",
            {"offs_d, seq_q, HEAD_DIM)  #": "offs_d, tiles_m * BLOCK_M, HEAD_DIM)  #"},
            "elements of q are loaded",
        ),
        Wrong(
            "keys past the end are loaded",
            {"k_head, stride_k, offs_n, offs_d, seq_k,": "k_head, stride_k, offs_n, offs_d, seq_k + BLOCK_N,"},
            "elements of k are loaded",
        ),
        Wrong(
            "padded columns of v are loaded",
            {"v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM": "v_head, stride_v, offs_n, offs_d, seq_k, BLOCK_D"},
            "elements of v are loaded",
        ),
        Wrong(
            "q is loaded for each tile of keys",
            {
                "        k = load_tile(": (
                    "        q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)\n        k = load_tile("
                )
            },
            "is each tile loaded once?",
        ),
    ],
    "sliding_window": [
        Wrong(
            "the walk goes on behind the keys",
            {"tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)": "(pid_m + 1) * BLOCK_M"},
            "where do the keys end?",
        ),
        Wrong("a key too many", {"(age < window)": "(age <= window)"}, "one key too many"),
        Wrong("no left edge", {" & (age < window)": ""}, "left edge of the band are not masked"),
        Wrong("no right edge", {" & (age >= 0)": ""}, "keys after the query's own are visible"),
        Wrong(
            "begins at the first key",
            {"tl.maximum(0, pid_m * BLOCK_M - window + 1) // BLOCK_N * BLOCK_N": "0"},
            "Are there tiles before the window",
        ),
        Wrong(
            "the window overflows",
            {"(age < window)": "(offs_n[None, :] + window > offs_m[:, None])"},
            "compare offs_m - offs_n with window",
        ),
        Wrong(
            "v with k's strides",
            {"load_tile(v_head, stride_v": "load_tile(v_head, stride_k"},
            "v is read with the strides of k within a head",
        ),
        Wrong(
            "the mask the wrong way round",
            {"(age >= 0) & (age < window)": "(age <= 0) & (age > -window)"},
            "the wrong way round",
        ),
        Wrong("no mask", {" & (age >= 0) & (age < window)": ""}, "nothing is masked inside"),
        Wrong(
            "bottom right",
            {"= offs_m[:, None] - offs_n[None, :]": "= offs_m[:, None] + seq_k - seq_q - offs_n[None, :]"},
            "counted from the bottom right",
        ),
        Wrong("a key late", {"- window + 1)": "- window + 2)"}, "begins one key too late"),
        Wrong("rounded up", {"window + 1) // BLOCK_N": "window + BLOCK_N) // BLOCK_N"}, "begin is rounded up"),
        Wrong("the end in keys", {"(pid_m + 1) * BLOCK_M)": "(pid_m + 1) * BLOCK_N)"}, "pid_m counts tiles of queries"),
        Wrong("begins at BLOCK_M", {"// BLOCK_N * BLOCK_N": "// BLOCK_N * BLOCK_M"}, "here it is times BLOCK_M"),
        Wrong(
            "rounded to BLOCK_M", {"// BLOCK_N * BLOCK_N": "// BLOCK_M * BLOCK_M"}, "Are there tiles before the window"
        ),
        Wrong("a key early", {"pid_m * BLOCK_M - window + 1)": "pid_m * BLOCK_M - window)"}, "is i - window + 1"),
        Wrong(
            "an own load of v, without other",
            {
                "v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)": (
                    "at = offs_n[:, None] * stride_v[2] + offs_d[None, :] * stride_v[3]\n"
                    "        inside = (offs_n < seq_k)[:, None] & (offs_d < HEAD_DIM)[None, :]\n"
                    "        v = tl.load(v_head + at, mask=inside)"
                )
            },
            "Give it other=0.0",
        ),
        Wrong(
            "begins at a negative key",
            {"tl.maximum(0, pid_m * BLOCK_M - window + 1)": "(pid_m * BLOCK_M - window + 1)"},
            "the walk begins at a negative key",
        ),
        Wrong("keys that do not exist", {"(offs_n < seq_k)[None, :] & (age": "(age"}, "keys from seq_k on are visible"),
        Wrong(
            "keys that do not exist, and the walk goes there",
            {
                "(offs_n < seq_k)[None, :] & (age": "(age",
                "tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)": "(pid_m + 1) * BLOCK_M",
            },
            "keys from seq_k on are visible",
        ),
        Wrong(
            "ends before the own tile", {"(seq_k, (pid_m + 1) * BLOCK_M)": "(seq_k, pid_m * BLOCK_M)"}, "ends too early"
        ),
        Wrong(
            "ends with the first own key",
            {"(seq_k, (pid_m + 1) * BLOCK_M)": "(seq_k, pid_m * BLOCK_M + 1)"},
            "the walk ends with the tile's first query",
        ),
        Wrong("begins at a tile's number", {" // BLOCK_N * BLOCK_N": " // BLOCK_N"}, "begin is a key, a multiple of"),
        Wrong("ends at the last key", {"tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)": "seq_k"}, "after the diagonal"),
        Wrong("begins with the own tile", {"pid_m * BLOCK_M - window + 1)": "pid_m * BLOCK_M)"}, "earlier tiles are"),
        Wrong(
            "begins with the window of the last query",
            {"pid_m * BLOCK_M - window + 1)": "(pid_m + 1) * BLOCK_M - window)"},
            "reaches back furthest",
        ),
        Wrong(
            "an own step, without a guard",
            {
                "m_i, l_i, acc = attention_tile_step(m_i, l_i, acc, q, k, v, scale, visible)": (
                    's = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))\n'
                    "        m_new = tl.maximum(m_i, tl.max(s, axis=1))\n"
                    "        p, alpha = tl.exp(s - m_new[:, None]), tl.exp(m_i - m_new)\n"
                    "        l_i, m_i = alpha * l_i + tl.sum(p, axis=1), m_new\n"
                    '        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")'
                )
            },
            "exp(-inf - -inf)",
        ),
    ],
    "split_kv": [
        Wrong(
            "a key too few",
            {"tl.minimum(seq_k, begin_n + keys)": "tl.minimum(seq_k - 1, begin_n + keys)"},
            "it should take keys",
        ),
        Wrong(
            "a guard at -1e6",
            {'shift = tl.where(m_new == float("-inf"), 0.0, m_new)': "shift = tl.maximum(m_new, -1e6)"},
            "lse near -2000000",
        ),
        Wrong(
            "whole tiles only",
            {"tl.cdiv(tl.cdiv(seq_k, BLOCK_N), splits)": "seq_k // BLOCK_N // splits"},
            "part 0 of 3, 200 keys in tiles of 32: it took keys 0 ... 63; it should take keys 0 ... 95",
        ),
        Wrong("every part takes the first keys", {"begin_n = part * keys": "begin_n = 0"}, "it took keys 0 ... 95; it"),
        Wrong("the end is not bounded", {"tl.minimum(seq_k, begin_n + keys)": "seq_k"}, "it took keys 0 ... 199; it"),
        Wrong(
            "parts are not whole tiles",
            {"tl.cdiv(tl.cdiv(seq_k, BLOCK_N), splits) * BLOCK_N": "tl.cdiv(seq_k, splits)"},
            "it took keys",
        ),
        Wrong(
            "the keys are not shared out yet",
            {"    keys = tl.cdiv(tl": "    raise NotImplementedError\n    keys = tl.cdiv(tl"},
            "the merge is right; the sharing out of keys, begin_n and end_n, is still to be written (line",
        ),
        Wrong(
            "the end of the merge is not begun",
            {"    o = acc / l_safe[:, None]\n    lse =": "    raise NotImplementedError\n    o = 0\n    lse ="},
            "the sharing out of keys, begin_n and end_n, is right; the merge is still to be written (line",
        ),
        Wrong(
            "v with k's strides",
            {"load_tile(v_head, stride_v": "load_tile(v_head, stride_k"},
            "v is read with the strides of k within a head",
        ),
        Wrong("l_i is not rescaled", {"l_i = alpha * l_i + weight": "l_i = l_i + weight"}, "sum l_i is not rescaled"),
        Wrong(
            "nothing is rescaled",
            {"l_i = alpha * l_i + weight": "l_i = l_i + weight", "alpha[:, None] * acc + weight": "acc + weight"},
            "neither l_i nor acc is rescaled",
        ),
        Wrong("no part has a weight", {"tl.exp(lse_part - shift)": "tl.exp(0.0 * l_i)"}, "added with weight 1"),
        Wrong(
            "the values of a part have no weight",
            {"weight[:, None] * o_part": "o_part"},
            "o of a part is added to acc without its weight",
        ),
        Wrong(
            "equal weights for all parts",
            {"tl.exp(m_i - shift), tl.exp(lse_part - shift)": "tl.exp(0.0 * l_i), tl.exp(0.0 * l_i)"},
            "this is the mean of the parts",
        ),
        Wrong("every part counts once in l", {"alpha * l_i + weight": "alpha * l_i + 1.0"}, "every part adds 1 to l_i"),
        Wrong("no guard", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "exp(-inf - -inf)"),
        Wrong("no maximum", {"m_new = tl.maximum(m_i, lse_part)": "m_new = tl.zeros_like(m_i)"}, "exp(-inf - -inf)"),
        Wrong("acc is not rescaled", {"alpha[:, None] * acc + weight": "acc + weight"}, "accumulator is not rescaled"),
        Wrong(
            "weights without the maximum", {"tl.exp(lse_part - shift)": "tl.exp(lse_part)"}, "Is a maximum subtracted"
        ),
        Wrong(
            "empty rows divide 0 by 0",
            {"l_safe = tl.where(l_i == 0.0, 1.0, l_i)\n    o =": "l_safe = l_i\n    o ="},
            "0 / 0 at the end, l_i being 0?",
        ),
        Wrong(
            "the LSE lacks the maximum",
            {"    lse = m_i + tl.log(l_safe)\n": "    lse = tl.log(l_safe)\n"},
            "maximum is missing",
        ),
        Wrong(
            "a small number keeps empty rows from 0 / 0",
            {"l_safe = tl.where(l_i == 0.0, 1.0, l_i)\n    o =": "l_safe = l_i + 1e-6\n    o ="},
            "Is something added to l?",
        ),
    ],
}

RIGHT = {
    "classify_tiles": [
        Wrong(
            "integers of NumPy",
            {"    return full, end": "    import numpy\n    return numpy.int64(full), numpy.int64(end)"},
            "",
            kind="passed",
        )
    ]
}
