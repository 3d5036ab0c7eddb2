"""What goes wrong in phase 2's exercises."""

from wrong_answers import Wrong

_MEASURED = """\
    from common.measure import traffic
    from phase2_tiling import tiling
    q, k, v = (torch.zeros(n, head_dim, dtype=dtype) for n in (seq_q, seq_k, seq_k))
    with traffic.measure(q=q, k=k, v=v) as moved:
        tiling.attention(q, k, v)
    return {name: moved.loaded_from[name] for name in "qkv"} | {"o": moved.stored}
"""

_MASK_FIRST = {
    's = tl.dot(q, tl.trans(k), input_precision="ieee") * scale': 's = tl.dot(q, tl.trans(k), input_precision="ieee")',
    's = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))': (
        's = tl.where((offs_n < seq_k)[None, :], s, float("-inf")) * scale'
    ),
}


WRONG = {
    "ragged_grid": [
        Wrong("the grid is rounded down", {"(triton.cdiv(seq_q, BLOCK_M),)": "(seq_q // BLOCK_M,)"}, "rounded up?"),
        Wrong(
            "a logit of 0 counts as missing",
            {"tl.where((offs_n < seq_k)[None, :], s, float": "tl.where(s != 0.0, s, float"},
            "a logit of 0 is taken for one of a key that does not exist",
        ),
        Wrong("one program more", {"(triton.cdiv(seq_q, BLOCK_M),)": "(seq_q // BLOCK_M + 1,)"}, "own a query?"),
        Wrong(
            "the loop is rounded down",
            {"range(0, seq_k, BLOCK_N)": "range(0, seq_k // BLOCK_N * BLOCK_N, BLOCK_N)"},
            "tile of keys is dropped",
        ),
        Wrong(
            "missing keys have the logit 0",
            {'        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))\n': ""},
            "what is its logit?",
        ),
        Wrong("k is not masked", {", mask=(offs_n < seq_k)[:, None], other=0.0": ""}, "does the load have a mask"),
        Wrong("q is not masked", {", mask=(offs_m < seq_q)[:, None], other=0.0": ""}, "is the load masked?"),
        Wrong("the store is not masked", {"m_i, mask=offs_m < seq_q": "m_i"}, "does the store have a mask?"),
        Wrong(
            "missing keys are loaded as -inf",
            {
                ", mask=(offs_n < seq_k)[:, None], other=0.0": ', mask=(offs_n < seq_k)[:, None], other=float("-inf")',
                '        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))\n': "",
            },
            "has the logit inf: load 0 for it",
        ),
        Wrong("a sentinel of -1e3", {'s, float("-inf"))\n        #': "s, -1e3)\n        #"}, "with the logit -1000"),
        Wrong("a sentinel of -1e6", {'s, float("-inf"))\n        #': "s, -1e6)\n        #"}, "with the logit -1e+06"),
        Wrong("a sentinel of -1e38", {'s, float("-inf"))\n        #': "s, -1e38)\n        #"}, "with the logit -1e+38"),
    ],
    "inner_loop": [
        Wrong("masked before it is scaled", _MASK_FIRST, "is s masked before it is scaled?"),
        Wrong("-1e38 for a missing key", {'s, float("-inf"))': "s, -1e38)"}, "the logit of keys past the end or"),
        Wrong("m starts at -1e30", {'((BLOCK_M,), float("-inf")': "((BLOCK_M,), -1e30"}, "or where m starts"),
        Wrong("no guard", {"tl.where(l_i == 0.0, 1.0, l_i)": "l_i"}, "a row that sees no key gives NaN"),
        Wrong(
            "o is not divided", {"acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]": "acc"}, "not divided by the row sum l"
        ),
        Wrong(
            "nothing is stored",
            {"    store_tile(o_ptr, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, o)\n": ""},
            "800 of 800 elements were never stored",
        ),
        Wrong(
            "fp32's lowest number for a missing key",
            {'s, float("-inf"))': "s, -3.4028234663852886e38)"},
            "keys past the end count like the others",
        ),
        Wrong("one key too many", {"(offs_n < seq_k)[None, :]": "(offs_n <= seq_k)[None, :]"}, "one key past the end"),
        Wrong("acc is not rescaled", {"acc * alpha[:, None]": "acc"}, "the accumulator is not rescaled by alpha"),
        Wrong(
            "missing keys have the logit 0",
            {'        s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))\n': ""},
            "keys past the end count as logit 0",
        ),
        Wrong("p stays in fp32", {"p.to(v.dtype), v": "p, v"}, "convert it down", kind="error"),
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
            "right where zeros lie around v, and wrong where NaN does",
        ),
        Wrong(
            "k is not masked",
            {"stride_k, offs_n, offs_d, seq_k,": "stride_k, offs_n, offs_d, start_n + BLOCK_N,"},
            "does the load have a mask",
        ),
        Wrong("v with k's strides", {"(v_ptr, stride_v": "(v_ptr, stride_k"}, "v is read with the strides of k"),
        Wrong("k with v's strides", {"(k_ptr, stride_k": "(k_ptr, stride_v"}, "k is read with the strides of v"),
        Wrong("steps of BLOCK_M", {"0, seq_k, BLOCK_N": "0, seq_k, BLOCK_M"}, "the loop goes by BLOCK_N"),
        Wrong(
            "BLOCK_M keys", {"start_n + tl.arange(0, BLOCK_N)": "start_n + tl.arange(0, BLOCK_M)"}, "has BLOCK_M keys"
        ),
        Wrong(
            "p is divided by l in every turn",
            {"p.to(v.dtype), v, ": "(p / l_i[:, None]).to(v.dtype), v, "},
            "p is divided by l in every turn: the division comes once",
        ),
        Wrong(
            "p is divided by l in every turn, and o is not",
            {
                "p.to(v.dtype), v, ": "(p / l_i[:, None]).to(v.dtype), v, ",
                "acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]": "acc",
            },
            "p is divided by l in every turn: keep the sum whole",
        ),
        Wrong(
            "the last query is never stored",
            {"offs_m, offs_d, seq_q, HEAD_DIM, o": "offs_m, offs_d, seq_q - 1, HEAD_DIM, o"},
            "o: 16 of 800 elements were never stored, o[49, 0] first",
        ),
        Wrong(
            "all strides ignored",
            {f"({x}_ptr, stride_{x},": f"({x}_ptr, (HEAD_DIM, 1)," for x in "qkv"},
            "q, k and v are read as if contiguous",
            at_once=True,
        ),
        Wrong("a sentinel of -1e4", {'s, float("-inf"))': "s, -1e4)"}, "only -inf will do"),
        Wrong("a sentinel of -1e6", {'s, float("-inf"))': "s, -1e6)"}, "only -inf will do"),
        Wrong(
            "the module's own function",
            {
                "tiling._launch(_attention_kernel, q, k, v, scale, **runtime.tile_sizes(q.shape[1], q.dtype))": (
                    "tiling.attention(q, k, v, scale)"
                )
            },
            "takes attention from phase 2's module",
        ),
        Wrong("a constant for the scale", {'"ieee") * scale': '"ieee") * 0.125'}, "the scale is a constant, 1/8"),
        Wrong("the scale twice", {'"ieee") * scale': '"ieee") * scale * scale'}, "the scale is in it twice"),
        Wrong("k is not transposed", {"tl.trans(k)": "k"}, "is one to be transposed, tl.trans?", kind="error"),
        Wrong("k is reshaped", {"tl.trans(k)": "tl.reshape(k, (HEAD_DIM, BLOCK_N))"}, "transpose it, tl.trans(k)"),
        Wrong("alpha along the columns", {"alpha[:, None]": "alpha[None, :]"}, "is a column", kind="error"),
        Wrong(
            "alpha after the product",
            {'acc * alpha[:, None], input_precision="ieee")': 'acc, input_precision="ieee") * alpha[:, None]'},
            "multiply acc by alpha before p v is added",
        ),
        Wrong("start_n is missing", {"start_n + tl.arange": "tl.arange"}, "do the offsets contain start_n?"),
        Wrong(
            "tiles are counted",
            {"0, seq_k, BLOCK_N": "0, tl.cdiv(seq_k, BLOCK_N)"},
            "the number of a tile times BLOCK_N",
        ),
        Wrong(
            "acc in the dtype of v",
            {'alpha[:, None], input_precision="ieee")': 'alpha[:, None], input_precision="ieee").to(v.dtype)'},
            "acc is rounded to fp16 in every turn",
            at_once=True,
        ),
        Wrong("a product in TF32", {'tl.trans(k), input_precision="ieee"': "tl.trans(k)"}, "the 10 bits of TF32"),
        Wrong(
            "a product in TF32, spelled otherwise",
            {'tl.dot(q, tl.trans(k), input_precision="ieee")': "triton.language.dot(q, tl.trans(k))"},
            "the 10 bits of TF32",
        ),
        Wrong(
            "q times scale in fp16",
            {
                'tl.dot(q, tl.trans(k), input_precision="ieee") * scale': (
                    'tl.dot((q * scale).to(k.dtype), tl.trans(k), input_precision="ieee")'
                )
            },
            "was q * scale",
        ),
        Wrong("v is converted up", {"p.to(v.dtype), v, ": "p, v.to(tl.float32), "}, "not that one up"),
        Wrong(
            "q and k are converted up",
            {"tl.dot(q, tl.trans(k)": "tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32))"},
            "q and k go in as they are loaded",
        ),
        Wrong(
            "divided in every turn",
            {'alpha[:, None], input_precision="ieee")': 'alpha[:, None], input_precision="ieee") / l_i[:, None]'},
            "acc is divided by l in every turn: the division comes once, after the loop",
        ),
        Wrong(
            "divided in every turn, and not after the loop",
            {
                'alpha[:, None], input_precision="ieee")': 'alpha[:, None], input_precision="ieee") / l_i[:, None]',
                "acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]": "acc",
            },
            "acc is divided by l in every turn: keep the sum whole",
        ),
        Wrong(
            "l times alpha again",
            {"online_softmax_step(m_i, l_i, s)\n": "online_softmax_step(m_i, l_i, s)\n        l_i = alpha * l_i\n"},
            "by alpha once more",
        ),
        Wrong(
            "l updated again",
            {
                "online_softmax_step(m_i, l_i, s)\n": (
                    "online_softmax_step(m_i, l_i, s)\n        l_i = alpha * l_i + tl.sum(p, axis=1)\n"
                )
            },
            "returns the new l",
        ),
        Wrong(
            "k and v have seq_q rows",
            {
                "stride_k, offs_n, offs_d, seq_k,": "stride_k, offs_n, offs_d, seq_q,",
                "stride_v, offs_n, offs_d, seq_k,": "stride_v, offs_n, offs_d, seq_q,",
            },
            "as if they had seq_q rows",
        ),
        Wrong(
            "v has seq_q rows",
            {"stride_v, offs_n, offs_d, seq_k,": "stride_v, offs_n, offs_d, seq_q,"},
            "v is loaded as if",
        ),
    ],
    "key_bias": [
        Wrong(
            "a program without queries",
            {'triton.cdiv(q.shape[0], tiles["BLOCK_M"])': 'q.shape[0] // tiles["BLOCK_M"] + 1'},
            "one of them has no queries",
        ),
        Wrong(
            "a grid of keys",
            {'triton.cdiv(q.shape[0], tiles["BLOCK_M"])': 'triton.cdiv(k.shape[0], tiles["BLOCK_M"])'},
            "has every row a program",
        ),
        Wrong(
            "the bias after the step",
            {
                " + bias[None, :]": "",
                "online_softmax_step(m_i, l_i, s)\n": (
                    "online_softmax_step(m_i, l_i, s)\n        p = p * tl.exp(bias)[None, :]\n"
                ),
            },
            "but not m and l",
        ),
        Wrong(
            "q is copied",
            {"            q, k, v, bias, o, q.stride()": "            q := q.contiguous(), k, v, bias, o, q.stride()"},
            "reads a copy",
        ),
        Wrong("added to rows", {"bias[None, :]": "bias[:, None]"}, "is a column", kind="error"),
        Wrong(
            "the bias is scaled",
            {'"ieee") * scale + bias[None, :]': '"ieee") * scale + scale * bias[None, :]'},
            "after s is scaled",
        ),
        Wrong("missing keys have the bias 0", {'other=float("-inf"))  #': "other=0.0)  #"}, "keys past the end count"),
        Wrong("the bias has no mask", {', mask=offs_n < seq_k, other=float("-inf"))  #': ")  #"}, "needs a mask"),
        Wrong("the bias has no stride", {" * stride_bias": ""}, "it has a stride"),
        Wrong(
            "the first tile's bias",
            {"offs_n.to(tl.int64)": "(offs_n - start_n).to(tl.int64)"},
            "do its offsets contain start_n?",
        ),
        Wrong("the bias is forgotten", {" + bias[None, :]": ""}, "the bias has no effect"),
        Wrong(
            "tiles are counted",
            {"0, seq_k, BLOCK_N": "0, tl.cdiv(seq_k, BLOCK_N)"},
            "the number of a tile times BLOCK_N",
        ),
        Wrong(
            "all strides of the bias",
            {"bias.stride(0)": "bias.stride()"},
            "take one of them, such as stride_x[0]",
            kind="error",
        ),
        Wrong("missing keys at -1e9", {'other=float("-inf"))  #': "other=-1e9)  #"}, "a finite number stands for -inf"),
        Wrong(
            "missing keys at -1e38", {'other=float("-inf"))  #': "other=-1e38)  #"}, "a finite number stands for -inf"
        ),
        Wrong("bias in 16 bits", {" + bias[None, :]": " + bias.to(q.dtype)[None, :]"}, "rounded to 16 bits"),
        Wrong(
            "a grid of one program",
            {'grid = (triton.cdiv(q.shape[0], tiles["BLOCK_M"]),)': "grid = (1,)"},
            "has every row a program",
        ),
        Wrong(
            "a copy of the bias",
            {"q, k, v, bias, o, q.stride()": "q, k, v, bias := bias.contiguous(), o, q.stride()"},
            "Is a copy of it read?",
        ),
        Wrong(
            "the length is a constexpr",
            {"seq_q, seq_k, scale,\n    HEAD_DIM": "seq_q, seq_k: tl.constexpr, scale,\n    HEAD_DIM"},
            "seq_q or seq_k is a tl.constexpr",
        ),
        Wrong("v with k's strides", {"(v_ptr, stride_v": "(v_ptr, stride_k"}, "v is read with the strides of k"),
        Wrong("acc is not rescaled", {"acc * alpha[:, None]": "acc"}, "not rescaled by alpha"),
        Wrong("no guard", {"tl.where(l_i == 0.0, 1.0, l_i)": "l_i"}, "a row that sees no key gives NaN"),
        Wrong(
            "the tile of keys is as long as the sequence",
            {"    grid = (": '    tiles["BLOCK_N"] = max(16, triton.next_power_of_2(k.shape[0]))\n    grid = ('},
            "compiled anew for another length",
        ),
        Wrong(
            "acc in the dtype of v",
            {'alpha[:, None], input_precision="ieee")': 'alpha[:, None], input_precision="ieee").to(v.dtype)'},
            "acc is rounded to fp16 in every turn",
        ),
        Wrong("a product in TF32", {'tl.trans(k), input_precision="ieee"': "tl.trans(k)"}, "the 10 bits of TF32"),
        Wrong("v is converted up", {"p.to(v.dtype), v, ": "p, v.to(tl.float32), "}, "not that one up"),
        Wrong(
            "q and k are converted up",
            {"tl.dot(q, tl.trans(k)": "tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32))"},
            "q and k go in as they are loaded",
        ),
        Wrong(
            "break",
            {"        k = load_tile(": "        if start_n >= seq_k:\n            break\n        k = load_tile("},
            "the compiler refuses the launch for q, k, v",
        ),
        Wrong(
            "no queries, no columns", {"        return o\n": "        return o[:, :8]\n"}, "wrong shape for seq_q = 0"
        ),
    ],
    "predict_traffic": [
        Wrong(
            "measured",
            {"    programs = triton.cdiv(": _MEASURED + "    programs = triton.cdiv("},
            "are measured, or taken from common.measure.traffic",
        ),
        Wrong("keys are read once", {'"k": programs * k': '"k": k'}, "every program reads all keys"),
        Wrong(
            "the tile of fp16 for fp32",
            {'runtime.tile_sizes(head_dim, dtype)["BLOCK_M"])': "64)"},
            "depends on dtype: ask runtime.tile_sizes",
        ),
        Wrong("elements", {"k = seq_k * head_dim * dtype.itemsize": "k = seq_k * head_dim"}, "these are elements"),
        Wrong(
            "two bytes", {"k = seq_k * head_dim * dtype.itemsize": "k = seq_k * head_dim * 2"}, "four bytes, not two"
        ),
        Wrong("whole tiles", {'"o": q': '"o": -(-seq_q // 64) * 64 * head_dim * dtype.itemsize'}, "a mask hides"),
        Wrong("o in fp32", {'"o": q': '"o": seq_q * head_dim * 4'}, "fp32 on chip only"),
        Wrong("rounded down", {"triton.cdiv(seq_q, ": "int.__floordiv__(seq_q, "}, "it reads every key too"),
        Wrong(
            "a program for each tile of keys",
            {"triton.cdiv(seq_q, ": "triton.cdiv(seq_k, "},
            "that of tiles of queries?",
        ),
        Wrong("q at every turn", {'"q": q': '"q": q * triton.cdiv(seq_k, 64)'}, "loads its queries once"),
        Wrong(
            "four numbers in order",
            {'{"q": q, "k": programs * k, "v": programs * k, "o": q}': "q, programs * k, programs * k, q"},
            "expected {",
        ),
    ],
    "loop_order": [
        Wrong("masked before it is scaled", _MASK_FIRST, "is s masked before it is scaled?"),
        Wrong(
            "the first visit starts anew",
            {
                "l_i = tl.load(l_ptr + offs_m, mask=rows, other=0.0)\n": (
                    "l_i = tl.load(l_ptr + offs_m, mask=rows, other=0.0)\n"
                    '            m_i = tl.where(start_n == 0, float("-inf"), m_i)\n'
                    "            l_i = tl.where(start_n == 0, 0.0, l_i)\n"
                )
            },
            "is forgotten at the first visit",
        ),
        Wrong("the barrier is gone", {"        tl.debug_barrier()\n": ""}, "tl.debug_barrier() is gone"),
        Wrong("o is taken for acc", {"(alpha * l_i)[:, None]": "alpha[:, None]"}, "by alpha alone"),
        Wrong(
            "the new l is multiplied", {"(alpha * l_i)[:, None]": "(alpha * l_new)[:, None]"}, "multiplied by the new l"
        ),
        Wrong("alpha is forgotten", {"(alpha * l_i)[:, None]": "l_i[:, None]"}, "but not by alpha"),
        Wrong("the old o stays", {"o * (alpha * l_i)[:, None]": "o * l_new[:, None]"}, "is left as it was"),
        Wrong("o is left unnormalized", {" / l_new[:, None]": ""}, "not divided by l'"),
        Wrong(
            "acc is kept and divided at the end",
            {
                "(alpha * l_i)[:, None]": "alpha[:, None]",
                "acc / l_new": "acc / tl.where(start_n + BLOCK_N < seq_k, 1.0, l_new)",
            },
            "acc that waits in memory",
        ),
        Wrong(
            "o is divided once more",
            {"(alpha * l_i)[:, None]": "(alpha * l_i / l_new)[:, None]"},
            "p v alone has yet to be divided",
        ),
        Wrong(
            "p v is not divided",
            {"(alpha * l_i)[:, None]": "(alpha * l_i / l_new)[:, None]", " / l_new[:, None]": ""},
            "p v is not divided by l'",
        ),
        Wrong(
            "acc is kept and never divided",
            {"(alpha * l_i)[:, None]": "alpha[:, None]", " / l_new[:, None]": ""},
            "it is acc, which is never divided",
        ),
        Wrong(
            "l is not stored", {"            tl.store(l_ptr + offs_m, l_new, mask=rows)\n": ""}, "l: it is as it was"
        ),
        Wrong(
            "m is not loaded",
            {"tl.load(m_ptr + offs_m, mask=rows, other": "tl.full((BLOCK_M,), dtype=tl.float32, value"},
            "m: it is that of the last tile of keys alone",
        ),
        Wrong("v with k's strides", {"(v_ptr, stride_v": "(v_ptr, stride_k"}, "v is read with the strides of k"),
        Wrong("steps of BLOCK_N", {"0, seq_q, BLOCK_M": "0, seq_q, BLOCK_N"}, "the inner loop goes by BLOCK_M"),
        Wrong(
            "BLOCK_N queries",
            {"start_m + tl.arange(0, BLOCK_M)": "start_m + tl.arange(0, BLOCK_N)"},
            "has BLOCK_M rows",
        ),
        Wrong("start_m is missing", {"start_m + tl.arange": "tl.arange"}, "do the offsets contain start_m?"),
        Wrong("a store is not masked", {"l_new, mask=rows": "l_new"}, "do the stores have a mask?"),
        Wrong("v is converted up", {"p.to(v.dtype), v, ": "p, v.to(tl.float32), "}, "not that one up"),
        Wrong(
            "o is rounded to the dtype of v",
            {"seq_q, HEAD_DIM, o)\n": "seq_q, HEAD_DIM, o.to(v.dtype))\n"},
            "rounded to the dtype of v at every visit",
        ),
        Wrong(
            "missing keys have the logit 0",
            {'            s = tl.where((offs_n < seq_k)[None, :], s, float("-inf"))\n': ""},
            "keys past the end count as logit 0",
        ),
        Wrong(
            "whole tiles of queries only",
            {"0, seq_q, BLOCK_M": "0, seq_q // BLOCK_M * BLOCK_M, BLOCK_M"},
            "partial tile of queries is never visited",
        ),
        Wrong(
            "p v times alpha",
            {
                'p.to(v.dtype), v, o * (alpha * l_i)[:, None], input_precision="ieee")': (
                    'p.to(v.dtype), v, o * l_i[:, None], input_precision="ieee") * alpha[:, None]'
                )
            },
            "p v is multiplied by alpha, too",
        ),
    ],
}


RIGHT = {
    "inner_loop": [
        Wrong(
            "a constant for the precision",
            {
                "\n\n@triton.jit": '\nIEEE = tl.constexpr("ieee")\n\n\n@triton.jit',
                'tl.trans(k), input_precision="ieee"': "tl.trans(k), input_precision=IEEE",
                'alpha[:, None], input_precision="ieee"': "alpha[:, None], input_precision=IEEE",
            },
            "",
            kind="passed",
        )
    ],
    "loop_order": [
        Wrong("with a guard", {"acc / l_new": "acc / tl.where(l_new == 0.0, 1.0, l_new)"}, "", kind="passed")
    ],
}
