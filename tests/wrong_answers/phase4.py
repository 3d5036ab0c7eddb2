"""What goes wrong in phase 4's exercises."""

from wrong_answers import Wrong


def _recomputed(k="k", scale="scale", lse="lse", exp="tl.exp"):
    """recompute_tile written out in the loop of dQ, with one of its parts changed."""
    return {
        "_, ds = recompute_tile(q, k, v, do, lse, delta, scale, visible)": (
            f's = tl.dot(q, tl.trans({k}), input_precision="ieee") * ({scale})\n'
            f'        p = {exp}(tl.where(visible, s - ({lse})[:, None], float("-inf")))\n'
            '        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])'
        )
    }


WRONG = {
    "dv": [
        Wrong(
            "q scaled in 16 bits",
            {
                's = tl.dot(q, tl.trans(k), input_precision="ieee") * scale': (
                    's = tl.dot((q * scale).to(q.dtype), tl.trans(k), input_precision="ieee")'
                )
            },
            "was q * scale",
        ),
        Wrong("LSE forgotten", {"tl.exp(s - lse[:, None])": "tl.exp(s)"}, "subtract the LSE"),
        Wrong("scale forgotten", {'input_precision="ieee") * scale': 'input_precision="ieee")'}, "by the scale"),
        Wrong("the last tile of queries alone", {"do, dv, input": "do, input"}, "do not overwrite"),
        Wrong("LSE of the first head", {"lse_head + offs_m": "lse_ptr + offs_m"}, "head 0 is right"),
        Wrong("LSE moved twice", {"lse_head + offs_m": "lse_head + pid_bh * seq_q + offs_m"}, "is it moved again?"),
        Wrong("steps by BLOCK_N", {"seq_q, BLOCK_M)": "seq_q, BLOCK_N)"}, "the walk goes by BLOCK_M"),
        Wrong("loops over keys", {"range(0, seq_q,": "range(0, seq_k,"}, "the walk ends at seq_k"),
        Wrong(
            "softmax of a tile",
            {"tl.exp(s - lse[:, None])": "tl.exp(s) / tl.sum(tl.exp(s), axis=1)[:, None]"},
            "its own sum: use LSE",
        ),
        Wrong("exp2", {"tl.exp(": "tl.exp2("}, "LSE is a natural logarithm"),
        Wrong("do has q's strides", {"(do_head, stride_do,": "(do_head, stride_q,"}, "its own"),
        Wrong(
            "added up in the dtype of do",
            {'do, dv, input_precision="ieee")': 'do, dv, input_precision="ieee").to(do.dtype).to(tl.float32)'},
            "dv is to be added up in fp32",
        ),
        Wrong(
            "added up in fp16",
            {'do, dv, input_precision="ieee")': 'do, dv, input_precision="ieee").to(tl.float16).to(tl.float32)'},
            "dv is to be added up in fp32",
        ),
        Wrong("TF32", {'do, dv, input_precision="ieee")': "do, dv)"}, "tl.dot without input_precision"),
        Wrong("LSE added", {"s - lse[:": "s + lse[:"}, "P is exp(S + LSE) here"),
        Wrong(
            "the load of lse is not masked",
            {"(lse_head + offs_m, mask=offs_m < seq_q, other=0.0)": "(lse_head + offs_m)"},
            "the load needs the mask",
        ),
    ],
    "delta": [
        Wrong("do has o's strides", {"(do_head, stride_do,": "(do_head, stride_o,"}, "its own"),
        Wrong("16-bit products", {"o.to(tl.float32) * do.to(tl.float32)": "(o * do).to(tl.float32)"}, "to fp32 first"),
        Wrong("the store is not masked", {"delta, mask=offs_m < seq_q": "delta"}, "does the store have a mask?"),
        Wrong(
            "a 16-bit sum",
            {"o.to(tl.float32) * do.to(tl.float32)": "o * do"},
            "the sum is rounded to 16 bits: convert o and do to fp32 first",
            at_once=True,
        ),
        Wrong(
            "o of head 0",
            {"head_base(o_ptr, stride_o, pid_bh, heads)": "o_ptr"},
            "head 0 of batch 0 is right, other heads are not: `head_base(x_ptr,",
            at_once=True,
        ),
        Wrong(
            "the head by pid_m",
            {"head_base(o_ptr, stride_o, pid_bh, heads)": "head_base(o_ptr, stride_o, pid_m, heads)"},
            "is it found by pid_bh?",
            at_once=True,
        ),
        Wrong(
            "heads in contiguous memory",
            {
                "head_base(o_ptr, stride_o, pid_bh, heads)": "o_ptr + pid_bh * seq_q * HEAD_DIM",
                "head_base(do_ptr, stride_do, pid_bh, heads)": "do_ptr + pid_bh * seq_q * HEAD_DIM",
            },
            "head 0 of batch 0 is right, other heads are not",
            at_once=True,
        ),
        Wrong(
            "do's heads by o's strides",
            {"head_base(do_ptr, stride_do,": "head_base(do_ptr, stride_o,"},
            "other heads are not: `head_base(x_ptr, stride_x",
        ),
        Wrong(
            "dlse where there is none",
            {"    if dlse_ptr is not None:\n        delta": "    if True:\n        delta"},
            "dlse_ptr is None here: load from it under `if dlse_ptr is not None:` alone",
            at_once=True,
        ),
        Wrong(
            "head_dim not masked",
            {
                "(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM)": (
                    "(o_head, stride_o, offs_m, offs_d, seq_q, BLOCK_D)"
                ),
                "(do_head, stride_do, offs_m, offs_d, seq_q, HEAD_DIM)": (
                    "(do_head, stride_do, offs_m, offs_d, seq_q, BLOCK_D)"
                ),
            },
            "mask offs_d",
        ),
        Wrong("delta_ptr moved twice", {"delta_ptr + offs_m": "delta_ptr + pid_bh * seq_q + offs_m"}, "already"),
        Wrong(
            "no batch stride",
            {"head_base(do_ptr, stride_do, pid_bh, heads)": "do_ptr + pid_bh % heads * stride_do[1]"},
            "batch 0 is right, batch 1 is not",
        ),
        Wrong(
            "no head stride",
            {"head_base(do_ptr, stride_do, pid_bh, heads)": "do_ptr + pid_bh // heads * stride_do[0]"},
            "head 0 is right, the others are not",
        ),
        Wrong("dlse added", {"delta -= ": "delta += "}, "dlse is added"),
        Wrong("dlse forgotten", {"delta -= tl.load": "tl.load"}, "dlse is not subtracted"),
        Wrong("dlse of head 0", {"dlse_ptr + pid_bh * seq_q": "dlse_ptr"}, "the dlse of head 0"),
    ],
    "capped": [
        Wrong("a finite mask", {'< keys, float("-inf"))': "< keys, -1e4)"}, "does a finite number such as -1e4"),
        Wrong(
            "a finite m", {'q.shape[:-1], float("-inf"))': "q.shape[:-1], -1e4)"}, "does a finite number such as -1e4"
        ),
        Wrong("the cap's slope forgotten", {"ds = slope * p": "ds = p"}, "lacks the cap's slope"),
        Wrong(
            "slope after hiding",
            {"    return c, slope": "    return c, slope if cap is None else 1 - (c / cap) ** 2"},
            "Take the cap's slope before hiding",
            at_once=True,
        ),
        Wrong("the slope is not squared", {"1 - t * t": "1 - t"}, "the slope of tanh(x) is 1 - tanh(x)^2"),
        Wrong("the slope of C", {"cap * t, 1 - t * t": "cap * t, 1 - (cap * t) ** 2"}, "here it takes C"),
        Wrong("the slope of S / cap", {"cap * t, 1 - t * t": "cap * t, 1 - (c / cap) ** 2"}, "here it takes S / cap"),
        Wrong(
            "the slope of tanh(C)",
            {"cap * t, 1 - t * t": "cap * t, 1 - torch.tanh(cap * t) ** 2"},
            "here it takes tanh(C)",
        ),
        Wrong(
            "the slope of tanh(C / cap)",
            {"cap * t, 1 - t * t": "cap * t, 1 - torch.tanh(t) ** 2"},
            "here it takes tanh(C / cap)",
        ),
        Wrong("no cap", {"if cap is not None": "if False"}, "the logits are not capped"),
        Wrong("no scale", {" * q.shape[-1] ** -0.5\n    slope": "\n    slope"}, "not multiplied by the scale"),
        Wrong("no delta", {".mT - delta)": ".mT)"}, "delta is not subtracted"),
        Wrong(
            "delta of one tile",
            {".mT - delta)": ".mT - (p * (do @ v[..., tile, :].mT)).sum(dim=-1, keepdim=True))"},
            "delta is the sum over one tile of keys",
        ),
        Wrong("dq without the scale", {"dq += scale *": "dq +="}, "the scale is missing in the gradient"),
        Wrong("no mask", {"    if is_causal:\n": "    if False:\n"}, "there is no causal mask"),
        Wrong(
            "the mask without the tile's start",
            {"torch.arange(start, start + c.shape[-1]": "torch.arange(c.shape[-1]"},
            "add the tile's start",
            at_once=True,
        ),
        Wrong("hidden logits are 0", {'keys, float("-inf"))': "keys, 0.0)"}, "they are -inf"),
        Wrong("acc not rescaled", {"alpha[..., None] * acc": "acc"}, "the accumulator is not rescaled"),
        Wrong(
            "no mask in the backward pass",
            {"start, ctx.cap, ctx.is_causal)": "start, ctx.cap, False)"},
            "P is made again without the causal mask",
            at_once=True,
        ),
        Wrong("LSE without log", {"m + torch.log(l))": "m + l)"}, "the LSE lacks its logarithm", at_once=True),
        Wrong(
            "no cap in the backward pass",
            {"start, ctx.cap, ctx.is_causal)": "start, None, ctx.is_causal)"},
            "P is made again without the cap",
            at_once=True,
        ),
        Wrong("dq overwritten", {"dq += scale *": "dq = scale *"}, "only the last tile of keys is in it", at_once=True),
        Wrong(
            "tiles of S on ctx",
            {
                "        o = acc / l[..., None]\n": (
                    "        o = acc / l[..., None]\n"
                    "        ctx.s = [tile_of(q, k, n, cap, is_causal)[0] for n in range(0, k.shape[-2], BLOCK)]\n"
                )
            },
            "ctx.s holds 13 tensors",
            at_once=True,
        ),
        Wrong("l not rescaled", {"l = alpha * l": "l = l"}, "l is not rescaled"),
        Wrong(
            "P is kept",
            {
                "o, m + torch.log(l))": "o, m + torch.log(l), q.new_zeros(q.shape[-2], k.shape[-2]))",
                "q, k, v, o, lse = ctx": "q, k, v, o, lse, _ = ctx",
            },
            "between the passes 6 tensors are kept, of shapes (300, 400)",
            at_once=True,
        ),
        Wrong(
            "LSE on ctx",
            {
                "ctx.save_for_backward(q, k, v, o, m + torch.log(l))": (
                    "ctx.lse = m + torch.log(l)\n        ctx.save_for_backward(q, k, v, o)"
                ),
                "q, k, v, o, lse = ctx.saved_tensors": "(q, k, v, o), lse = ctx.saved_tensors, ctx.lse",
            },
            "ctx.lse holds a tensor",
        ),
        Wrong(
            "no backward yet",
            {"        q, k, v, o, lse = ctx": "        raise NotImplementedError\n        q, k, v, o, lse = ctx"},
            "right so far: o. Next: line",
            kind="unfinished",
        ),
        Wrong(
            "a whole mask",
            {
                "torch.arange(q.shape[-2], device=q.device)[:, None] < keys": (
                    "torch.ones(q.shape[-2], k.shape[-2]).triu(1)[:, start : start + BLOCK] > 0"
                )
            },
            "makes a tensor of shape (300, 400) for 300 queries and 400 keys",
        ),
        Wrong(
            "an item",
            {"            c, _ = tile": "            assert m.max().item() < 1e30\n            c, _ = tile"},
            "cannot record it",
        ),
    ],
    "one_tile": [
        Wrong("delta forgotten", {"p * (dp - delta[:, None])": "p * dp"}, "delta is not subtracted"),
        Wrong("delta outside", {"p * (dp - delta[:, None])": "p * dp - delta[:, None]"}, "outside of the bracket"),
        Wrong("delta added", {"(dp - delta[": "(dp + delta["}, "delta is added"),
        Wrong(
            "the other axis", {"delta[:, None]": "delta[None, :]"}, "A number for each row is a column", kind="error"
        ),
        Wrong("ds first", {"return p, p * (dp - delta[:, None])": "return p * (dp - delta[:, None]), p"}, "exchanged"),
        Wrong("no guard", {'tl.where(lse == float("-inf"), 0.0, lse)': "lse"}, "-inf - (-inf) is NaN", at_once=True),
        Wrong("no mask", {'    s = tl.where(visible, s, float("-inf"))\n': ""}, "not 0 where `visible` is false"),
        Wrong("a finite mask", {'s, float("-inf"))\n': "s, -1e4)\n"}, "does a finite number such as -1e4"),
        Wrong(
            "masked by a factor",
            {
                '    s = tl.where(visible, s, float("-inf"))\n': "",
                'tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None])': "tl.exp(s - lse[:, None]) * visible",
            },
            "inf * 0 is NaN",
        ),
        Wrong(
            "p is masked after ds is made",
            {
                '    s = tl.where(visible, s, float("-inf"))\n': "",
                'tl.where(lse == float("-inf"), 0.0, lse)[:, None]': "lse[:, None]",
                "return p, p *": "return tl.where(visible, p, 0.0), p *",
            },
            "was it made before p was set to 0",
        ),
        Wrong("no scale", {'input_precision="ieee") * scale': 'input_precision="ieee")'}, "by the scale"),
        Wrong(
            "scale in ds", {"return p, p *": "return p, scale * p *"}, "the kernels multiply by it after their loops"
        ),
        Wrong("exp2", {"tl.exp(": "tl.exp2("}, "LSE is a natural logarithm"),
        Wrong("LSE forgotten", {' - tl.where(lse == float("-inf"), 0.0, lse)[:, None]': ""}, "subtract the LSE"),
        Wrong(
            "LSE and delta exchanged",
            {'- tl.where(lse == float("-inf"), 0.0, lse)[:, None]': "- delta[:, None]", "dp - delta": "dp - lse"},
            "LSE and delta are exchanged",
            at_once=True,
        ),
        Wrong("LSE for delta", {"dp - delta[:, None]": "dp - lse[:, None]"}, "is it delta that is subtracted from dP?"),
        Wrong("S for P in ds", {"return p, p * (": "return p, s * ("}, "dS takes P", at_once=True),
        Wrong("dO K^T", {"do, tl.trans(v)": "do, tl.trans(k)"}, "dP takes V"),
        Wrong("TF32", {'tl.trans(v), input_precision="ieee")': "tl.trans(v))"}, "tl.dot without input_precision"),
        Wrong(
            "tiles are converted up", {"(do, tl.trans(v),": "(do.to(tl.float32), tl.trans(v.to(tl.float32)),"}, "two"
        ),
        Wrong("p is rounded", {"    dp = tl": "    p = p.to(q.dtype).to(tl.float32)\n    dp = tl"}, "p is rounded"),
        Wrong("the LSE is rounded", {"0.0, lse)[:": "0.0, lse.to(q.dtype).to(tl.float32))[:"}, "the LSE is rounded"),
        Wrong(
            "q * scale is rounded",
            {"tl.dot(q, tl.trans(k)": "tl.dot((q * scale).to(q.dtype), tl.trans(k)", '"ieee") * scale': '"ieee")'},
            "q * scale is rounded",
        ),
    ],
    "dq_loop": [
        Wrong("k * scale is rounded", _recomputed(k="(k * scale).to(k.dtype)", scale="1.0"), "k * scale", at_once=True),
        Wrong(
            "the LSE is rounded",
            _recomputed(lse="lse.to(q.dtype).to(tl.float32)"),
            "the LSE rounded to float16",
            at_once=True,
        ),
        Wrong(
            "exp2 with the natural LSE", _recomputed(exp="tl.exp2", scale="scale * 1.44269504"), "less the natural LSE"
        ),
        Wrong(
            "start_n twice",
            {f"({x}_head, stride_{x}, offs_n": f"({x}_head, stride_{x}, start_n + offs_n" for x in "kv"},
            "read at twice their tile's start",
        ),
        Wrong(
            "dq is stored in part",
            {"offs_m, offs_d, seq_q, HEAD_DIM, dq": "offs_m, offs_d, seq_q - 1, HEAD_DIM, dq"},
            "32 of 1600 elements were never stored, dq[0, 0, 49, 0] first",
        ),
        Wrong("a product in TF32", {'k, dq, input_precision="ieee"': "k, dq"}, "the 10 bits of TF32"),
        Wrong(
            "k is converted up",
            {"tl.dot(ds.to(k.dtype), k, dq": "tl.dot(ds, k.to(tl.float32), dq"},
            "this product takes two tiles in fp32",
        ),
        Wrong(
            "no tl.dot",
            {
                'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")': (
                    "dq += tl.sum(ds.to(k.dtype).to(tl.float32)[:, :, None] * k.to(tl.float32)[None, :, :], axis=1)"
                )
            },
            "a product by tl.sum",
        ),
        Wrong(
            "v with k's strides",
            {
                "load_tile(v_head, stride_v": "load_tile(v_head, stride_k",
                "head_base(v_ptr, stride_v": "head_base(v_ptr, stride_k",
            },
            "v is read with the strides of k",
        ),
        Wrong("walks to the end", {"tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)": "seq_k"}, "where does the walk end?"),
        Wrong("stops a tile early", {"(pid_m + 1) * BLOCK_M": "pid_m * BLOCK_M"}, "leaves out tiles on the diagonal"),
        Wrong(
            "ends at the diagonal, full",
            {"    if IS_CAUSAL:\n        end_n": "    if True:\n        end_n"},
            "ends at seq_k",
        ),
        Wrong(
            "masked, full",
            {"        if IS_CAUSAL:\n            vis": "        if True:\n            vis"},
            "mask is applied",
        ),
        Wrong("dq is replaced", {'k, dq, input_precision="ieee"': 'k, input_precision="ieee"'}, "only the last tile"),
        Wrong("diagonal hidden", {">= offs_n": "> offs_n"}, "query i sees key i"),
        Wrong("no mask", {"visible = visible & (offs_m[:, None] >= offs_n[None, :])": "pass"}, "not masked inside"),
        Wrong(
            "keys past the end not masked",
            {"visible = (offs_n < seq_k)[None, :]": "visible = (offs_n >= 0)[None, :]"},
            "keys past the end are not masked",
        ),
        Wrong("end in keys", {"(pid_m + 1) * BLOCK_M": "(pid_m + 1) * BLOCK_N"}, "pid_m counts tiles of queries"),
        Wrong("bottom right", {"(offs_m[:, None] >=": "(offs_m[:, None] + seq_k - seq_q >="}, "from the bottom right"),
        Wrong("twice dq", {"HEAD_DIM, dq * scale)": "HEAD_DIM, 2 * dq * scale)"}, "every element is 2 times"),
        Wrong("P K", {"_, ds = ": "ds, _ = "}, "this is P K"),
        Wrong("dS V", {"ds.to(k.dtype), k, dq": "ds.to(v.dtype), v, dq"}, "this is dS V"),
        Wrong("scale twice", {"dq = tl.dot(ds.to": "dq = tl.dot((ds * scale).to"}, "the scale is in it twice"),
        Wrong(
            "LSE and delta exchanged",
            {"do, lse, delta, scale": "do, delta, lse, scale"},
            "lse and delta are exchanged",
            at_once=True,
        ),
        Wrong("delta twice", {"dq = tl.dot(ds.to": "dq = tl.dot((ds - _ * delta[:, None]).to"}, "subtracted twice"),
    ],
    "dkdv_loop": [
        Wrong("last head of the group", {"range(0, group)": "range(group - 1, group)"}, "only the last query head"),
        Wrong("heads by modulo", {"h_kv * group + g\n": "g * heads_kv + h_kv\n"}, "a group is made of neighbors"),
        Wrong(
            "start rounded up", {"pid_n * BLOCK_N // BLOCK_M": "tl.cdiv(pid_n * BLOCK_N, BLOCK_M)"}, "starts too late"
        ),
        Wrong(
            "starts at 0", {"start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M": "start = 0"}, "where does the walk start?"
        ),
        Wrong(
            "starts at the diagonal, full",
            {"    if IS_CAUSAL:\n        start": "    if True:\n        start"},
            "it starts at query 0",
        ),
        Wrong(
            "masked, full",
            {"            if IS_CAUSAL:\n                vis": "            if True:\n                vis"},
            "mask is applied",
        ),
        Wrong("dv is replaced", {'do, dv, input_precision="ieee"': 'do, input_precision="ieee"'}, "only the last tile"),
        Wrong(
            "start in queries",
            {"pid_n * BLOCK_N // BLOCK_M * BLOCK_M": "pid_n * BLOCK_M"},
            "the first query is pid_n * BLOCK_N",
        ),
        Wrong(
            "start in tiles",
            {"pid_n * BLOCK_N // BLOCK_M * BLOCK_M": "pid_n * BLOCK_N // BLOCK_M"},
            "start is a number of queries, not of tiles",
        ),
        Wrong(
            "the group's first head in every step",
            {"h = h_kv * group + g": "h = h_kv * group"},
            "every step visits the group's first head",
            at_once=True,
        ),
        Wrong(
            "LSE and delta exchanged",
            {"do, lse, delta, scale": "do, delta, lse, scale"},
            "lse and delta are exchanged",
            at_once=True,
        ),
        Wrong("head of the group alone", {"h = h_kv * group + g": "h = g"}, "begin at h_kv * group"),
        Wrong("groups overlap", {"h = h_kv * group + g": "h = h_kv + g"}, "the groups overlap"),
        Wrong(
            "do with q's strides",
            {"load_tile(do_head, stride_do": "load_tile(do_head, stride_q"},
            "do is read with the",
        ),
        Wrong("LSE of head 0", {"lse_ptr + row": "lse_ptr"}, "the lse of head 0"),
        Wrong("delta of head 0", {"delta_ptr + row": "delta_ptr"}, "the delta of head 0"),
        Wrong(
            "pointer moved in the loop",
            {"q_head = head_base(q_ptr,": "q_ptr = head_base(q_ptr,", "(q_head, ": "(q_ptr, "},
            "stays moved",
        ),
        Wrong("bottom right", {"(offs_m[:, None] >=": "(offs_m[:, None] + seq_k - seq_q >="}, "from the bottom right"),
        Wrong("not transposed", {"tl.trans(p.to(do.dtype))": "p.to(do.dtype)"}, "tl.trans", kind="error"),
        Wrong("P and dS exchanged", {"p, ds = ": "ds, p = "}, "returns p, ds in this order"),
        Wrong("dK with dO", {"tl.trans(ds.to(q.dtype)), q, dk": "tl.trans(ds.to(do.dtype)), do, dk"}, "dK takes Q"),
        Wrong("dK scaled twice", {"tl.trans(ds.to": "tl.trans((ds * scale).to"}, "the scale is in it twice"),
    ],
    "dropout": [
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
        Wrong("not divided by 1 - p", {"p / (1 - p_drop), 0.0": "p, 0.0"}, "are not divided by 1 - p_drop"),
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
        Wrong(
            "Z drops an undivided delta in dq",
            {
                "        ds = z * p_dp - p * delta[:, None]\n        dq": (
                    "        ds = z * (p_dp - (1 - p_drop) * p * delta[:, None])\n        dq"
                )
            },
            "Z drops delta too, and only",
        ),
        Wrong("divided by p", {"p / (1 - p_drop), 0.0": "p / p_drop, 0.0"}, "divided by p_drop: divide by 1 - p_drop"),
        Wrong("acc not rescaled", {"acc * alpha[:, None]": "acc"}, "acc is not rescaled"),
        Wrong(
            "another offset",
            {"row[:, None] * seq_k + offs_n[None, :]": "offs_n[None, :] * 100000 + row[:, None]"},
            "not that of the offset row * seq_k + j",
        ),
        Wrong(
            "rows of 64",
            {"row[:, None] * seq_k": "row[:, None] * 64"},
            "not that of the offset row * seq_k + j",
            at_once=True,
        ),
        Wrong("more than p", {">= p_drop": "> p_drop"}, ">=, not >"),
        Wrong(
            "rows of a head",
            {"kept(seed, row, offs_n, seq_k, p_drop), p /": "kept(seed, offs_m, offs_n, seq_k, p_drop), p /"},
            "head 0 is right",
        ),
        Wrong(
            "delta twice in dq",
            {
                "p * delta[:, None]\n        dq": (
                    "p * delta[:, None]\n        ds -= z * p * delta[:, None]\n        dq"
                )
            },
            "delta is subtracted twice",
        ),
        Wrong(
            "two kernels to go",
            {'dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")': "raise NotImplementedError"},
            "right so far: kept, _forward_kernel. Next: _dkdv_kernel",
        ),
        Wrong(
            "one kernel to go",
            {'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")': "raise NotImplementedError"},
            "right so far: kept, _forward_kernel, _dkdv_kernel. Next: _dq_kernel",
        ),
        Wrong(
            "one kernel to go, another one wrong",
            {
                'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")': "raise NotImplementedError",
                "(z * p).to(do.dtype)": "p.to(do.dtype)",
            },
            "Z is missing: dV",
        ),
    ],
    "varlen": [
        Wrong("length is the end", {"b + 1) - first": "b + 1)"}, "how long is a sequence"),
        Wrong(
            "keys and dk begin where the queries do",
            {
                "return\n    q_ptr += (first_q * heads + h) * HEAD_DIM\n    k_ptr += (first_k": (
                    "return\n    q_ptr += (first_q * heads + h) * HEAD_DIM\n    k_ptr += (first_q"
                ),
                "dk_ptr += (first_k": "dk_ptr += (first_q",
            },
            "o is wrong: k_ptr is moved by first_q, where first_k is right",
            at_once=True,
        ),
        Wrong(
            "as many keys as queries",
            {
                "all five pointers moved to this sequence and head\n    first_q, seq_q = sequence(cu_q_ptr, b)\n": (
                    "all five\n    first_q, seq_q = sequence(cu_q_ptr, b)\n    cu_k_ptr = cu_q_ptr\n"
                )
            },
            "seq_k by cu_k_ptr",
        ),
        Wrong(
            "q of the first head",
            {
                "return\n    q_ptr += (first_q * heads + h) * HEAD_DIM\n    k_ptr": (
                    "return\n    q_ptr += first_q * heads * HEAD_DIM\n    k_ptr"
                )
            },
            "q_ptr lacks its head, h, in the kernel that makes o",
        ),
        Wrong(
            "values begin where the queries do",
            {
                "v_ptr += (first_k * heads + h) * HEAD_DIM\n    o_ptr": (
                    "v_ptr += (first_q * heads + h) * HEAD_DIM\n    o_ptr"
                )
            },
            "v_ptr is moved by first_q, where first_k is right",
        ),
        Wrong(
            "delta of the first sequence",
            {
                "    delta_ptr += h.to(tl.int64) * total_q + first_q\n    # end of your code\n    offs_m": (
                    "    delta_ptr += h.to(tl.int64) * total_q\n    # end of your code\n    offs_m"
                )
            },
            "delta_ptr is moved by nothing, where first_q is right",
        ),
        Wrong(
            "keys begin where the queries do",
            {
                "do_ptr += (first_q * heads + h) * HEAD_DIM\n    k_ptr += (first_k": (
                    "do_ptr += (first_q * heads + h) * HEAD_DIM\n    k_ptr += (first_q"
                )
            },
            "k_ptr is moved by first_q, where first_k is right",
        ),
        Wrong(
            "delta begins where the keys do",
            {
                "    delta_ptr += h.to(tl.int64) * total_q + first_q\n    # end of your code\n    offs_n": (
                    "    delta_ptr += h.to(tl.int64) * total_q + first_k\n    # end of your code\n    offs_n"
                )
            },
            "delta_ptr is moved by first_k, where first_q is right",
        ),
        Wrong(
            "lse of the first sequence",
            {
                "    dv_ptr += (first_k * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * total_q + first_q": (
                    "    dv_ptr += (first_k * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * total_q"
                )
            },
            "lse_ptr is moved by nothing, where first_q is right",
        ),
        Wrong(
            "lse moved by h * seq_q",
            {
                "    dv_ptr += (first_k * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * total_q + first_q": (
                    "    dv_ptr += (first_k * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * seq_q + first_q"
                )
            },
            "lse_ptr takes heads for seq_q apart: they lie total_q apart, in the kernel that makes dk",
            at_once=True,
        ),
        Wrong(
            "delta of head 0",
            {
                "    delta_ptr += h.to(tl.int64) * total_q + first_q\n    # end of your code\n    offs_m": (
                    "    delta_ptr += first_q\n    # end of your code\n    offs_m"
                )
            },
            "delta_ptr lacks its head, h * total_q, in the kernel that makes dq",
        ),
        Wrong(
            "do begins where the keys do",
            {
                "do_ptr += (first_q * heads + h) * HEAD_DIM\n    dq_ptr": (
                    "do_ptr += (first_k * heads + h) * HEAD_DIM\n    dq_ptr"
                )
            },
            "do_ptr is moved by first_k, where first_q is right",
        ),
        Wrong(
            "tokens of one head",
            {
                "k_ptr += (first_k * heads + h) * HEAD_DIM\n    v_ptr += (first_k * heads + h) * HEAD_DIM\n    o_ptr": (
                    "k_ptr += (first_k + h) * HEAD_DIM\n    v_ptr += (first_k * heads + h) * HEAD_DIM\n    o_ptr"
                )
            },
            "k_ptr passes first_k rows, where a token has `heads` of them",
        ),
        Wrong(
            "dk of head 0",
            {"dk_ptr += (first_k * heads + h) * HEAD_DIM": "dk_ptr += first_k * heads * HEAD_DIM"},
            "only head 0 of its dk is written: dk_ptr lacks its head, h",
        ),
        Wrong(
            "lse stored for the first sequence",
            {
                "o_ptr += (first_q * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * total_q + first_q": (
                    "o_ptr += (first_q * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * total_q"
                )
            },
            "o is right, and lse is not: lse_ptr of _forward_kernel",
            at_once=True,
        ),
        Wrong(
            "lse stored with heads side by side",
            {
                "o_ptr += (first_q * heads + h) * HEAD_DIM\n    lse_ptr += h.to(tl.int64) * total_q + first_q": (
                    "o_ptr += (first_q * heads + h) * HEAD_DIM\n    lse_ptr += first_q * heads + h"
                )
            },
            "o is right, and lse is not: lse_ptr of _forward_kernel",
        ),
        Wrong("first token in 32 bits", {"first.to(tl.int64)": "first"}, "convert it to int64"),
        Wrong(
            "no queries, no dk",
            {"if pid_n * BLOCK_N >= seq_k:": "if pid_n * BLOCK_N >= seq_k or seq_q == 0:"},
            "sequence 1 of lengths_q = (20, 0, 40, 1, 17), lengths_k = (33, 9, 20, 0, 17): it has keys but no queries",
        ),
        Wrong(
            "no keys, no o",
            {
                "    o_ptr += (first_q * heads + h) * HEAD_DIM\n": (
                    "    o_ptr += (first_q * heads + h) * HEAD_DIM\n    if seq_k == 0:\n        return\n"
                )
            },
            "it has queries but no keys: its o is 0",
        ),
        Wrong(
            "return at the other length",
            {"if pid_n * BLOCK_N >= seq_k:": "if pid_n * BLOCK_N >= seq_q:"},
            "are never written",
        ),
        Wrong(
            "LSE of head 0 in dq",
            {
                "    lse = tl.load(lse_ptr + offs_m, mask=offs_m < seq_q, other=0.0)\n    delta": (
                    "    lse = tl.load(lse_ptr - h * total_q + offs_m, mask=offs_m < seq_q, other=0.0)\n    delta"
                )
            },
            "lse_ptr lacks its head, h * total_q, in the kernel that makes dq",
        ),
        Wrong(
            "two kernels to go",
            {'dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")': "raise NotImplementedError"},
            "right so far: sequence, _forward_kernel. Next: _dkdv_kernel",
        ),
        Wrong(
            "one kernel to go",
            {'dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")': "raise NotImplementedError"},
            "right so far: sequence, _forward_kernel, _dkdv_kernel. Next: _dq_kernel",
        ),
    ],
    "broken_gradient": [
        Wrong(
            "the patient's numbers",
            {"scale**2 * ds.T @ q": "torch.tensor([[0.428, 0.265], [0.002, -0.151], [0.187, -0.12], [-0.617, 0.006]])"},
            "not the numbers that came out",
        ),
        Wrong("dk unscaled for scaled twice", {"scale**2 * ds.T @ q": "ds.T @ q"}, "but not in this way: dk[0, 0]"),
        Wrong("not named", {'"B": {"delta": "0 * lse"},': '"B": {},'}, "B: no line is named yet"),
        Wrong(
            "too early",
            {'"A": {"dk": "scale**2 * ds.T @ q"}': '"A": {"ds": "scale * p * (dp - delta[:, None])"}'},
            "A: wrong here: dk. A wrong line 'ds' cannot do that: dq would be wrong too",
        ),
        Wrong(
            "too late",
            {'"C": {"p": "torch.exp(s - lse.flip(0)[:, None])"}': '"C": {"dv": "p.T @ o"}'},
            "dk and dq would be right",
        ),
        Wrong("two lines", {'{"dv": "ds.T @ do"}': '{"dv": "ds.T @ do", "dq": "ds @ k"}'}, "D: name one line"),
        Wrong("not Python", {'"ds.T @ do"': '"dS^T dO"'}, "raises SyntaxError"),
        Wrong("wrong shape", {'"ds.T @ do"': '"ds.T @ v.T"'}, "of shape (4, 4)"),
        Wrong(
            "delta for dS",
            {'"E": {"ds": "p * dp - delta[:, None]"}': '"E": {"delta": "-(do * o).sum(dim=1)"}'},
            "E: 'delta' may be the line, but not in this way",
        ),
    ],
    "atomic_dq": [
        Wrong(
            "load, add and store",
            {
                'tl.atomic_add(there, part, mask=inside, sem="relaxed")': (
                    "tl.store(there, part + tl.load(there, mask=inside), mask=inside)"
                )
            },
            "Reading, adding and writing must be one step",
        ),
        Wrong(
            "the first program stores",
            {
                'tl.atomic_add(there, part, mask=inside, sem="relaxed")\n': (
                    "if pid_n == 0:\n            tl.store(there, part, mask=inside)\n        else:\n"
                    '            tl.atomic_add(there, part, mask=inside, sem="relaxed")\n'
                )
            },
            "its part is overwritten",
        ),
        Wrong(
            "the last program rounds",
            {
                'mask=inside, sem="relaxed")\n': (
                    'mask=inside, sem="relaxed")\n        if pid_n == tl.num_programs(0) - 1:\n'
                    "            whole = tl.load(there, mask=inside) * scale\n"
                    "            store_tile(dq_ptr + at_q, rows, offs_m, offs_d, seq_q, HEAD_DIM, whole)\n"
                ),
                "    dq_out = dq_sum * scale\n": "",
            },
            "the loaded sum lacks its part",
        ),
        Wrong(
            "the sum so far",
            {
                "tl.atomic_add(there": "before = tl.atomic_add(there",
                'mask=inside, sem="relaxed")\n': (
                    'mask=inside, sem="relaxed")\n        if pid_n == tl.num_programs(0) - 1:\n'
                    "            whole = (before + part) * scale\n"
                    "            store_tile(dq_ptr + at_q, rows, offs_m, offs_d, seq_q, HEAD_DIM, whole)\n"
                ),
                "    dq_out = dq_sum * scale\n": "",
            },
            "What atomic_add returns is the sum so far",
        ),
        Wrong(
            "the last program stores its part",
            {
                'mask=inside, sem="relaxed")\n': (
                    'mask=inside, sem="relaxed")\n        if pid_n == tl.num_programs(0) - 1:\n'
                    "            store_tile(dq_ptr + at_q, rows, offs_m, offs_d, seq_q, HEAD_DIM, part * scale)\n"
                ),
                "    dq_out = dq_sum * scale\n": "",
            },
            "it is the part of the last program alone",
        ),
        Wrong("an order that is right", {"[0, 1, 2, 1, 2, 2]": "[0, 1, 1, 2, 2, 2]"}, "each program comes at its time"),
        Wrong("another race's order", {"[1, 1, 0, 2, 2, 2]": "[0, 2, 1, 1, 2, 2]"}, "LOST would be its name"),
        Wrong("0 comes last", {"[1, 1, 0, 2, 2, 2]": "[1, 1, 2, 2, 2, 0]"}, "LAST is in it too"),
        Wrong("two races at once", {"[0, 2, 2, 2, 1, 1]": "[0, 1, 2, 2, 2, 1]"}, "LOST is in it too"),
        Wrong("not an order", {"[0, 2, 2, 2, 1, 1]": "[0, 1, 2]"}, "program 0 once, 1 twice and 2 three times"),
        Wrong("no zeros", {"dq_sum = torch.zeros(": "dq_sum = torch.empty("}, "with which numbers does dq_sum begin"),
        Wrong("dq is never stored", {"    dq_out = dq_sum * scale\n": ""}, "who stores dq?"),
        Wrong("no scale", {"dq_out = dq_sum * scale": "dq_out = dq_sum"}, "the scale is missing"),
        Wrong("scaled twice", {"(there, part, mask=inside, sem": "(there, part * scale, mask=inside, sem"}, "twice"),
        Wrong("no mask", {"(there, part, mask=inside, sem": "(there, part, sem"}, "is the mask there"),
        Wrong(
            "no mask of columns",
            {"(there, part, mask=inside, sem": "(there, part, mask=(offs_m < seq_q)[:, None], sem"},
            "of rows and of columns?",
        ),
        Wrong(
            "in dq's dtype",
            {"dq_sum = torch.zeros(q.shape, dtype=torch.float32,": "dq_sum = torch.zeros(q.shape, dtype=dq.dtype,"},
            "dq_sum is fp32, and is rounded to dq once",
        ),
    ],
}

RIGHT = {
    "one_tile": [
        Wrong(
            "hidden after exp",
            {
                '    s = tl.where(visible, s, float("-inf"))\n': "",
                'tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None])': (
                    "tl.where(visible, tl.exp(s - lse[:, None]), 0.0)"
                ),
            },
            "",
            kind="passed",
        )
    ]
}
