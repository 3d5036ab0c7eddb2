"""What goes wrong in phase 2's exercises."""

from wrong_answers import Wrong

WRONG = {
    "ex1_ragged_grid": [
        Wrong("the grid is rounded down", {"(triton.cdiv(seq_q, BLOCK_M),)": "(seq_q // BLOCK_M,)"}, "rounded up?"),
        Wrong("one program more", {"(triton.cdiv(seq_q, BLOCK_M),)": "(seq_q // BLOCK_M + 1,)"}, "own a query?"),
        Wrong(
            "missing keys have the logit 0",
            {'        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))\n': ""},
            "what is its logit?",
        ),
        Wrong("k is not masked", {", mask=(offs_n < seq_k)[:, None], other=0.0": ""}, "does the load have a mask"),
        Wrong("q is not masked", {", mask=(offs_m < seq_q)[:, None], other=0.0": ""}, "is the load masked?"),
        Wrong("the store is not masked", {"m_i, mask=offs_m < seq_q": "m_i"}, "does the store have a mask?"),
    ],
    "ex2_inner_loop": [
        Wrong("acc is not rescaled", {"acc * alpha[:, None]": "acc"}, "the accumulator is not rescaled by alpha"),
        Wrong(
            "missing keys have the logit 0",
            {'        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))\n': ""},
            "keys past the end count as logit 0",
        ),
        Wrong("acc is overwritten", {", acc * alpha[:, None]": ""}, "added to what acc held before?"),
        Wrong("the scale is missing", {'"ieee") * scale': '"ieee")'}, "the scale is missing"),
        Wrong(
            "full tiles only",
            {"0, seq_k, BLOCK_N": "0, seq_k // BLOCK_N * BLOCK_N, BLOCK_N"},
            "tile of keys is dropped",
        ),
        Wrong(
            "v is not masked",
            {"stride_v, offs_n, offs_d, seq_k,": "stride_v, offs_n, offs_d, start_n + BLOCK_N,"},
            "0 * inf is NaN",
        ),
        Wrong(
            "k is not masked",
            {"stride_k, offs_n, offs_d, seq_k,": "stride_k, offs_n, offs_d, start_n + BLOCK_N,"},
            "does the load have a mask",
        ),
    ],
    "ex3_predict_traffic": [
        Wrong("keys are read once", {'"k": programs * k': '"k": k'}, "every program reads all keys"),
        Wrong(
            "the tile of fp16 for fp32",
            {'runtime.tile_sizes(head_dim, dtype)["BLOCK_M"])': "64)"},
            "depends on dtype: ask runtime.tile_sizes",
        ),
        Wrong("elements", {"k = seq_k * head_dim * dtype.itemsize": "k = seq_k * head_dim"}, "these are elements"),
        Wrong("whole tiles", {'"o": q': '"o": -(-seq_q // 64) * 64 * head_dim * dtype.itemsize'}, "a mask hides"),
        Wrong("rounded down", {"triton.cdiv(seq_q, ": "int.__floordiv__(seq_q, "}, "it reads every key too"),
    ],
    "ex4_loop_order": [
        Wrong("o is taken for acc", {"(alpha * l_i)[:, None]": "alpha[:, None]"}, "by alpha alone"),
        Wrong(
            "the new l is multiplied", {"(alpha * l_i)[:, None]": "(alpha * l_new)[:, None]"}, "multiplied by the new l"
        ),
        Wrong("alpha is forgotten", {"(alpha * l_i)[:, None]": "l_i[:, None]"}, "but not by alpha"),
        Wrong("o is left unnormalized", {" / tl.where(l_new == 0.0, 1.0, l_new)[:, None]": ""}, "not divided by l'"),
        Wrong(
            "acc is kept and divided at the end",
            {
                "(alpha * l_i)[:, None]": "alpha[:, None]",
                "tl.where(l_new == 0.0, 1.0, l_new)": "tl.where(start_n + BLOCK_N < seq_k, 1.0, l_new)",
            },
            "acc that waits in memory",
        ),
        Wrong(
            "l is not stored", {"            tl.store(l_ptr + offs_m, l_new, mask=rows)\n": ""}, "l: it is as it was"
        ),
        Wrong(
            "m is not loaded",
            {"tl.load(m_ptr + offs_m, mask=rows, other": "tl.full((BLOCK_M,), dtype=tl.float32, value"},
            "m: it is that of the last tile of keys alone",
        ),
        Wrong("a store is not masked", {"l_new, mask=rows": "l_new"}, "do the stores have a mask?"),
    ],
}
