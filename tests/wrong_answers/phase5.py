"""What goes wrong in phase 5's exercises."""

from wrong_answers import Wrong

WRONG = {
    "ex1_count_flops": [
        Wrong("not halved", {" // (2 if is_causal else 1)": ""}, "under a causal mask the count is half"),
        Wrong("backward as executed", {'"bwd": 5, "both": 7': '"bwd": 7, "both": 9'}, "whatever kernels recompute"),
        Wrong("floats", {"// (2 if": "/ (2 if"}, "expected an int, got float"),
        Wrong("a product is one operation", {"product = 2 *": "product ="}, "are two operations"),
        Wrong("rounds down", {"(end_n + block_n - 1) // block_n": "end_n // block_n"}, "as a whole tile: round up"),
        Wrong("diagonal tiles left out", {"start_m + block_m) if": "start_m) if"}, "they are missing"),
        Wrong("existing queries only", {"min(seq_k, start_m": "min(seq_q, seq_k, start_m"}, "queries past the last"),
        Wrong("the true head_dim", {"max(16, 1 << (head_dim - 1).bit_length())": "head_dim"}, "head_dim is padded"),
        Wrong("S and dP once", {"((4, dkdv_tile), (3,": "((4, dkdv_tile), (1,"}, "for themselves"),
        Wrong("one head", {"batch * heads * count": "count"}, "batch * heads such heads"),
    ],
    "ex2_fold_log2e": [
        Wrong("the LSE in base 2", {" / LOG2E\n": "\n"}, "it is in base 2"),
        Wrong("the LSE multiplied", {" / LOG2E\n": " * LOG2E\n"}, "where it should be divided"),
        Wrong("m not scaled", {"tl.max(s, axis=1) * scale": "tl.max(s, axis=1)"}, "is not scaled"),
        Wrong(
            "folded twice, in the step",
            {"axis=1) * scale": "axis=1) * scale * LOG2E", "exp2(s * scale -": "exp2(s * scale * LOG2E -"},
            "the scale holds it already",
        ),
        Wrong("folded twice, in the launcher", {"scale *= LOG2E.value": "scale *= LOG2E.value**2"}, "scale twice"),
        Wrong("not folded", {"scale *= LOG2E.value": "pass"}, "does the scale that the kernel is given"),
        Wrong("exp", {"tl.exp2(s * scale": "tl.exp(s * scale"}, "uses exp"),
        Wrong("no row without a key", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "-inf minus -inf"),
        Wrong("l not rescaled", {"alpha * l_i + tl.sum": "l_i + tl.sum"}, "not rescaled by alpha"),
    ],
    "ex3_split_causal_loop": [
        Wrong(
            "only the diagonal counts", {"full_n, end_n = seq_k // BLOCK_N * BLOCK_N": "full_n, end_n = seq_k"}, "exist"
        ),
        Wrong(
            "from the tile's last query",
            {"(pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)": "(pid_m + 1) * BLOCK_M // BLOCK_N * BLOCK_N)"},
            "does not see them all",
        ),
        Wrong(
            "right if BLOCK_N divides BLOCK_M",
            {"(pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)": "pid_m * BLOCK_M)"},
            "does not see them all",
        ),
        Wrong(
            "a tile too early",
            {"(pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)": "tl.maximum(0, pid_m - 1) * BLOCK_M // BLOCK_N * BLOCK_N)"},
            "belongs to the part without one",
        ),
        Wrong("everything masked", {"full_n, end_n = seq_k // BLOCK_N * BLOCK_N": "full_n, end_n = 0"}, "without one"),
        Wrong("walks to the end", {"tl.minimum(end_n, (pid_m + 1) * BLOCK_M)": "seq_k"}, "where does the walk end?"),
        Wrong("past the keys", {"tl.minimum(end_n, (pid_m + 1) * BLOCK_M)": "(pid_m + 1) * BLOCK_M"}, "see none of"),
        Wrong("from 0 again", {"pid_m, full_n, end_n, seq_k": "pid_m, 0, end_n, seq_k"}, "belongs to the part without"),
    ],
    "ex4_pick_tiles": [
        Wrong("q forgotten", {"return q + (k if": "return (k if"}, "q stays for the whole walk"),
        Wrong("k or v", {"config.num_stages * 2 * k": "config.num_stages * k"}, "a tile of k and one of v"),
        Wrong(
            "one stage is two tiles",
            {"(k if config.num_stages == 1 else": "(0 if config.num_stages == 0 else"},
            "turns",
        ),
        Wrong("elements", {"block * padded * itemsize": "block * padded"}, "how many bytes has each?"),
        Wrong("S forgotten", {"(padded + config.BLOCK_N)": "padded"}, "S is missing"),
        Wrong("warps are threads", {"// (32 * config.num_warps)": "// config.num_warps"}, "a warp has 32 threads"),
        Wrong("strictly less", {"itemsize) <= shared": "itemsize) < shared"}, "all of a budget"),
        Wrong("registers ignored", {"registers(c, head_dim) <= register_budget": "True"}, "too much of registers"),
        Wrong(
            "keys before queries",
            {"c.BLOCK_M * c.BLOCK_N, c.BLOCK_M,": "c.BLOCK_M * c.BLOCK_N, c.BLOCK_N,"},
            "more queries",
        ),
        Wrong("nothing fits", {", default=None)": ", default=candidates[0])"}, "expected None"),
    ],
    "ex5_cross_head_store": [
        Wrong(
            "only the store",
            {
                "return desc.load([pid_bh, start, 0]).reshape(BLOCK, HEAD_DIM)": (
                    "return desc.load([pid_bh * seq + start, 0])"
                ),
                "describe(q, block_m), describe(k, block_n), describe(v, block_n),": (
                    "*(TensorDescriptor.from_tensor(t.view(-1, head_dim), [b, head_dim]) for t, b in ((q, block_m), "
                    "(k, block_n), (v, block_n))),"
                ),
            },
            "cross the border?",
        ),
        Wrong(
            "only the loads",
            {
                "desc.store([pid_bh, start, 0], tile.reshape(1, BLOCK, HEAD_DIM))": (
                    "desc.store([pid_bh * seq + start, 0], tile)"
                ),
                "describe(o, block_m),": "TensorDescriptor.from_tensor(o.view(-1, head_dim), [block_m, head_dim]),",
            },
            "hold what the last program of the head before it stored",
        ),
        Wrong(
            "another order of programs, the tail is overwritten in time",
            {
                "t = t.view(-1, *t.shape[2:])": "t = t.view(-1, head_dim)",
                "[1, block, head_dim]": "[block, head_dim]",
                "return desc.load([pid_bh, start, 0]).reshape(BLOCK, HEAD_DIM)": (
                    "return desc.load([pid_bh * seq + start, 0])"
                ),
                "desc.store([pid_bh, start, 0], tile.reshape(1, BLOCK, HEAD_DIM))": (
                    "desc.store([pid_bh * seq + start, 0], tile)"
                ),
                "pid_m = tl.program_id(0) // batch_heads": "pid_m = tl.program_id(0) % tl.cdiv(seq_q, BLOCK_M)",
                "pid_bh = tl.program_id(0) % batch_heads": "pid_bh = tl.program_id(0) // tl.cdiv(seq_q, BLOCK_M)",
            },
            "cross the border?",
        ),
    ],
    "ex6_fp8": [
        Wrong("a block of zeros", {"scales = torch.where(scales == 0, 1.0, scales)": "pass"}, "a block of zeros"),
        Wrong(
            "one scale",
            {"blocks.abs().amax(dim=(3, 4)) / LARGEST": "(t.abs().max() / LARGEST).expand(blocks.shape[:3]).float()"},
            "one scale for the whole tensor",
        ),
        Wrong("448 forgotten", {"amax(dim=(3, 4)) / LARGEST": "amax(dim=(3, 4))"}, "448 is missing"),
        Wrong("multiplied", {"(blocks / scales[": "(blocks * scales["}, "t is multiplied by the scale"),
        Wrong("the scale of k forgotten", {" * tl.load(k_scales_ptr + pid_n)": ""}, "the scale of k is missing"),
        Wrong("the scale of v forgotten", {"pv * tl.load(v_scales_ptr + pid_n)": "pv"}, "the scale of v is missing"),
        Wrong(
            "acc as a whole",
            {
                "pv * tl.load(v_scales_ptr + pid_n)\n        #": "pv\n        #",
                "    o = (acc": "    acc *= tl.load(v_scales_ptr + last - 1)\n    o = (acc",
            },
            "of the last block of v",
        ),
        Wrong("1 / sqrt(head_dim) forgotten", {"scale_s = scale * ": "scale_s = "}, "1 / sqrt(head_dim), is missing"),
        Wrong("the first scale of q", {"q_scales_ptr + pid_m)": "q_scales_ptr)"}, "every tile of q has the scale"),
    ],
}
