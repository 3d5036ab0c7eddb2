"""What goes wrong in phase 4's exercises."""

from wrong_answers import Wrong

WRONG = {
    "ex1_delta": [
        Wrong("P forgotten", {"(p * (do @ v.mT)).sum": "(do @ v.mT).sum"}, "P is missing"),
        Wrong(
            "do has o's strides", {"stride_do[2], stride_do[3]), mask": "stride_o[2], stride_o[3]), mask"}, "its own"
        ),
        Wrong("16-bit products", {"o.to(tl.float32) * do.to(tl.float32)": "(o * do).to(tl.float32)"}, "to fp32 first"),
        Wrong("the store is not masked", {"delta, mask=offs_m < seq_q": "delta"}, "does the store have a mask?"),
    ],
    "ex2_dv": [
        Wrong("LSE forgotten", {"tl.exp(s - lse[:, None])": "tl.exp(s)"}, "subtract the LSE"),
        Wrong("scale forgotten", {'input_precision="ieee") * scale': 'input_precision="ieee")'}, "by the scale"),
        Wrong("the last tile of queries alone", {"do, dv, input": "do, input"}, "do not overwrite"),
        Wrong(
            "LSE of the first head",
            {"lse_ptr + offs_m": "lse_ptr - pid_bh * seq_q + offs_m"},
            "the first head is right",
        ),
    ],
    "ex3_dq_loop": [
        Wrong("walks to the end", {"tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)": "seq_k"}, "where does the walk end?"),
        Wrong("stops a tile early", {"(pid_m + 1) * BLOCK_M": "pid_m * BLOCK_M"}, "leaves out tiles on the diagonal"),
        Wrong("diagonal hidden", {">= offs_n": "> offs_n"}, "query i sees key i"),
        Wrong("no mask", {"visible = visible & (offs_m[:, None] >= offs_n[None, :])": "pass"}, "not masked inside"),
    ],
    "ex4_dkdv_loop": [
        Wrong("last head of the group", {"range(0, group)": "range(group - 1, group)"}, "only the last query head"),
        Wrong("heads by modulo", {"h_kv * group + g\n": "g * heads_kv + h_kv\n"}, "a group is made of neighbors"),
        Wrong(
            "start rounded up", {"pid_n * BLOCK_N // BLOCK_M": "tl.cdiv(pid_n * BLOCK_N, BLOCK_M)"}, "the start down"
        ),
        Wrong(
            "starts at 0", {"start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M": "start = 0"}, "where does the walk start?"
        ),
    ],
    "ex5_dropout": [
        Wrong("keeps what it should drop", {">= p_drop": "< p_drop"}, "this keeps what should be dropped"),
        Wrong("offsets overlap", {"row[:, None] * seq_k + offs": "row[:, None] + offs"}, "are always dropped together"),
        Wrong("32-bit offsets", {"row[:, None] * seq_k": "row[:, None].to(tl.int32) * seq_k"}, "the mask starts over"),
        Wrong(
            "the statistics see dropped weights",
            {
                "        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)\n": (
                    "        z = kept(seed, row, offs_n, seq_k, p_drop)\n"
                    '        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, tl.where(z, s, float("-inf")))\n'
                )
            },
            "the softmax comes before the dropping",
        ),
        Wrong("not divided by 1 - p", {"p / (1 - p_drop), 0.0": "p, 0.0"}, "are not divided by 1 - p"),
        Wrong("dv of all weights", {"(z * p).to(do.dtype)": "p.to(do.dtype)"}, "Z is missing: dV"),
        Wrong(
            "Z drops delta in dq",
            {
                "        ds = z * p_dp - p * delta[:, None]\n        dq": (
                    "        ds = z * (p_dp - p * delta[:, None])\n        dq"
                )
            },
            "Z drops delta too",
        ),
    ],
    "ex6_varlen": [
        Wrong("length is the end", {"b + 1) - first": "b + 1)"}, "how long is a sequence"),
        Wrong(
            "q of the first head",
            {
                "return\n    q_ptr += (first_q * heads + h) * HEAD_DIM\n    k_ptr": (
                    "return\n    q_ptr += first_q * heads * HEAD_DIM\n    k_ptr"
                )
            },
            "its head 0 is right",
        ),
        Wrong(
            "values begin where the queries do",
            {
                "v_ptr += (first_k * heads + h) * HEAD_DIM\n    o_ptr": (
                    "v_ptr += (first_q * heads + h) * HEAD_DIM\n    o_ptr"
                )
            },
            "those before it are right",
        ),
        Wrong(
            "delta of the first sequence",
            {
                "    delta_ptr += h.to(tl.int64) * total_q + first_q\n    # end of your code\n    offs_m": (
                    "    delta_ptr += h.to(tl.int64) * total_q\n    # end of your code\n    offs_m"
                )
            },
            "those before it are right",
        ),
    ],
}
