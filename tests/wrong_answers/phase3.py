"""What goes wrong in phase 3's exercises."""

from wrong_answers import Wrong

WRONG = {
    "ex1_classify_tiles": [
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
        Wrong("a full tile too few", {"if last_key <= first else": "if last_key < first else"}, "counting its pairs"),
        Wrong("the end is negative", {"(max(0, seen_by_last) +": "(seen_by_last +"}, "Can an end be negative?"),
        Wrong("the diagonal is not visited", {"- seq_q + 1": "- seq_q"}, "loop_bounds: the diagonal is hidden"),
        Wrong(
            "top-left bounds",
            {"seen_by_first = tile_m * block_m + seq_k - seq_q": "seen_by_first = tile_m * block_m"},
            "loop_bounds: this is right for top-left",
        ),
    ],
    "ex2_epilogue": [
        Wrong("an empty row divides 0 by 0", {"tl.where(l_i == 0.0, 1.0, l_i)": "l_i"}, "0 / 0"),
        Wrong("the LSE lacks the maximum", {"m_i + tl.log(l_safe)": "tl.log(l_safe)"}, "Is m_i part of it?"),
        Wrong("the LSE in base 2", {"m_i + tl.log(l_safe)": "m_i + tl.log2(l_safe)"}, "log2"),
        Wrong("o is not divided", {"acc / l_safe[:, None]": "acc"}, "not divided by the row sum"),
        Wrong("the store of o is not masked", {"element_ty), mask=rows": "element_ty)"}, "outside of the results"),
        Wrong("the store of lse is not masked", {"lse, mask=offs_m < seq_q": "lse"}, "outside of the results"),
        Wrong(
            "padding columns are stored",
            {"element_ty), mask=rows": "element_ty), mask=(offs_m < seq_q)[:, None]"},
            "outside of the results",
        ),
        Wrong("rows are contiguous", {"offs_d, stride_o[2],": "offs_d, BLOCK_D,"}, "outside of the results"),
    ],
    "ex3_grouped_heads": [
        Wrong("by modulo", {"h // group": "h % (heads_q // group)"}, "h // (heads_q / heads_kv)"),
        Wrong("the query head's keys", {"h_kv = h // group": "h_kv = h"}, "query head h reads key head h,"),
        Wrong(
            "offsets of 32 bits", {"(tl.program_id(0) // tiles_m).to(tl.int64)": "tl.program_id(0) // tiles_m"}, "64"
        ),
        Wrong("the batch stride of k is forgotten", {"k_ptr += b * stride_k[0] + ": "k_ptr += "}, "batch"),
        Wrong("v with the strides of k", {"h_kv * stride_v[1]": "h * stride_v[1]"}, "query heads on"),
        Wrong("every head writes the lse of the first", {"lse_ptr += pid_bh * seq_q": "lse_ptr += b"}, "lse"),
    ],
    "ex4_sliding_window": [
        Wrong("a key too many", {"(age < window)": "(age <= window)"}, "one key too many"),
        Wrong("no left edge", {" & (age < window)": ""}, "left edge of the band are not masked"),
        Wrong("no right edge", {" & (age >= 0)": ""}, "keys after the query's own are visible"),
        Wrong(
            "begins at the first key", {"tl.maximum(0, pid_m * BLOCK_M - window + 1) // BLOCK_N * BLOCK_N": "0"}, "load"
        ),
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
    "ex5_split_kv": [
        Wrong(
            "whole tiles only",
            {"tl.cdiv(tl.cdiv(seq_k, BLOCK_N), splits)": "seq_k // BLOCK_N // splits"},
            "lse of part 0",
        ),
        Wrong("every part takes the first keys", {"begin_n = part * keys": "begin_n = 0"}, "those of part 0"),
        Wrong("the end is not bounded", {"tl.minimum(seq_k, begin_n + keys)": "seq_k"}, "all keys"),
        Wrong("no guard", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "exp(-inf - -inf)"),
        Wrong("no maximum", {"m_new = tl.maximum(m_i, lse_part)": "m_new = tl.zeros_like(m_i)"}, "exp(-inf - -inf)"),
        Wrong("acc is not rescaled", {"alpha[:, None] * acc + weight": "acc + weight"}, "accumulator is not rescaled"),
        Wrong(
            "weights without the maximum", {"tl.exp(lse_part - shift)": "tl.exp(lse_part)"}, "Is a maximum subtracted"
        ),
        Wrong(
            "empty rows divide 0 by 0",
            {"l_safe = tl.where(l_i == 0.0, 1.0, l_i)\n    o =": "l_safe = l_i\n    o ="},
            "merge",
        ),
        Wrong(
            "the LSE lacks the maximum",
            {"    lse = m_i + tl.log(l_safe)\n": "    lse = tl.log(l_safe)\n"},
            "maximum is missing",
        ),
    ],
}
