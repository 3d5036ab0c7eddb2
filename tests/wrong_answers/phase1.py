"""What goes wrong in phase 1's exercises."""

from wrong_answers import Wrong

_NEW_L = "l * torch.exp(m - shift) + torch.exp(tile - shift[:, None]).sum(dim=1)"

WRONG = {
    "masked_add": [
        Wrong("the store is not masked", {"2 * x + y, mask=inside": "2 * x + y"}, "does the store have a mask?"),
        Wrong("a load is not masked", {"y_ptr + offsets, mask=inside": "y_ptr + offsets"}, "do both loads have the"),
        Wrong("every program takes the first block", {"tl.program_id(0) * BLOCK + ": ""}, "only the first block"),
        Wrong("the launcher adds", {"    return out\n": "    return 2 * x + y\n"}, "in the launcher: the kernel adds"),
        Wrong(
            "the kernel copies, the launcher adds",
            {"2 * x + y, mask=inside": "x, mask=inside", "    return out\n": "    return 2 * out + y\n"},
            "this is x: the kernel adds, not the launcher",
        ),
        Wrong("2 at the wrong vector", {"2 * x + y, mask": "x + 2 * y, mask"}, "this is x + 2 y"),
        Wrong("one element too many", {"offsets < n": "offsets <= n"}, "offsets < n, not <= n"),
        Wrong(
            "no tl.load",
            {"x = tl.load(x_ptr + offsets, mask=inside)": "x = x_ptr + offsets"},
            "A pointer is an address",
            kind="error",
        ),
        Wrong(
            "a pointer with an index",
            {"x = tl.load(x_ptr + offsets, mask=inside)": "x = x_ptr[offsets]"},
            "Elements cannot be picked by [ ]",
            kind="error",
        ),
        Wrong(
            "a result with an index",
            {"tl.store(out_ptr + offsets, 2 * x + y, mask=inside)": "out_ptr[offsets] = 2 * x + y"},
            "Elements cannot be picked by [ ]",
            kind="error",
        ),
        Wrong(
            "offsets without a pointer",
            {"x_ptr + offsets": "offsets"},
            "The first argument of tl.load and tl.store is a pointer",
            kind="error",
        ),
        Wrong(
            "a mask of another length",
            {"inside = offsets < n": "inside = tl.arange(0, 64) < n"},
            "the mask and the values of a load or store have one shape",
            kind="error",
        ),
        Wrong("a block of n", {"tl.arange(0, BLOCK)": "tl.arange(0, n)"}, "The compiler must know", kind="error"),
        Wrong("no constexpr", {"BLOCK: tl.constexpr": "BLOCK"}, "The compiler must know", kind="error"),
        Wrong("float of a block", {"2 * x + y": "2 * float(x) + y"}, "x.to(tl.float32) converts", kind="error"),
        Wrong(
            "a chain of comparisons",
            {"inside = offsets < n": "inside = 0 <= offsets < n"},
            "in _masked_add_kernel: inside = 0 <= offsets < n\nTypeError: a block has no single truth value",
            kind="error",
        ),
    ],
    "safe_softmax": [
        Wrong(
            "a maximum of at least -1e4",
            {"torch.where(m == -math.inf, 0.0, m)": "m.clamp(min=-1e4)"},
            "does a finite number such as -1e4 stand for -inf?",
        ),
        Wrong("no maximum is subtracted", {"s - torch.where(m == -math.inf, 0.0, m)": "s"}, "What may be subtracted"),
        Wrong("-inf minus -inf", {"torch.where(m == -math.inf, 0.0, m)": "m"}, "no logit is left, so the maximum"),
        Wrong("0 divided by 0", {"torch.where(l == 0, 1.0, l)": "l"}, "and so is 0/0"),
        Wrong("the maximum of the whole tensor", {"s.amax(dim=-1, keepdim=True)": "s.max()"}, "that of each row"),
        Wrong("the maximum of |x|", {"s.amax(": "s.abs().amax("}, "of |x|"),
        Wrong(
            "the maximum of the whole tensor, and no guard",
            {"torch.where(m == -math.inf, 0.0, m)": "x.float().max()", "torch.where(l == 0, 1.0, l)": "l"},
            "some rows are all 0 or NaN: is the maximum that of each row",
        ),
        Wrong("the maximum is at least 0", {"keepdim=True)\n    e": "keepdim=True).clamp(min=0)\n    e"}, "each row"),
        Wrong("the mean", {"s.amax(dim=-1, keepdim=True)": "s.mean(dim=-1, keepdim=True)"}, "no other statistic"),
        Wrong("the first logit", {"s.amax(dim=-1, keepdim=True)": "s[..., :1]"}, "no other statistic"),
        Wrong("the minimum", {"s.amax(dim=-1, keepdim=True)": "s.amin(dim=-1, keepdim=True)"}, "no other statistic"),
        Wrong(
            "the median",
            {"s.amax(dim=-1, keepdim=True)": "s.median(dim=-1, keepdim=True).values"},
            "no other statistic",
        ),
        Wrong("all of it in 16 bits", {"x.float()": "x"}, "is all of it computed in fp32"),
        Wrong("NaN is hidden", {".to(x.dtype)": ".nan_to_num(0).to(x.dtype)"}, "a row with a NaN"),
        Wrong("returned in fp32", {".to(x.dtype)": ""}, "torch.float16, so the result must be as well"),
        Wrong(
            "the input is written",
            {"s = x.float()": "s = x.float().sub_(x.amax(-1, keepdim=True))"},
            "writes into its argument 1",
        ),
        Wrong("PyTorch's softmax", {"(e / torch.where(l == 0, 1.0, l))": "torch.softmax(s, -1)"}, "write it out"),
        Wrong(
            "softmin",
            {"(e / torch.where(l == 0, 1.0, l))": "torch.nn.functional.softmin(-s, -1)"},
            "PyTorch's softmax does the work",
        ),
        Wrong(
            "a small number is added to the divisor",
            {"torch.where(l == 0, 1.0, l)": "(l + 1e-6)"},
            "a small number such as 1e-6 added",
        ),
        Wrong(
            "-1e4 for -inf",
            {"s = x.float()": "s = x.float().clamp(min=-1e4)"},
            "a row of -inf alone must give zeros: does a finite number such as -1e4",
        ),
    ],
    "online_step": [
        Wrong(
            "PyTorch: a guard at -1e4",
            {"torch.where(m_new == -math.inf, 0.0, m_new)": "m_new.clamp(min=-1e4)"},
            "l is 0: what is subtracted lies far above every logit",
        ),
        Wrong(
            "PyTorch: the guard asks for the old maximum",
            {"torch.where(m_new == -math.inf": "torch.where(m == -math.inf"},
            "the guard asks whether the old maximum is -inf",
        ),
        Wrong(
            "PyTorch: a new maximum starts the sum anew",
            {"l * torch.exp(m - shift)": "torch.where(m == m_new, l, 0.0)"},
            "the old sum is lost",
        ),
        Wrong("PyTorch: an LSE", {f"return m_new, {_NEW_L}": f"return m_new, m_new + torch.log({_NEW_L})"}, "return l"),
        Wrong("PyTorch: no rescale", {"l * torch.exp(m - shift)": "l"}, "measured against the old maximum: is it resc"),
        Wrong("PyTorch: rescaled the wrong way around", {"torch.exp(m - shift)": "torch.exp(shift - m)"}, "never grow"),
        Wrong(
            "PyTorch: the tile against the old maximum",
            {"torch.exp(tile - shift[:, None])": "torch.exp(tile - m[:, None])"},
            "measured against the old maximum, not against the new one",
        ),
        Wrong("PyTorch: the old maximum is lost", {"torch.maximum(m, tile.amax(dim=1))": "tile.amax(dim=1)"}, "alone"),
        Wrong("PyTorch: no guard", {"torch.where(m_new == -math.inf, 0.0, m_new)": "m_new"}, "in place of m?"),
        Wrong(
            "PyTorch: m is at least -1e4",
            {"torch.maximum(m, tile.amax(dim=1))": "torch.maximum(m, tile.amax(dim=1)).clamp(min=-1e4)"},
            "logits near -20000: m: does a number such as -1e4 stand for -inf?",
        ),
        Wrong("PyTorch: -inf becomes 0", {"return m_new, l *": "return shift, l *"}, "return the maximum itself"),
        Wrong(
            "PyTorch: m is at least 0",
            {"torch.maximum(m, tile.amax(dim=1))": "torch.maximum(m, tile.amax(dim=1)).clamp(min=0)"},
            "became 0: what does m start from?",
        ),
        Wrong("Triton: -inf becomes 0", {"return m_new, l_i *": "return shift, l_i *"}, "return the maximum itself"),
        Wrong("PyTorch: one maximum for all rows", {"tile.amax(dim=1)": "tile.amax()"}, "which axis is reduced?"),
        Wrong("PyTorch: in place", {"return m_new, l *": "m[:] = m_new\n    return m_new, l *"}, "writes into"),
        Wrong(
            "PyTorch: NaN is hidden",
            {
                "torch.where(m_new == -math.inf, 0.0, m_new)": "m_new",
                "l * torch.exp(m - shift) + torch.exp(tile - shift[:, None]).sum(dim=1)": "torch.nan_to_num("
                "l * torch.exp(m - shift) + torch.exp(tile - shift[:, None]).sum(dim=1))",
            },
            "with a NaN in row 1",
        ),
        Wrong(
            "PyTorch: always fp32",
            {"tile.amax(dim=1)": "tile.float().amax(dim=1).double()"},
            "the precision of fp32 only",
        ),
        Wrong("Triton: no rescale", {"l_i * tl.exp(m_i - shift)": "l_i"}, "in Triton, a tile with larger logits: l"),
        Wrong("PyTorch: l, m", {f"return m_new, {_NEW_L}": f"return {_NEW_L}, m_new"}, "m and l are exchanged"),
        Wrong(
            "Triton: Python's max",
            {"tl.maximum(m_i, tl.max(s, axis=1))": "max(m_i, tl.max(s, axis=1))"},
            "a block has no single truth value",
            kind="error",
        ),
        Wrong("Triton: PyTorch's exp", {"tl.exp(m_i": "torch.exp(m_i"}, "Inside a kernel there are", kind="error"),
        Wrong(
            "Triton: dim",  # raised inside tl.max: the line is still that of the answer
            {"tl.max(s, axis=1)": "tl.max(s, dim=1)"},
            "in _online_step: m_new = tl.maximum(m_i, tl.max(s, dim=1))",
            kind="error",
        ),
        Wrong(
            "Triton: tl.max of two blocks",
            {"tl.maximum(m_i, tl.max(s, axis=1))": "tl.max(m_i, tl.max(s, axis=1))"},
            "tl.maximum(a, b) takes the larger of two",
            kind="error",
        ),
        Wrong(
            "PyTorch alone",
            {"    m_new = tl.maximum(m_i, tl": "    raise NotImplementedError\n    m_new = tl.maximum(m_i, tl"},
            "right so far: online_step, in PyTorch. Next: line",
            kind="unfinished",
        ),
        Wrong("Triton: a sum over all rows", {"shift[:, None]), axis=1)": "shift[:, None]))"}, "which axis is summed?"),
        Wrong("Triton: no guard", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "in place of m?"),
        Wrong(
            "Triton: a large negative number for -inf",
            {"m_new = tl.maximum(m_i, tl": "m_new = tl.maximum(tl.maximum(m_i, -5000.0), tl"},
            "logits near -10000: m: does a number such as -1e4 stand for -inf?",
        ),
    ],
    "erratum": [
        Wrong("as printed", {"return torch.exp(m1 - m2) * o1": "return o1 / torch.exp(m1 - m2)"}, "must it grow?"),
        Wrong("not rescaled", {"return torch.exp(m1 - m2) * o1": "return o1"}, "not rescaled"),
        Wrong(
            "both terms",
            {"return torch.exp(m1 - m2) * o1 + p2 @ v2": "return torch.exp(m1 - m2) * (o1 + p2 @ v2)"},
            "both terms are rescaled",
        ),
        Wrong(
            "the new term",
            {"torch.exp(m1 - m2) * o1 + p2 @ v2\n    #": "o1 + torch.exp(m1 - m2) * (p2 @ v2)\n    #"},
            "not the new one",
        ),
        Wrong(
            "a telling input that hides",
            {"torch.tensor([[3.0, 0.0]])": "torch.tensor([[1.5, 0.0]])"},
            "telling_input: A gives the right output too. Does",
        ),
        Wrong(
            "a telling input without an old term",
            {"v1, v2 = torch.tensor([[1.0], [2.0]])": "v1, v2 = torch.tensor([[0.0], [0.0]])"},
            "A gives the right output too. Does s2 bring a new maximum in a row where o1 is not 0?",
        ),
        Wrong(
            "a telling input without a new term",
            {"torch.tensor([[1.0], [4.0]])": "torch.tensor([[0.0], [0.0]])"},
            "C gives the right output too. Does s2 bring a new maximum in a row where p2 v2 is not 0?",
        ),
        Wrong(
            "a telling input that hardly tells",
            {"torch.tensor([[3.0, 0.0]])": "torch.tensor([[2.001, 0.0]])"},
            "of the largest element: too little",
        ),
        Wrong(
            "the update alone",
            {"    s1, s2 = torch": "    raise NotImplementedError\n    s1, s2 = torch"},
            "right so far: update. Next: line",
            kind="unfinished",
        ),
        Wrong(
            "an input that tells both ways",
            {
                "torch.tensor([[1.0, 2.0]])": "torch.tensor([[1.0, 2.0], [5.0, 0.0]])",
                "torch.tensor([[3.0, 0.0]])": "torch.tensor([[3.0, 0.0], [1.0, 1.0]])",
            },
            "its tiles exchanged: A is wrong (by",
        ),
        Wrong("a second tile of zeros", {"[[1.0], [4.0]]": "[[0.0], [0.0]]"}, "C gives the right output too"),
        Wrong("two tensors", {"    return s1, v1, s2, v2\n": "    return s1, v1\n"}, "expected four tensors"),
        Wrong("v1 lies down", {"return s1, v1, s2, v2\n": "return s1, v1.T, s2, v2\n"}, "do not fit together"),
        Wrong("v2 is wider", {"return s1, v1, s2, v2\n": "return s1, v1, s2, v2.repeat(1, 2)\n"}, "different head_dim"),
        Wrong("s1 is infinite", {"return s1, v1, s2, v2\n": "return s1 / 0, v1, s2, v2\n"}, "must be finite"),
    ],
    "merge": [
        Wrong(
            "exp of the logits' size", {"torch.logaddexp(lse_a, lse_b)": "(lse_a.exp() + lse_b.exp()).log()"}, "range"
        ),
        Wrong("weights that do not add up to 1", {"0.0, lse)": "0.0, torch.maximum(lse_a, lse_b))"}, "add up to 1"),
        Wrong(
            "no guard",
            {"torch.where(lse == -math.inf, 0.0, lse)": "lse"},
            "both: o is NaN, in a row where neither part saw a key",
        ),
        Wrong(
            "weights upside down",
            {"w_a[..., None] * o_a": "o_a / w_a[..., None]", "w_b[..., None] * o_b": "o_b / w_b[..., None]"},
            "none of them exceeds 1",
        ),
        Wrong("no column", {"w_a[..., None] * o_a": "w_a * o_a"}, "x[..., None] makes it a column", kind="error"),
        Wrong(
            "a quotient of exponentials of the logits' size",
            {"lse_a - shift), torch.exp(lse_b - shift)": "lse_a) / lse.exp(), torch.exp(lse_b) / lse.exp()"},
            "logits near 1000: o is NaN, in a row where both parts saw keys",
        ),
        Wrong(
            "a difference the wrong way around",
            {"torch.logaddexp(lse_a, lse_b)": "lse_a + torch.log1p(torch.exp(lse_b - lse_a))"},
            "in a row where one part saw no key",
        ),
        Wrong(
            "log(l) without m",
            {"o_b, lse\n": "o_b, lse - torch.maximum(lse_a, lse_b)\n"},
            "this is log(l), measured against the larger lse: add that",
        ),
        Wrong("the guard in the lse", {"o_b, lse\n": "o_b, shift\n"}, "is the 0 that is subtracted there added back?"),
        Wrong("the larger lse", {"torch.logaddexp(lse_a, lse_b)": "torch.maximum(lse_a, lse_b)"}, "the larger one"),
        Wrong("swapped weights", {"w_a, w_b =": "w_b, w_a ="}, "swapped"),
        Wrong(
            "NaN is hidden",
            {
                "torch.logaddexp(lse_a, lse_b)\n": (
                    "torch.logaddexp(lse_a, lse_b).nan_to_num(nan=-math.inf, neginf=-math.inf)\n"
                )
            },
            "must be NaN in these rows",
        ),
        Wrong("the plain average", {"w_a[..., None] * o_a + w_b[..., None] * o_b": "(o_a + o_b) / 2"}, "plain average"),
        Wrong(
            "NaN in o becomes 0",
            {"w_a[..., None] * o_a +": "w_a[..., None] * o_a.nan_to_num(0) +"},
            "o_a is NaN in one row, where both lse are finite",
        ),
        Wrong(
            "a small number is added to the divisor",
            {
                "w_b[..., None] * o_b, lse": "w_b[..., None] * o_b) / (w_a + w_b + 1e-6)[..., None], lse",
                "return w_a": "return (w_a",
            },
            "is a number such as 1e-6 added to the divisor?",
        ),
    ],
    "attend_rows": [
        Wrong("log2 in the lse", {"m + tl.log(norm)": "m + tl.log2(norm)"}, "log(l) is to base 2 here"),
        Wrong("a name of the loop after it", {"m + tl.log(norm)": "m_new + tl.log(norm)"}, "loop never runs", "error"),
        Wrong("rows side by side", {"s_ptr + row * stride_s[0]": "s_ptr + row * n"}, "a row of s is sought at row * n"),
        Wrong(
            "columns side by side", {"offs_n * stride_s[1]": "offs_n"}, "the numbers of a row of s are a stride apart"
        ),
        Wrong(
            "strides exchanged",
            {"row * stride_s[0]": "row * stride_s[1]", "offs_n * stride_s[1]": "offs_n * stride_s[0]"},
            "are the strides of its rows and columns exchanged?",
        ),
        Wrong("v without a mask", {"v_ptrs, mask=inside, other=0.0": "v_ptrs"}, "is it masked?"),
        Wrong(
            "lse in fp16",
            {"lse = torch.empty(rows, dtype=torch.float32,": "lse = torch.empty(rows, dtype=torch.float16,"},
            "it is rounded to 16 bits: lse is fp32",
        ),
        Wrong(
            "a guard at -1e4",
            {'tl.where(m_new == float("-inf"), 0.0, m_new)': "tl.maximum(m_new, -1e4)"},
            "logits near -20000",
        ),
        Wrong(
            "a tile holds the whole row",
            {"BLOCK_N=64,": "BLOCK_N=triton.next_power_of_2(max(1, n)),"},
            "compiled anew for rows of another length",
        ),
        Wrong(
            "acc is not rescaled",
            {"acc = alpha * acc + tl": "acc = acc + tl"},
            "the same rows falling are right",
            section="4.4",
        ),
        Wrong("l is not rescaled", {"l = alpha * l + tl": "l = l + tl"}, "the same rows falling are right"),
        Wrong(
            "acc is not rescaled, in long tiles",
            {"acc = alpha * acc + tl": "acc = acc + tl", "BLOCK_N=64": "BLOCK_N=4096"},
            "the same rows falling are right",
        ),
        Wrong(
            "the newest tile's maximum",
            {"tl.maximum(m, tl.max(s, axis=0))": "tl.max(s, axis=0)"},
            "is m the maximum of the newest tile alone?",
        ),
        Wrong(
            "the newest tile's maximum, in long tiles",
            {"tl.maximum(m, tl.max(s, axis=0))": "tl.max(s, axis=0)", "BLOCK_N=64": "BLOCK_N=4096"},
            "is m the maximum of the newest tile alone?",
        ),
        Wrong(
            "padding of 0",
            {'mask=offs_n < n, other=float("-inf")': "mask=offs_n < n, other=0.0"},
            "count as logits of 0",
        ),
        Wrong(
            "no `other` at the load of v", {"mask=inside, other=0.0": "mask=inside"}, "a load has a mask but no `other`"
        ),
        Wrong(
            "no `other` at the load of s",
            {'mask=offs_n < n, other=float("-inf")': "mask=offs_n < n"},
            "a load has a mask but no `other`",
        ),
        Wrong(
            "v padded with -inf",
            {"mask=inside, other=0.0": 'mask=inside, other=float("-inf")'},
            "what is `other` of the load of v?",
        ),
        Wrong("no division", {"(acc / norm)": "acc"}, "the sum is not divided by l"),
        Wrong(
            "p v is rescaled too",
            {"alpha * acc + tl.sum(p[:, None] * v, axis=0)": "alpha * (acc + tl.sum(p[:, None] * v, axis=0))"},
            "alpha rescales p v as well (tiles of 64)",
        ),
        Wrong(
            "divided in the loop",
            {"tl.sum(p[:, None] * v, axis=0)\n": "tl.sum(p[:, None] * v, axis=0) / l\n", "(acc / norm)": "acc"},
            "p v is divided by l inside the loop (tiles of 64)",
        ),
        Wrong(
            "divided in the loop and after it",
            {"tl.sum(p[:, None] * v, axis=0)\n": "tl.sum(p[:, None] * v, axis=0) / l\n"},
            "p v is divided by l inside the loop, and again after it (tiles of 64)",
        ),
        Wrong(
            "acc is divided in every step",
            {"        m = m_new\n": "        m = m_new\n        acc = acc / l\n", "(acc / norm)": "acc"},
            "acc is divided by l in every step (tiles of 64)",
        ),
        Wrong(
            "acc is divided in every step, and after the loop",
            {"        m = m_new\n": "        m = m_new\n        acc = acc / l\n"},
            "acc is divided by l in every step, and again after the loop (tiles of 64)",
        ),
        Wrong("m is not updated", {"        m = m_new\n": ""}, "is m updated in the loop?"),
        Wrong(
            "a tile against its own maximum",
            {"tl.exp(s - shift)": "tl.exp(s - tl.max(s, axis=0))"},
            "a tile is measured against its own maximum",
        ),
        Wrong("alpha turned around", {"tl.exp(m - shift)": "tl.exp(shift - m)"}, "exp(m' - m) is infinite"),
        Wrong(
            "a tile as wide as head_dim",
            {"block_d = triton.next_power_of_2(head_dim)": "block_d = head_dim"},
            "next_power_of_2(n) is the least",
            kind="error",
        ),
        Wrong(
            "s with the strides of v",
            {"s.stride(), v.stride()": "v.stride(), v.stride()"},
            "s is read with the strides of v",
        ),
        Wrong(
            "v with the strides of s",
            {"s.stride(), v.stride()": "s.stride(), s.stride()"},
            "v is read with the strides of s",
        ),
        Wrong(
            "v as if contiguous", {"s.stride(), v.stride()": "s.stride(), (head_dim, 1)"}, "as if it were contiguous"
        ),
        Wrong(
            "v is copied",
            {"s, v = runtime.to_kernel_dtype(s, v)": "s, v = runtime.to_kernel_dtype(s, v.contiguous())"},
            "in place",
        ),
        Wrong("no guard", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "-inf subtracted from -inf"),
        Wrong("0 divided by 0", {"norm = tl.where(l == 0.0, 1.0, l)": "norm = l"}, "what may it be divided by?"),
        Wrong(
            "the store is not masked",
            {", mask=offs_d < head_dim)": ")"},
            "something was stored outside of o: 8 behind it",
        ),
        Wrong(
            "a load is not masked",
            {"s_ptrs, mask=offs_n < n, other=": "s_ptrs, mask=offs_n < n + 1, other="},
            "does the load of s have a mask?",
        ),
        Wrong("m starts from 0", {'m, l, acc = float("-inf"), 0.0': "m, l, acc = 0.0, 0.0"}, "logits near -10000"),
        Wrong(
            "only the first tile",
            {"range(0, n, BLOCK_N)": "range(0, BLOCK_N, BLOCK_N)"},
            "first 64 logits: does the loop go on?",
        ),
        Wrong(
            "only the first tile, a long one",
            {"range(0, n, BLOCK_N)": "range(0, BLOCK_N, BLOCK_N)", "BLOCK_N=64": "BLOCK_N=1024"},
            "only 20% of the logits are read",
        ),
        Wrong(
            "bf16 is interpreted",
            {"s, v = runtime.to_kernel_dtype(s, v)": "s, v = s, v"},
            "by runtime.to_kernel_dtype?",
        ),
        Wrong(
            "the guard in the lse",
            {
                "        m = m_new\n    norm": "        m = m_new\n"
                '    m = tl.where(m == float("-inf"), 0.0, m)\n    norm'
            },
            "plus m itself, not plus what is subtracted",
        ),
        Wrong("lse is m", {"m + tl.log(norm)": "m"}, "log(l) is missing"),
        Wrong("lse is log(l)", {"m + tl.log(norm)": "tl.log(norm)"}, "add m to it"),
        Wrong("base 2", {"m + tl.log(norm)": "(m + tl.log(norm)) * 1.4426950408889634"}, "to base 2"),
        Wrong(
            "fp16 sums",
            {"acc = alpha * acc": "acc = (alpha * acc).to(o_ptr.dtype.element_ty).to(tl.float32)"},
            "more than once: is everything",
        ),
        Wrong("half of the rows", {"_kernel[(rows,)]": "_kernel[((rows + 1) // 2,)]"}, "has every row a program"),
        Wrong("returned in fp32", {"return o.to(dtype), lse": "return o.float(), lse"}, "must be torch.float16"),
        Wrong(
            "two passes",
            {
                "    norm = tl": "    for start_n in range(0, n, BLOCK_N):\n"
                "        offs_n = start_n + tl.arange(0, BLOCK_N).to(tl.int64)\n"
                "        tl.load(s_ptr + row * stride_s[0] + offs_n * stride_s[1], mask=offs_n < n)\n"
                "    norm = tl"
            },
            "read 2 times: once is enough",
        ),
        Wrong(
            "PyTorch computes",
            {"return o.to(dtype), lse": "return torch.softmax(s, 1) @ v, lse"},
            "the kernel computes",
        ),
        Wrong("NaN becomes 0", {"(acc / norm)": "tl.where(acc == acc, acc / norm, 0.0)"}, "o must be NaN in row 1"),
    ],
}

RIGHT = {
    "masked_add": [
        Wrong(
            "clamped loads, a masked store",
            {
                "    x = tl.load(x_ptr + offsets, mask=inside)\n    y = tl.load(y_ptr + offsets, mask=inside)\n": (
                    "    there = tl.minimum(offsets, n - 1)\n"
                    "    x = tl.load(x_ptr + there)\n    y = tl.load(y_ptr + there)\n"
                )
            },
            "",
            kind="passed",
        )
    ]
}
