"""What goes wrong in phase 5's exercises."""

from wrong_answers import Wrong

# of barrier_phases: what a consumer does with a tile that it does not see
LINE = "\n" + 16 * " "
WAIT_AND_ARRIVE = f"yield wait(ring.full[i], full_parity){LINE}yield arrive(ring.empty[i]){LINE}# end"


def _apart(transfers: str) -> dict[str, str]:
    """real_ring: k and v travel apart, by these transfers."""
    return {
        "    kv = torch.stack((k, v))\n": "    after, before, kv = (rank + 1) % ranks, (rank - 1) % ranks, (k, v)\n",
        "buffer = torch.empty_like(kv)": "buffer = new_k, new_v = torch.empty_like(k), torch.empty_like(v)",
        "            sending = dist.isend(kv, (rank + 1) % ranks)\n": "            k, v = kv\n",
        "coming = dist.irecv(buffer, (rank - 1) % ranks)": f"transfers = [{transfers}]",
        "            sending.wait()\n": "",
        "coming.wait()": "[transfer.wait() for transfer in transfers]",
    }


CHOSEN = (  # of choose_parts
    "    return min(range(1, tiles + 1), key=lambda n: microseconds(n, programs, tiles, tile_bytes, multiprocessors))"
)
READING = "max(FIRST + programs * tiles * tile_bytes / ALL, rounds * (FIRST + share * TILE))"
MERGING = "(n > 1) * (MERGE + n * EACH)"

WRONG = {
    "count_flops": [
        Wrong("not halved", {" // (2 if is_causal else 1)": ""}, "under a causal mask the count is half"),
        Wrong("backward as executed", {'"bwd": 5, "both": 7': '"bwd": 7, "both": 9'}, "whatever kernels recompute"),
        Wrong("floats", {"// (2 if": "/ (2 if"}, "expected an int, got float"),
        Wrong("a product is one operation", {"product = 2 *": "product ="}, "are two operations"),
        Wrong("rounds down", {"(end_n + block_n - 1) // block_n": "end_n // block_n"}, "as a whole tile: round up"),
        Wrong("diagonal tiles left out", {"start_m + block_m) if": "start_m) if"}, "they are missing"),
        Wrong("rows past the last query", {"min(seq_k, seq_q, start_m": "min(seq_k, start_m"}, "rows past the last"),
        Wrong("the true head_dim", {"max(16, 1 << (head_dim - 1).bit_length())": "head_dim"}, "head_dim is padded"),
        Wrong("from the first query", {"start_m + block_m) if": "start_m + 1) if"}, "not only if its first does"),
        Wrong("the gradients alone", {"((4, dkdv_tile), (3,": "((2, dkdv_tile), (1,"}, "each kernel makes both"),
        Wrong(
            "visible pairs by convention",
            {
                "return product * products // (2 if is_causal else 1)": (
                    "pairs = sum(min(seq_k, i + 1) for i in range(seq_q)) if is_causal else seq_q * seq_k\n"
                    "    return 2 * batch * heads * pairs * head_dim * products"
                )
            },
            "this counts visible pairs",
        ),
        Wrong("S and dP once", {"((4, dkdv_tile), (3,": "((4, dkdv_tile), (1,"}, "for themselves"),
        Wrong("five products", {"((4, dkdv_tile), (3,": "((3, dkdv_tile), (2,"}, "the kernels make seven"),
        Wrong("five products in each", {"((4, dkdv_tile), (3,": "((5, dkdv_tile), (5,"}, "no kernel makes all five"),
        Wrong("one head", {"batch * heads * count": "count"}, "batch * heads such heads"),
        Wrong(
            "floats on the way",
            {"    return product * products // (2 if is": "    return int(1.0 * product * products) // (2 if is"},
            "floats were used on the way",
        ),
        Wrong("backward twice forward", {'"bwd": 5, "both": 7': '"bwd": 4, "both": 6'}, "backward has five products"),
        Wrong("forward and backward are backward", {'"both": 7': '"both": 5'}, "forward and backward together"),
        Wrong(
            "padded by convention",
            {"seq_q * seq_k * head_dim\n": "seq_q * seq_k * max(16, 1 << (head_dim - 1).bit_length())\n"},
            "takes head_dim as it is",
        ),
        Wrong("the tile turned round", {"(block_m, block_n) in ((4,": "(block_n, block_m) in ((4,"}, "in this order"),
        Wrong("one tile for both kernels", {"(3, dq_tile)": "(3, dkdv_tile)"}, "tiles of its own"),
        Wrong(
            "half as by convention", {"heads * count": "heads * count // (2 if is_causal else 1)"}, "convention of `f"
        ),
        Wrong(
            "no minimum of 16",
            {"max(16, 1 << (head_dim - 1).bit_length())": "1 << (head_dim - 1).bit_length()"},
            "16 at",
        ),
        Wrong(
            "whole tiles of queries",
            {"(0, seq_q, block_m)": "(0, seq_q // block_m * block_m, block_m)"},
            "no whole tile",
        ),
        Wrong("past the keys", {"min(seq_k, seq_q, start_m": "min(seq_q, start_m"}, "no key exists from seq_k on"),
        Wrong(
            "tiles cut off at the edge",
            {
                "count += (end_n + block_n - 1) // block_n": (
                    "count += sum(min(block_m, seq_q - start_m) * min(block_n, seq_k - n) "
                    "for n in range(0, end_n, block_n)) / (block_m * block_n)"
                ),
                "return batch * heads * count": "return int(batch * heads * count)",
            },
            "cut off here",
        ),
    ],
    "pick_tiles": [
        Wrong("q forgotten", {"return q + (k if": "return (k if"}, "q stays for the whole walk"),
        Wrong("k or v", {"config.num_stages * 2 * k": "config.num_stages * k"}, "a tile of k and one of v"),
        Wrong(
            "one stage is two tiles",
            {"(k if config.num_stages == 1 else": "(0 if config.num_stages == 0 else"},
            "turns",
        ),
        Wrong("elements", {"block * padded * itemsize": "block * padded"}, "how many bytes has each?"),
        Wrong("S forgotten", {"(padded + config.BLOCK_N)": "padded"}, "S is missing"),
        Wrong("S as wide as acc", {"(padded + config.BLOCK_N)": "(2 * padded)"}, "acc has head_dim columns"),
        Wrong("acc as wide as S", {"(padded + config.BLOCK_N)": "(2 * config.BLOCK_N)"}, "S has BLOCK_N columns"),
        Wrong("warps are threads", {"// (32 * config.num_warps)": "// config.num_warps"}, "a warp has 32 threads"),
        Wrong("one warp holds all", {"// (32 * config.num_warps)": "// 32"}, "all the program's threads"),
        Wrong("strictly less", {"itemsize) <= shared": "itemsize) < shared"}, "all of a budget"),
        Wrong("registers ignored", {"registers(c, head_dim) <= register_budget": "True"}, "too much of registers"),
        Wrong(
            "keys before queries",
            {"c.BLOCK_M * c.BLOCK_N, c.BLOCK_M,": "c.BLOCK_M * c.BLOCK_N, c.BLOCK_N,"},
            "more queries",
        ),
        Wrong(
            "no minimum of 16, shared memory",
            {"max(16, 1 << (head_dim - 1).bit_length())\n    q, k": "1 << (head_dim - 1).bit_length()\n    q, k"},
            "16 or more",
        ),
        Wrong(
            "no minimum of 16, registers",
            {"max(16, 1 << (head_dim - 1).bit_length())\n    return": "1 << (head_dim - 1).bit_length()\n    return"},
            "16 or more",
        ),
        Wrong("a stage fewer", {"config.num_stages * 2 * k": "(config.num_stages - 1) * 2 * k"}, "not one fewer"),
        Wrong("q twice", {"return q + (k if": "return 2 * q + (k if"}, "q is there once"),
        Wrong("fewer warps among equals", {"c.num_stages), d": "c.num_stages, -c.num_warps), d"}, "comes first"),
        Wrong("the last among equals", {"max(fitting,": "max(fitting[::-1],"}, "comes first"),
        Wrong("no word on stages", {"c.BLOCK_M, c.num_stages)": "c.BLOCK_M)"}, "has more stages"),
        Wrong("stages first", {"c.BLOCK_M, c.num_stages)": "c.num_stages, c.BLOCK_M)"}, "has more queries"),
        Wrong(
            "no candidates",
            {"    fitting = [": "    best = candidates[0]\n    fitting = ["},
            "pick([], ...) raises IndexError",
        ),
        Wrong("nothing fits", {", default=None)": ", default=candidates[0])"}, "expected None"),
        Wrong("not in eights", {"(registers + 7) // 8 * 8": "registers"}, "handed out in eights"),
        Wrong("128 become 136", {"(registers + 7) // 8 * 8": "(registers // 8 + 1) * 8"}, "stay 128"),
        Wrong("no reserve", {"// (shared + 1024)": "// max(1, shared)"}, "1 KiB of shared memory more"),
        Wrong("any number of warps", {", 64 // num_warps)": ")"}, "room for 64 warps"),
        Wrong("32 programs of any size", {", 64 // num_warps)": ", 32)"}, "room for 64 warps"),
        Wrong("P too, fp32", {"(padded + config.BLOCK_N)": "(padded + 2 * config.BLOCK_N)"}, "acc and S alone"),
        Wrong("one thread a warp", {"(held * 32 * num_warps)": "(held * num_warps)"}, "a warp has 32 threads"),
        Wrong("four warps always", {"(held * 32 * num_warps)": "(held * 128)"}, "not always four"),
        Wrong("what one may have", {"228 * 1024 // (sh": "227 * 1024 // (sh"}, "a multiprocessor has 228 KiB"),
        Wrong("registers alone", {"228 * 1024 // (shared + 1024), ": ""}, "shared memory is a budget"),
        Wrong("a float of programs", {"64 // num_warps)": "64 / num_warps)"}, "expected an int"),
    ],
    "predict_gain": [
        Wrong("a MUFU like the others", {"(others + 8 * exponentials)": "(others + exponentials)"}, "take 8 clocks"),
        Wrong("products forgotten", {"return products + (others": "return (others"}, "the products are missing"),
        Wrong("not per logit", {"/ (t.block_m * t.block_n) for": "for"}, "divide each by its logits"),
        Wrong("a quarter forgotten", {"(others + 8 * exp": "(others + 2 * exp"}, "each has a quarter of them"),
        Wrong(
            "one product",
            {
                "products = 2 * 2 * turn.block_m * turn.block_n * head_dim / 4096\n    exponentials = turn": (
                    "products = 2 * turn.block_m * turn.block_n * head_dim / 4096\n    exponentials = turn"
                )
            },
            "two products",
        ),
        Wrong("issued twice", {"(others + 8 * exp": "(others + 9 * exp"}, "among its 8 clocks"),
        Wrong(
            "one scheduler", {"exponentials) * turn.num_warps / 4": "exponentials) * turn.num_warps"}, "serves them all"
        ),
        Wrong("one warp", {"exponentials) * turn.num_warps / 4": "exponentials)"}, "num_warps / 4 warps"),
        Wrong(
            "the maximum",
            {
                "return products + (others + 8 * exponentials) * turn.num_warps / 4": (
                    "return max(products, 8 * exponentials * turn.num_warps / 4, "
                    "sum(turn.instructions.values()) * turn.num_warps / 4)"
                )
            },
            "the sum, not the maximum",
        ),
        Wrong(
            "the sum",
            {"max(products, exponentials, issued)": "products + issued + exponentials * 7 / 8"},
            "not the sum",
        ),
        Wrong(
            "a MUFU is not issued",
            {
                "sum(turn.instructions.values()) * turn": (
                    "(sum(turn.instructions.values()) - turn.instructions.get('MUFU', 0)) * turn"
                )
            },
            "is issued, too",
        ),
        Wrong(
            "issue forgotten",
            {"max(products, exponentials, issued)": "max(products, exponentials)"},
            "other instructions are",
        ),
        Wrong("upside down", {"return old / new": "return new / old"}, "upside down"),
        Wrong("a gain without its one", {"return old / new": "return old / new - 1"}, "1.12, not 0.12"),
        Wrong("the other model", {"(serial_clocks(t,": "(overlapped_clocks(t,"}, "if everything overlaps"),
        Wrong(
            "a dict of clocks",
            {"    return products + (others": "    return None and products + (others"},
            "expected a number",
        ),
    ],
    "fold_log2e": [
        Wrong("the LSE in base 2", {" / LOG2E\n": "\n"}, "it is in base 2"),
        Wrong("the LSE multiplied", {" / LOG2E\n": " * LOG2E\n"}, "where it should be divided"),
        Wrong("m not scaled", {"tl.max(s, axis=1) * scale": "tl.max(s, axis=1)"}, "is not scaled"),
        Wrong("ln(2) in five digits", {" / LOG2E\n": " * 0.69315\n"}, "a constant with too few digits?"),
        Wrong("log2(e) in two digits", {"scale *= LOG2E.value": "scale *= 1.44"}, "not 1.44, but"),
        Wrong(
            "folded twice, in the step",
            {"axis=1) * scale": "axis=1) * scale * LOG2E", "exp2(s * scale -": "exp2(s * scale * LOG2E -"},
            "the scale holds it already",
        ),
        Wrong("folded twice, in the launcher", {"scale *= LOG2E.value": "scale *= LOG2E.value**2"}, "scale twice"),
        Wrong("not folded", {"scale *= LOG2E.value": "pass"}, "does the scale that the kernel is given"),
        Wrong("exp", {"tl.exp2(s * scale": "tl.exp(s * scale"}, "uses exp"),
        Wrong(
            "the multiplication is still there",
            {"tl.exp2(s * scale - shift[:, None])": "tl.exp2((s * (scale / LOG2E) - shift[:, None] / LOG2E) * LOG2E)"},
            "is the one to remove",
        ),
        Wrong(
            "multiplied last",
            {"tl.exp2(s * scale - shift[:, None])": "tl.exp2((s - (shift / scale)[:, None]) * scale)"},
            "a multiply-add multiplies first",
        ),
        Wrong("no row without a key", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "-inf minus -inf"),
        Wrong("a floor", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "tl.maximum(m_new, -1e5)"}, "above a floor"),
        Wrong(
            "the old maximum tested",
            {'tl.where(m_new == float("-inf")': 'tl.where(m_i == float("-inf")'},
            "not the old m",
        ),
        Wrong(
            "its own scale",
            {"scale *= LOG2E.value": "scale = LOG2E.value / math.sqrt(q.shape[3])"},
            "the argument `scale` is ignored",
        ),
        Wrong("l not rescaled", {"alpha * l_i + tl.sum": "l_i + tl.sum"}, "not rescaled by alpha"),
        Wrong(
            "the tile's maximum",
            {"tl.exp2(s * scale - shift[:, None])": "tl.exp2((s - tl.max(s, axis=1)[:, None]) * scale)"},
            "the tile's own maximum",
        ),
        Wrong(
            "a NaN repaired",
            {
                "    p = tl.exp2(s * scale - shift[:, None])\n": (
                    "    p = tl.exp2(s * scale - shift[:, None])\n"
                    "    p, alpha = tl.where(p == p, p, 0.0), tl.where(alpha == alpha, alpha, 0.0)\n"
                )
            },
            "a NaN in k does not reach o",
        ),
        Wrong(
            "the tile scaled twice",
            {"tl.max(s, axis=1) * scale": "tl.max(s * scale, axis=1)"},
            "the maximum is taken of the scaled tile",
        ),
        Wrong(
            "the tile scaled before its maximum",
            {
                "m_new = tl.maximum(m_i, tl.max(s, axis=1) * scale)": (
                    "s = s * scale\n    m_new = tl.maximum(m_i, tl.max(s, axis=1))"
                ),
                "tl.exp2(s * scale - shift": "tl.exp2(s - shift",
            },
            "the maximum is taken of the scaled tile",
            at_once=True,
        ),
    ],
    "split_causal_loop": [
        Wrong(
            "only the diagonal counts",
            {"full_n, end_n = seq_k // BLOCK_N * BLOCK_N": "full_n, end_n = seq_k"},
            "did not round down",
        ),
        Wrong(
            "from the tile's last query",
            {"(pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)": "(pid_m + 1) * BLOCK_M // BLOCK_N * BLOCK_N)"},
            "does not see them all",
        ),
        Wrong(
            "right if BLOCK_N divides BLOCK_M",
            {"(pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)": "pid_m * BLOCK_M)"},
            "did not round down",
        ),
        Wrong(
            "a tile too early",
            {"(pid_m * BLOCK_M + 1) // BLOCK_N * BLOCK_N)": "tl.maximum(0, pid_m - 1) * BLOCK_M // BLOCK_N * BLOCK_N)"},
            "belongs to the part without one",
        ),
        Wrong("everything masked", {"full_n, end_n = seq_k // BLOCK_N * BLOCK_N": "full_n, end_n = 0"}, "without one"),
        Wrong("walks to the end", {"tl.minimum(end_n, (pid_m + 1) * BLOCK_M)": "seq_k"}, "where does the walk end?"),
        Wrong("past the keys", {"tl.minimum(end_n, (pid_m + 1) * BLOCK_M)": "(pid_m + 1) * BLOCK_M"}, "see none of"),
        Wrong(
            "strides exchanged",
            {"stride_k, stride_v, pid_m, 0,": "stride_v, stride_k, pid_m, 0,"},
            "as stride_k, which",
        ),
        Wrong(
            "strides of q",
            {"stride_k, stride_v, pid_m, full_n": "stride_q, stride_q, pid_m, full_n"},
            "as stride_k, which",
        ),
        Wrong(
            "the program's number", {"pid_m = tl.program_id(0) % tiles_m": "pid_m = tl.program_id(0)"}, "with pid_m ="
        ),
        Wrong(
            "the first walk's state lost",
            {
                "m_i, l_i, acc = walk(\n        m_i, l_i, acc, q, k_ptr, v_ptr, stride_k, stride_v, pid_m, 0,": (
                    "walk(\n        m_i, l_i, acc, q, k_ptr, v_ptr, stride_k, stride_v, pid_m, 0,"
                )
            },
            "given the state that the last one returned",
        ),
        Wrong("MASKED forgotten", {"IS_CAUSAL, True,\n": "IS_CAUSAL,\n"}, "missing a required argument: 'MASKED'"),
        Wrong("from 0 again", {"pid_m, full_n, end_n, seq_k": "pid_m, 0, end_n, seq_k"}, "belongs to the part without"),
    ],
    "cross_head_store": [
        Wrong("a block of two sides", {"[1, 1, block, head_dim]": "[block, head_dim]"}, "as many sides as the box"),
        Wrong("blocks of 32 rows", {"[1, 1, block, head_dim]": "[1, 1, 32, head_dim]"}, "tiles of 16 rows"),
        Wrong(
            "batch and head exchanged",
            {"desc.load([batch, head, start, 0])": "desc.load([head, batch, start, 0])"},
            "batch and head are exchanged",
        ),
        Wrong(
            "start forgotten", {"desc.load([batch, head, start, 0])": "desc.load([batch, head, 0, 0])"}, "does `start`"
        ),
        Wrong(
            "the last tile begins earlier",
            {
                f"desc.{call}([batch, head, start,": f"desc.{call}([batch, head, tl.minimum(start, seq - BLOCK),"
                for call in ("load", "store")
            },
            "begins earlier",
        ),
        Wrong(
            "the layout of k",
            {
                "return TensorDescriptor.from_tensor(t, [1, 1, block, head_dim])": (
                    "n = t.shape[2] * head_dim\n    return TensorDescriptor(t, list(t.shape), "
                    "[t.shape[1] * n, n, head_dim, 1], [1, 1, block, head_dim])"
                )
            },
            "the strides of k",
        ),
        Wrong("no reshape in the load", {".reshape(BLOCK, HEAD_DIM)": ""}, "do tiles pass through `.reshape`?"),
        Wrong(
            "no reshape in the store",
            {"tile.reshape(1, 1, BLOCK, HEAD_DIM)": "tile"},
            "do tiles pass through `.reshape`?",
        ),
        Wrong(
            "a row of the flat matrix",
            {"desc.store([batch, head, start,": "desc.store([batch, head, (batch * heads + head) * seq + start,"},
            "from the first one of its head",
        ),
        Wrong("a copy", {"from_tensor(t, [1": "from_tensor(t.clone(), [1"}, "must describe t itself"),
        Wrong("the first batch", {"from_tensor(t, [1": "from_tensor(t[:1], [1"}, "box and block are"),
        Wrong(
            "three axes, v is copied",
            {
                "from_tensor(t, [1, 1, block, head_dim])": (
                    "from_tensor(t.reshape(-1, t.shape[2], head_dim), [1, block, head_dim])"
                ),
                "desc.load([batch, head, start, 0])": "desc.load([batch * heads + head, start, 0])",
                "desc.store([batch, head, start, 0], tile.reshape(1, 1, BLOCK, HEAD_DIM))": (
                    "desc.store([batch * heads + head, start, 0], tile.reshape(1, BLOCK, HEAD_DIM))"
                ),
            },
            "it describes a copy",
        ),
        Wrong(
            "only the store",
            {
                "return desc.load([batch, head, start, 0]).reshape(BLOCK, HEAD_DIM)": (
                    "return desc.load([(batch * heads + head) * seq + start, 0])"
                ),
                "describe(q, block_m), describe(k, block_n), describe(v, block_n),": (
                    "*(TensorDescriptor.from_tensor(t.reshape(-1, head_dim), [b, head_dim]) for t, b in "
                    "((q, block_m), (k, block_n), (v, block_n))),"
                ),
            },
            "cross the border?",
        ),
        Wrong(
            "only the loads",
            {
                "desc.store([batch, head, start, 0], tile.reshape(1, 1, BLOCK, HEAD_DIM))": (
                    "desc.store([(batch * heads + head) * seq + start, 0], tile)"
                ),
                "describe(o, block_m),": "TensorDescriptor.from_tensor(o.view(-1, head_dim), [block_m, head_dim]),",
            },
            "hold what the last program of the head before it stored",
        ),
        Wrong(
            "only the loads, and zeros are stored past the end",
            {
                "desc.store([batch, head, start, 0], tile.reshape(1, 1, BLOCK, HEAD_DIM))": (
                    "past = start + tl.arange(0, BLOCK) >= seq\n"
                    "    desc.store([(batch * heads + head) * seq + start, 0], tl.where(past[:, None], 0.0, tile))"
                ),
                "describe(o, block_m),": "TensorDescriptor.from_tensor(o.view(-1, head_dim), [block_m, head_dim]),",
            },
            "rows past seq were zeroed before the store: your zeros lie over",
        ),
        Wrong(
            "another order of programs, the tail is overwritten in time",
            {
                "from_tensor(t, [1, 1, block, head_dim])": "from_tensor(t.reshape(-1, head_dim), [block, head_dim])",
                "return desc.load([batch, head, start, 0]).reshape(BLOCK, HEAD_DIM)": (
                    "return desc.load([(batch * heads + head) * seq + start, 0])"
                ),
                "desc.store([batch, head, start, 0], tile.reshape(1, 1, BLOCK, HEAD_DIM))": (
                    "desc.store([(batch * heads + head) * seq + start, 0], tile)"
                ),
                "pid_m = tl.program_id(0) // (batches * heads)": ("pid_m = tl.program_id(0) % tl.cdiv(seq_q, BLOCK_M)"),
                "pid_bh = tl.program_id(0) % (batches * heads)": (
                    "pid_bh = tl.program_id(0) // tl.cdiv(seq_q, BLOCK_M)"
                ),
            },
            "cross the border?",
        ),
    ],
    "fp8": [
        Wrong("a block of zeros", {"scales = torch.where(scales == 0, 1.0, scales)": "pass"}, "a block of zeros"),
        Wrong(
            "one scale",
            {"blocks.abs().amax(dim=(3, 4)) / LARGEST": "(t.abs().max() / LARGEST).expand(blocks.shape[:3]).float()"},
            "one scale for the whole tensor",
        ),
        Wrong(
            "the scale of 1e-43 is 0",
            {"torch.where(scales == 0, 1.0, scales)": "torch.where(blocks.abs().amax(dim=(3, 4)) == 0, 1.0, scales)"},
            "ask whether the scale is 0",
        ),
        Wrong(
            "t divided in place",
            {
                "    t8 = (blocks": (
                    "    t.div_(scales.repeat_interleave(BLOCK, dim=2)[:, :, :seq, None])\n    t8 = (blocks"
                )
            },
            "t has been changed",
            at_once=True,
        ),
        Wrong("t8 as a slice", {"[:, :, :seq].contiguous()": "[:, :, :seq]"}, "t8 is not contiguous", at_once=True),
        Wrong("448 forgotten", {"amax(dim=(3, 4)) / LARGEST": "amax(dim=(3, 4))"}, "448 is missing"),
        Wrong("multiplied", {"(blocks / scales[": "(blocks * scales["}, "t is multiplied by the scale"),
        Wrong("the scale of k forgotten", {" * tl.load(k_scales_ptr + pid_n)": ""}, "the scale of k is missing"),
        Wrong(
            "the scale of v forgotten",
            {"(tl.load(v_scales_ptr + pid_n) / 256.0)": "(1 / 256.0)"},
            "the scale of v is missing",
        ),
        Wrong(
            "s before the state",
            {"online_softmax_step(m_i, l_i, s)": "online_softmax_step(s, m_i, l_i)"},
            "takes m_i, l_i and s, in this order",
            kind="error",
        ),
        Wrong(
            "acc as a whole",
            {
                "(tl.load(v_scales_ptr + pid_n) / 256.0)": "(1 / 256.0)",
                "    store_tile(o_ptr": "    acc *= tl.load(v_scales_ptr + last - 1)\n    store_tile(o_ptr",
            },
            "of the last block of v",
        ),
        Wrong(
            "the scale of v on all of acc",
            {
                "acc = acc * alpha[:, None] + pv * (tl.load(v_scales_ptr + pid_n) / 256.0)": (
                    "acc = (acc * alpha[:, None] + pv / 256.0) * tl.load(v_scales_ptr + pid_n)"
                )
            },
            "not to what acc holds already",
        ),
        Wrong("1 / sqrt(head_dim) forgotten", {"scale_s = scale * ": "scale_s = "}, "1 / sqrt(head_dim), is missing"),
        Wrong(
            "the mask before the scale",
            {
                'tl.where(visible, tl.dot(q, tl.trans(k)) * scale_s, float("-inf"))': (
                    'tl.where(visible, tl.dot(q, tl.trans(k)), float("-inf")) * scale_s'
                )
            },
            "Is the mask there before the scale?",
        ),
        Wrong("its own scale", {"scale_s = scale *": "scale_s = 1 / tl.sqrt(HEAD_DIM * 1.0) *"}, "`scale` is ignored"),
        Wrong("the scale twice", {"scale_s = scale *": "scale_s = scale * scale *"}, "is multiplied twice"),
        Wrong(
            "divided by the scale",
            {"scale_s = scale *": "scale_s = 1 / scale *"},
            "divided by the scale of the softmax",
        ),
        Wrong(
            "the scale of v in P",
            {
                "(256.0 * p)": "(256.0 * p * tl.load(v_scales_ptr + pid_n))",
                "(tl.load(v_scales_ptr + pid_n) / 256.0)": "(1 / 256.0)",
            },
            "P times the scale of v is 0 in eight bits",
        ),
        Wrong(
            "the scale of v in V, fp16",
            {
                "tl.dot((256.0 * p).to(v.dtype), v)": (
                    "tl.dot((256.0 * p).to(tl.float16), (v.to(tl.float32) * "
                    "tl.load(v_scales_ptr + pid_n)).to(tl.float16))"
                ),
                "(tl.load(v_scales_ptr + pid_n) / 256.0)": "(1 / 256.0)",
            },
            "P V is not a product of eight bits",
        ),
        Wrong(
            "P in fp16",
            {"tl.dot((256.0 * p).to(v.dtype), v)": "tl.dot((256.0 * p).to(tl.float16), v.to(tl.float16))"},
            "P V is not a product of eight bits",
            at_once=True,
        ),
        Wrong(
            "P as it is",
            {"(256.0 * p)": "p", "(tl.load(v_scales_ptr + pid_n) / 256.0)": "tl.load(v_scales_ptr + pid_n)"},
            "weights below 2^-10 of the largest are lost",
            at_once=True,
        ),
        Wrong(
            "P above 448",
            {"256.0 * p": "512.0 * p", "pid_n) / 256.0": "pid_n) / 512.0"},
            "more than 448, where e4m3 ends",
        ),
        Wrong(
            "P above 448, in the row sum too",
            {
                "m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)": (
                    "before = l_i\n        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)\n"
                    "        l_i = before * alpha + tl.sum((512.0 * p).to(v.dtype).to(tl.float32), 1) / 512.0"
                ),
                "256.0 * p": "512.0 * p",
                "pid_n) / 256.0": "pid_n) / 512.0",
            },
            "and the row sum is of what is left",
        ),
        Wrong("not divided", {"pid_n) / 256.0": "pid_n)"}, "the product is to be divided by"),
        Wrong("rows become longer", {"@ hadamard / columns**0.5": "@ hadamard"}, "divide by sqrt(head_dim)"),
        Wrong("without signs", {"(t.float() * signs.to(t.device))": "t.float()"}, "the signs belong before H"),
        Wrong(
            "signs behind H",
            {
                "(t.float() * signs.to(t.device)) @ hadamard / columns**0.5": (
                    "t.float() @ hadamard * signs.to(t.device) / columns**0.5"
                )
            },
            "the signs belong before H",
        ),
        Wrong(
            "other signs in each call",
            {", generator=torch.Generator().manual_seed(0)": ""},
            "two calls rotate in two ways",
        ),
        Wrong("no minus", {"[hadamard, -hadamard]": "[hadamard, hadamard]"}, "M M^T is not 1"),
        Wrong("signs alone", {"@ hadamard / columns**0.5": "* 1.0"}, "spread over all columns"),
        Wrong("fp16 stays", {"t.float() * signs.to(t.device)": "t * signs.to(t)"}, "", kind="error"),
        Wrong("q alone", {"q, k = rotated(q), rotated(k)": "q = rotated(q)"}, "q is rotated and k is not"),
        Wrong("k alone", {"q, k = rotated(q), rotated(k)": "k = rotated(k)"}, "k is rotated and q is not"),
        Wrong(
            "v too",
            {"q, k = rotated(q), rotated(k)": "q, k, v = rotated(q), rotated(k), rotated(v)"},
            "v is rotated too",
        ),
        Wrong("nothing is rotated", {"q, k = rotated(q), rotated(k)": "pass"}, "rotate=True changes nothing"),
        Wrong(
            "rounded, rotated, rounded",
            {
                "q, k = rotated(q), rotated(k)": (
                    "q, k = (rotated(c.float() * s.repeat_interleave(BLOCK, dim=2)[:, :, : c.shape[2], None]) "
                    "for c, s in (quantize(q), quantize(k)))"
                )
            },
            "q and k are rounded before they are rotated",
        ),
        Wrong(
            "codes are rotated",
            {
                "q, k = rotated(q), rotated(k)": (
                    "(q8, sq), (k8, sk) = quantize(q), quantize(k)\n"
                    "        q8, k8 = rotated(q8).to(FP8), rotated(k8).to(FP8)\n"
                    "        return attention_quantized(q8, sq, k8, sk, *quantize(v), is_causal, scale)"
                )
            },
            "codes are rotated",
        ),
        Wrong(
            "the scale of q in Q, fp16",
            {
                "scale_s = scale * tl.load(q_scales_ptr + pid_m)": "scale_s = scale",
                "tl.dot(q, tl.trans(k))": (
                    "tl.dot((q.to(tl.float32) * tl.load(q_scales_ptr + pid_m)).to(tl.float16), "
                    "tl.trans(k).to(tl.float16))"
                ),
            },
            "is what holds a scale fp32?",
        ),
        Wrong(
            "acc in fp16",
            {
                "acc * alpha[:, None] + pv * (tl.load(v_scales_ptr + pid_n) / 256.0)": (
                    "(acc * alpha[:, None] + pv * (tl.load(v_scales_ptr + pid_n) / 256.0)).to(tl.float16)"
                    ".to(tl.float32)"
                )
            },
            "is what holds a scale fp32?",
        ),
        Wrong("small is 0", {"scales == 0,": "scales < 1e-6,"}, "not one of small numbers"),
        Wrong("no absolute values", {"blocks.abs().amax": "blocks.amax"}, "the largest |element| counts"),
        Wrong(
            "no rows",
            {"    seq = t.shape[2]\n    padded": "    seq = t.shape[2]\n    t[0, 0, 0]\n    padded"},
            "quantize, seq 0",
        ),
        Wrong(
            "scales not contiguous",
            {".contiguous(), scales": ".contiguous(), scales.mT.contiguous().mT"},
            "expected scales in torch.float32, contiguous",
        ),
        Wrong("no alpha", {"acc = acc * alpha[:, None]": "acc = acc"}, "not rescaled by alpha"),
        Wrong(
            "no mask",
            {'tl.where(visible, tl.dot(q, tl.trans(k)) * scale_s, float("-inf"))': "tl.dot(q, tl.trans(k)) * scale_s"},
            "`visible` is missing",
        ),
        Wrong("the scale of q by keys", {"q_scales_ptr + pid_m)": "q_scales_ptr + pid_n)"}, "block of queries, pid_m"),
        Wrong("the scale of k by queries", {"k_scales_ptr + pid_n)": "k_scales_ptr + pid_m)"}, "scale of k is that of"),
        Wrong("the scale of v by queries", {"v_scales_ptr + pid_n)": "v_scales_ptr + pid_m)"}, "scale of v is that of"),
        Wrong(
            "the scales exchanged",
            {
                "load(k_scales_ptr + pid_n)": "load(v_scales_ptr + pid_n) ",
                "load(v_scales_ptr + pid_n) /": "load(k_scales_ptr + pid_n) /",
            },
            "k and v are exchanged",
        ),
        Wrong("the first scale of q", {"q_scales_ptr + pid_m)": "q_scales_ptr)"}, "every tile of q has the scale"),
    ],
    "add_tiles": [
        Wrong(
            "an arrival for each tile",
            {
                "    mbarrier.expect(full, 2 * x_desc.block_type.nbytes)\n": (
                    "    mbarrier.expect(full, x_desc.block_type.nbytes)\n"
                    "        mbarrier.expect(full, y_desc.block_type.nbytes)\n"
                )
            },
            "counts one arrival in a phase, and gets 2 in 1",
        ),
        Wrong("one tile's bytes", {"2 * x_desc": "x_desc"}, "the copies bring 4096"),
        Wrong("bytes that never come", {"2 * x_desc": "3 * x_desc"}, "6144 bytes are announced"),
        Wrong("no wait", {"        mbarrier.wait(full, i & 1)\n": ""}, "Nobody waits for `full`"),
        Wrong("parity 1", {"i & 1": "1"}, "A fresh barrier lets parity 1 pass"),
        Wrong("parity 0", {"i & 1": "0"}, "Waits name parities 0, 0, 0: tile i ends phase i"),
        Wrong("no fence", {"REGISTERS))\n        fence_async_shared()\n": "REGISTERS))\n"}, "without a fence"),
        Wrong("it ends too early", {"        tma.store_wait(0)\n": ""}, "still reads the program's shared memory"),
        Wrong(
            "the next tile of x comes too early",
            {"        tma.store_wait(0)\n": "        if i == tiles - 1:\n            tma.store_wait(0)\n"},
            "the copy into x of program 0 writes to x while the copy out of x of program 0 is under way",
        ),
        Wrong("only x", {"x.load(REGISTERS) + y.load(REGISTERS)": "x.load(REGISTERS)"}, "row 0 is x"),
        Wrong("all programs have the first tiles", {"gl.program_id(0) * tiles + i": "i"}, "is NaN"),
    ],
    "write_producer": [
        Wrong(
            "a tile that is always counted",
            {"work.after(tile)": 'gl.num_programs(0) + gl.atomic_add(work.taken_ptr, 1, sem="relaxed")'},
            "the next tile is work.after(tile)",
        ),
        Wrong(
            "the readers' parity",
            {"kv_empty.index(slot), parity ^ 1)": "kv_empty.index(slot), parity)"},
            "a fresh barrier lets parity 1 pass",
        ),
        Wrong(
            "no wait for room",
            {"            mbarrier.wait(memory.kv_empty.index(slot), parity ^ 1)\n": ""},
            "produce waits 0 times at kv_empty[0]",
        ),
        Wrong(
            "an arrival for keys and one for values",
            {
                "                mbarrier.expect(full, 2 * work.k.block_type.nbytes)\n": (
                    "                mbarrier.expect(full, work.k.block_type.nbytes)\n"
                    "                mbarrier.expect(full, work.v.block_type.nbytes)\n"
                )
            },
            "each `expect` is one, with all bytes of its tiles",
        ),
        Wrong(
            "bytes that never come",
            {
                "            if (step == 0) | (step == tiles_n):\n"
                "                mbarrier.expect(full, work.k.block_type.nbytes)\n"
                "            else:\n"
                "                mbarrier.expect(full, 2 * work.k.block_type.nbytes)\n": (
                    "            mbarrier.expect(full, 2 * work.k.block_type.nbytes)\n"
                )
            },
            "its phase ends when all announced bytes have come",
        ),
        Wrong(
            "keys and values of one step in each pair",
            {
                "range(tiles_n + 1)": "range(tiles_n)",
                "if (step == 0) | (step == tiles_n)": "if tiles_n < 0",
                "            if step > 0:\n                right = start_n + BLOCK_N": (
                    "            if step < tiles_n:\n                right = start_n"
                ),
            },
            "2 pairs are sent, where 3 are right: each turn has tiles_n + 1",
        ),
        Wrong(
            "values of the same step",
            {"right = start_n + BLOCK_N": "right = start_n"},
            "copied, not needed: v of head 0, batch 0, from row -64 on",
        ),
        Wrong(
            "the queries' head",
            {"[b, h_kv, start_n, 0]": "[b, h, start_n, 0]"},
            "copied, not needed: k of head 2, batch 0, from row 0 on",
        ),
        Wrong("all consumers have the first's queries", {"row + c * ROWS": "row"}, "needed, not copied: q of head"),
        Wrong(
            "from the first tile to the last",
            {
                "(tiles_n - 1 - step) * BLOCK_N": "step * BLOCK_N",
                "right = start_n + BLOCK_N": "right = start_n - BLOCK_N",
            },
            "k from row 0 on is sent where k from row 64 on is due: from the last tile to the first",
        ),
        Wrong(
            "queries come before their place is free",
            {
                "        mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)\n"
                "        announce(memory, side, tile)\n        q_full": (
                    "        announce(memory, side, tile)\n        q_full"
                )
            },
            "produce waits 1 times at q_empty[",
        ),
        Wrong(
            "places of queries change their lap every turn",
            {
                "turn // 2 & 1 ^ 1)\n        announce(memory, side, tile)\n        q_full": (
                    "turn & 1 ^ 1)\n        announce(memory, side, tile)\n        q_full"
                )
            },
            "a side is used every second turn",
        ),
        Wrong(
            "the tile's number comes after the arrival",
            {
                "        announce(memory, side, tile)\n        q_full": "        q_full",
                "work.q.block_type.nbytes)\n": "work.q.block_type.nbytes)\n        announce(memory, side, tile)\n",
            },
            "has stored and not arrived at a barrier since",
        ),
        Wrong(
            "the tile's number is forgotten",
            {"        announce(memory, side, tile)\n        q_full": "        q_full"},
            "where nobody has stored anything",
        ),
        Wrong(
            "each pair is waited for",
            {"            pair += 1\n": "            mbarrier.wait(full, parity)\n            pair += 1\n"},
            "and there is room for",
        ),
        Wrong(
            "queries are waited for",
            {"        for step in range": "        mbarrier.wait(q_full, turn // 2 & 1)\n        for step in range"},
            "and there is room for",
        ),
        Wrong(
            "nobody is told that there is no more",
            {"    mbarrier.arrive(memory.q_full.index(side), count=1)\n": ""},
            "consumers wait for the others, or for the end",
        ),
        Wrong(
            "no announcement at the end",
            {
                "    side = turn % 2\n    mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)\n"
                "    announce(memory, side, tile)\n    mbarrier.arrive(memory.q_full.index(side), count=1)\n": ""
            },
            "no announcement at the end",
        ),
        Wrong(
            "the end is announced before its place is free",
            {
                "    mbarrier.wait(memory.q_empty.index(side), turn // 2 & 1 ^ 1)\n    announce(memory, side, tile)\n"
                "    mbarrier.arrive": "    announce(memory, side, tile)\n    mbarrier.arrive"
            },
            "are right, once for each filling",
        ),
        Wrong(
            "keys and values in every pair",
            {
                "            if (step == 0) | (step == tiles_n):\n"
                "                mbarrier.expect(full, work.k.block_type.nbytes)\n"
                "            else:\n"
                "                mbarrier.expect(full, 2 * work.k.block_type.nbytes)\n": (
                    "            mbarrier.expect(full, 2 * work.k.block_type.nbytes)\n"
                ),
                "            if step < tiles_n:\n": "            if True:\n",
                "            if step > 0:\n": "            if True:\n",
            },
            "tiles are copied into shared memory, where",
        ),
        Wrong(
            "the course's own producer",
            {
                "import ROWS, tma\n": ("import ROWS, tma\nfrom phase5_tuning.hopper.forward import _fetch_pair\n"),
                "            pair += 1\n": (
                    "            pair += 1\n            if tile < 0:\n                _fetch_pair()\n"
                ),
            },
            "calls _fetch_pair of hopper_forward",
        ),
        Wrong(
            "bytes that only the kernel knows",
            {
                "            if (step == 0) | (step == tiles_n):\n"
                "                mbarrier.expect(full, work.k.block_type.nbytes)\n"
                "            else:\n"
                "                mbarrier.expect(full, 2 * work.k.block_type.nbytes)\n": (
                    "            tiles = gl.where((step == 0) | (step == tiles_n), 1, 2)\n"
                    "            mbarrier.expect(full, tiles * work.k.block_type.nbytes)\n"
                )
            },
            "nbytes must be known when the kernel is compiled",
            "error",
        ),
    ],
    "barrier_phases": [
        Wrong("the chapter's parities", {"return lap & 1, lap & 1\n": "return lap & 1 ^ 1, lap & 1\n"}, "its phase 0"),
        Wrong("exchanged", {"return lap & 1, lap & 1\n": "return lap & 1, lap & 1 ^ 1\n"}, "lets parity 1 pass"),
        Wrong("both late", {"return lap & 1, lap & 1\n": "return lap & 1 ^ 1, lap & 1 ^ 1\n"}, "lets parity 1 pass"),
        Wrong("always the first lap's", {"return lap & 1, lap & 1\n": "return 0, 0\n"}, "both parities change"),
        Wrong("anew with each walk", {"number = sum(lengths[:walk]) + tile": "number = tile"}, "does not begin anew"),
        Wrong("laps of the walk", {", number // stages": ", tile // stages"}, "does not begin anew"),
        Wrong("the walk as lap", {", number // stages": ", walk"}, "not one walk"),
        Wrong("two slots", {"return number % stages": "return number % 2"}, "whatever the parity"),
        Wrong("the lap as slot", {"return number % stages": "return number // stages"}, "modulo the number of slots"),
        Wrong("a list", {"return number % stages, number // stages": "return [number, 0]"}, "expected a pair of ints"),
        Wrong("phases", {"return lap & 1, lap & 1\n": "return lap, lap\n"}, "each 0 or 1, got (2, 2)"),
        Wrong(
            "waits for the producer's barrier",
            {WAIT_AND_ARRIVE: f"yield wait(ring.empty[i], full_parity){LINE}yield arrive(ring.empty[i]){LINE}# end"},
            "the producer's to wait for",
        ),
        Wrong(
            "another phase for unseen tiles",
            {WAIT_AND_ARRIVE: f"yield wait(ring.full[i], full_parity ^ 1){LINE}yield arrive(ring.empty[i]){LINE}# end"},
            "in the same phase as one that is",
        ),
        Wrong(
            "not let go",
            {"yield arrive(ring.empty[i])\n                # end": "pass\n                # end"},
            "`empty` counts the arrivals of all of them",
        ),
        Wrong(
            "let go before it is there",
            {"yield wait(ring.full[i], full_parity)\n                yield arrive": "yield arrive"},
            "lets go of a tile that has not arrived",
        ),
        Wrong("skipped", {WAIT_AND_ARRIVE: f"continue{LINE}# end"}, "`empty` counts the arrivals of all of them"),
        Wrong(
            "let go first",
            {WAIT_AND_ARRIVE: f"yield arrive(ring.empty[i]){LINE}yield wait(ring.full[i], full_parity){LINE}# end"},
            "First comes the wait",
        ),
    ],
    "fit_hopper": [
        Wrong("queries of one tile", {"q = 2 * consumers": "q = consumers"}, "queries of two tiles are held"),
        Wrong("the producer left out", {"128 * (consumers + 1)": "128 * consumers"}, "the producer's warpgroup"),
        Wrong(
            "too many registers", {"CONSUMER_REGISTERS=240": "CONSUMER_REGISTERS=248"}, "a multiple of 8 from 24 to 240"
        ),
        Wrong("not rounded", {" // 8 * 8": ""}, "round down to a multiple of 8"),
        Wrong("the producer as one warp", {"128 * (consumers + 1)": "(128 * consumers + 32)"}, "counts as four warps"),
        Wrong(
            "elements", {"64 * head_dim * 2\n": "64 * head_dim\n", "128 * head_dim * 2\n": "128 * head_dim\n"}, "elem"
        ),
        Wrong("keys alone", {"stages * 2 * 128": "stages * 128"}, "a tile of keys and one of values"),
        Wrong("more than there are", {"PRODUCER_REGISTERS=24": "PRODUCER_REGISTERS=40"}, "were shared out at launch"),
        Wrong("three stages", {"STAGES=2": "STAGES=3"}, "65536 for each stage"),
        Wrong("one stage", {"STAGES=2": "STAGES=1"}, "no tile is under way while the one before is in use"),
        Wrong(
            "two consumers without overlap",
            {
                "CONSUMERS=3, STAGES=4, OVERLAP=False, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32": (
                    "CONSUMERS=2, STAGES=4, OVERLAP=False, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24"
                )
            },
            "a kernel with three consumers fits, too",
        ),
        Wrong(
            "two consumers with overlap",
            {
                "CONSUMERS=3, STAGES=4, OVERLAP=False, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32": (
                    "CONSUMERS=2, STAGES=4, OVERLAP=True, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24"
                )
            },
            "a kernel with three consumers fits, too",
        ),
        Wrong("no overlap", {"OVERLAP=True": "OVERLAP=False"}, "a kernel with OVERLAP fits, too"),
        Wrong("three consumers overlap", {"OVERLAP=False": "OVERLAP=True"}, "+ 32 (P in 16 bits) = 128 of the 160"),
        Wrong(
            "three consumers at head_dim 128",
            {
                "CONSUMERS=2, STAGES=2, OVERLAP=True, CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24": (
                    "CONSUMERS=3, STAGES=2, OVERLAP=False, CONSUMER_REGISTERS=160, PRODUCER_REGISTERS=32"
                )
            },
            "= 160 of the 160",
        ),
    ],
    "overlap_loop": [
        Wrong(
            "both products are waited for",
            {"wait_products(1 if j > 0 else 0)": "wait_products(0)"},
            "no product is under way during the exponentials of tile 1: PV0 is done already",
        ),
        Wrong(
            "P V before S",
            {
                "            yield me.s(j)\n": "",
                "            yield wait_products(1": "            yield me.s(j)\n            yield wait_products(1",
            },
            "S waits for a V that it does not need",
        ),
        Wrong(
            "acc is touched too early",
            {
                "            yield from me.softmax(j)\n": (
                    "            yield from me.softmax(j)\n            yield me.rescale(j)\n"
                ),
                "        if j < tiles:\n            yield me.rescale(j)\n": "",
            },
            "touches acc and the P in 16 bits, while PV0 is still under way",
        ),
        Wrong(
            "K is held for long",
            {
                "            yield arrive(me.k.empty[slot])\n            yield from me.softmax(j)\n": (
                    "            yield from me.softmax(j)\n            yield arrive(me.k.empty[slot])\n"
                )
            },
            "K0 is held during the exponentials of tile 0",
        ),
        Wrong(
            "K is let go while S reads it",
            {"            yield me.s(j)\n": "            yield me.s(j)\n            yield arrive(me.k.empty[slot])\n"},
            "K0 is let go before S0 is done",
        ),
        Wrong(
            "V is let go while it is read",
            {
                "            yield wait_products(0)\n            yield arrive(me.v.empty[before])\n": (
                    "            yield arrive(me.v.empty[before])\n            yield wait_products(0)\n"
                )
            },
            "V0 is let go before PV0 is done",
        ),
        Wrong(
            "the same parity in every lap",
            {"            yield wait(me.k.full[slot], parity)": "            yield wait(me.k.full[slot], 0)"},
            "passes at once, before K1 is",
        ),
        Wrong(
            "a generator is yielded",
            {"            yield from me.softmax(j)": "            yield me.softmax(j)"},
            "yield from me.softmax(j)",
        ),
        Wrong("the last P V is missing", {"range(tiles + 1)": "range(tiles)"}, "PV0 is missing"),
        Wrong(
            "S is not waited for",
            {"            yield wait_products(1 if j > 0 else 0)\n            yield arrive(me.k.empty[slot])\n": ""},
            "reads S0, whose product is still under way",
        ),
        Wrong(
            "V is never let go",
            {"            yield arrive(me.v.empty[before])\n": ""},
            "V0 is never let go: no arrival at me.v.empty[0]",
        ),
        Wrong(
            "V is not waited for",
            {"            yield wait(me.v.full[before], parity_before)\n": ""},
            "PV0 reads V0, which has not been waited for",
        ),
        Wrong(
            "V of the wrong tile",
            {"before, parity_before = me.v.slot(j - 1)": "before, parity_before = me.v.slot(j)"},
            "passes at once, before V0 is there",
        ),
        Wrong(
            "S of the next tile is started early",
            {
                "            yield me.s(j)\n        if j > 0:\n            yield wait(me.v": (
                    "            yield me.s(j)\n        if j + 1 < tiles and len(me.k.full) > 1:\n"
                    "            yield wait(me.k.full[me.k.slot(j + 1)[0]], me.k.slot(j + 1)[1])\n"
                    "            yield me.s(j + 1)\n        if j > 0:\n            yield wait(me.v"
                )
            },
            "there are registers for one S",
        ),
        Wrong(
            "started, not waited for at the end",
            {"            yield wait_products(0)\n": "            yield wait_products(0 if j < tiles else 1)\n"},
            "V0 is let go before PV0 is done",
        ),
        Wrong(
            "waits for the producer",
            {"            yield wait(me.k.full[slot]": "            yield wait(me.k.empty[slot]"},
            "waits at full barriers",
        ),
    ],
    "write_dq": [
        Wrong(
            "nobody waits for the turn",
            {"            await_count(count_ptr, before)\n": "            pass\n"},
            "before its turn: others may not have added yet",
        ),
        Wrong(
            "waits for one program more",
            {"await_count(count_ptr, before)": "await_count(count_ptr, before + 1)"},
            "the count of tile 5 is 1, where 0 programs add to tile 5 before",
        ),
        Wrong(
            "the first adds too",
            {"if ORDERED and before == 0:": "if ORDERED and before < 0:"},
            "Nobody has filled the sum with zeros: it must store",
        ),
        Wrong(
            "the second stores too",
            {"if ORDERED and before == 0:": "if ORDERED and before <= 1:"},
            "over what others have added. Only the first program stores",
        ),
        Wrong(
            "in any order the first stores",
            {"if ORDERED and before == 0:": "if before == 0:"},
            "in any order, step 0, number 0 at its tile: it stores dq[0] over what others have added",
        ),
        Wrong(
            "in any order the count is awaited",
            {"        if ORDERED:\n            await_count(": "        if True:\n            await_count("},
            "In any order nobody counts",
        ),
        Wrong(
            "in any order it counts",
            {"        if ORDERED:\n            release_count(": "        if True:\n            release_count("},
            "In any order nobody reads the count",
        ),
        Wrong(
            "the places go before they are read",
            {"        tma.store_wait(0)\n": ""},
            "it lets dq_empty[0] go before the copy has read the part",
            at_once=True,
        ),
        Wrong(
            "the places go before the wait for the copies",
            {
                "        tma.store_wait(0)\n": "",
                "        mbarrier.arrive(memory.dq_empty.index(2 * ME + 1))\n": (
                    "        mbarrier.arrive(memory.dq_empty.index(2 * ME + 1))\n        tma.store_wait(0)\n"
                ),
            },
            "it lets dq_empty[0] go before the copy has read the part",
        ),
        Wrong(
            "the places go after the count, which waits for more",
            {
                "        tma.store_wait(0)\n": (
                    "        if ORDERED:\n            release_count(count_ptr)\n        else:\n"
                    "            tma.store_wait(0)\n"
                ),
                "1))\n        if ORDERED:\n            release_count(count_ptr)\n        # end": "1))\n        # end",
            },
            "it lets dq_empty[0] go only when its sum has arrived",
        ),
        Wrong(
            "the newest copy is not waited for",
            {"        tma.store_wait(0)\n": "        tma.store_wait(1)\n"},
            "it lets dq_empty[0] go before the copy has read the part",
        ),
        Wrong(
            "one part is not waited for",
            {"        mbarrier.wait(memory.dq_full.index(2 * ME + 1), parity)\n": ""},
            "it copies dq[1] before it has waited at dq_full[1]",
        ),
        Wrong(
            "waits for a place, not for a part",
            {
                "mbarrier.wait(memory.dq_full.index(2 * ME + 1), parity)": (
                    "mbarrier.wait(memory.dq_empty.index(2 * ME + 1), parity)"
                )
            },
            "dq_empty[1] is where a consumer waits",
        ),
        Wrong("the parity of all steps", {"step // WRITERS & 1": "step & 1"}, "That phase is over"),
        Wrong("parity 0 in all laps", {"step // WRITERS & 1": "0"}, "That phase is over"),
        Wrong(
            "the other parity",
            {"step // WRITERS & 1": "step // WRITERS & 1 ^ 1"},
            "with parity 1. A fresh barrier lets parity 1 pass",
        ),
        Wrong(
            "the places of the other writer",
            {"first = memory.dq.index(2 * ME)": "first = memory.dq.index(0)"},
            "dq[0] is the other writer's: this one has places 2 and 3",
        ),
        Wrong(
            "the places never go",
            {"        mbarrier.arrive(memory.dq_empty.index(2 * ME + 1))\n": ""},
            "nobody has let dq_empty[1] go",
        ),
        Wrong(
            "arrives where the consumers do",
            {"mbarrier.arrive(memory.dq_empty.index(2 * ME))": "mbarrier.arrive(memory.dq_full.index(2 * ME))"},
            "dq_full[0] is for the consumers to arrive at",
        ),
        Wrong(
            "nobody says that it has added",
            {"            release_count(count_ptr)\n": "            pass\n"},
            "the next one waits for ever",
        ),
        Wrong(
            "says so before it has added",
            {
                "        if ORDERED:\n            release_count(count_ptr)\n": "",
                "        if ORDERED and before == 0:\n": (
                    "        if ORDERED:\n            release_count(count_ptr)\n        if ORDERED and before == 0:\n"
                ),
            },
            "it says that it has added before it has copied both parts",
        ),
        Wrong(
            "says so between the parts",
            {
                "        if ORDERED:\n            release_count(count_ptr)\n": (
                    "        if ORDERED and before == 0:\n            release_count(count_ptr)\n"
                ),
                "            tma_add(work.dq_sum, [row_1, column_1], second)\n": (
                    "            if ORDERED:\n                release_count(count_ptr)\n"
                    "            tma_add(work.dq_sum, [row_1, column_1], second)\n"
                ),
            },
            "it says that it has added before it has copied both parts",
        ),
        Wrong(
            "the second half stands where the first does",
            {"        row_1 = row_0 + work.BLOCK_M - ROWS\n": "        row_1 = row_0\n"},
            "dq[1] goes to row and column [640, 0], where [704, 0] is right",
        ),
        Wrong(
            "the course's own writer",
            {
                "release_count, tma, tma_add\n": (
                    "release_count, tma, tma_add\nfrom phase5_tuning.hopper.backward import _write\n"
                ),
                "        if ORDERED:\n            release_count": (
                    "        if step < 0:\n            _write(work, memory, ORDERED, ME)\n"
                    "        if ORDERED:\n            release_count"
                ),
            },
            "write calls _write of hopper_backward",
        ),
    ],
    "order_dq": [
        Wrong(
            "as shipped",
            {
                "return ticket\n": "return tiles_n - 1 - ticket\n",
                "lowest = max(0, m * block_m - window + 1) // block_n": (
                    "last = min(tiles_n - 1, ((m + 1) * block_m - 1) // block_n)"
                ),
                "return n - lowest": "return last - n",
            },
            "Which of the two is nearer",
        ),
        Wrong(
            "high keys add first",
            {
                "lowest = max(0, m * block_m - window + 1) // block_n": (
                    "last = min(tiles_n - 1, ((m + 1) * block_m - 1) // block_n)"
                ),
                "return n - lowest": "return last - n",
            },
            "gives out key tiles [0, 1] in this order, but at query tile 1, for example, order lets [1, 0] add",
        ),
        Wrong(
            "high keys begin first",
            {"return ticket\n": "return tiles_n - 1 - ticket\n"},
            "gives out key tiles [1, 0] in this order, but at query tile 1, for example, order lets [0, 1] add",
        ),
        Wrong("all tiles of keys", {"return n - lowest": "return n"}, "count from the lowest"),
        Wrong(
            "before the first key",
            {"max(0, m * block_m - window + 1)": "(m * block_m - window + 1)"},
            "No tile of keys stands before tile 0",
        ),
        Wrong(
            "the tile's last query",
            {"max(0, m * block_m - window + 1)": "max(0, (m + 1) * block_m - window)"},
            "by the tile's first query",
        ),
        Wrong("one key too many", {"- window + 1)": "- window)"}, "A query's own key is one of the window"),
        Wrong("two keys too few", {"- window + 1)": "- window + 2)"}, "not i - window + 2"),
        Wrong(
            "the window in whole tiles",
            {"max(0, m * block_m - window + 1) // block_n": "max(0, m * block_m // block_n - window // block_n)"},
            "A window need not begin where a tile does",
        ),
        Wrong(
            "sizes exchanged",
            {"max(0, m * block_m - window + 1) // block_n": "max(0, m * block_n - window + 1) // block_m"},
            "block_m queries, and a tile of keys",
        ),
        Wrong(
            "past the last tile",
            {
                "lowest = max(0, m * block_m - window + 1) // block_n": "last = ((m + 1) * block_m - 1) // block_n",
                "return n - lowest": "return last - n",
            },
            "may lie past the last tile",
        ),
        Wrong("nobody waits", {"return n - lowest": "return 0"}, "the same number"),
        Wrong("two windows", {"- window + 1)": "- 2 * window + 1)"}, "expected each of 0 to 0 once"),
        Wrong("a tile twice", {"return ticket\n": "return ticket // 2\n"}, "each tile must be there once"),
        Wrong("floats", {"return n - lowest": "return (n - lowest) / 1"}, "expected an int"),
    ],
    "read_profile": [
        Wrong("all warps on a scheduler", {"warps / 4": "warps"}, "a quarter of the warps"),
        Wrong("a scheduler's clocks", {"profile.warps / 4 /": "1 /"}, "two instructions of a scheduler"),
        Wrong("a scheduler that always issues", {'/ 4 / profile.busy["schedulers"]': "/ 4"}, "issued in each"),
        Wrong(
            "instructions in a clock",
            {'profile.warps / 4 / profile.busy["schedulers"]': 'profile.busy["schedulers"] / (profile.warps / 4)'},
            "upside down",
        ),
        Wrong("more than 80 %", {"share >= 0.8": "share > 0.8"}, "at 80 % a unit is the limit"),
        Wrong("the busiest unit always", {"share >= 0.8": "share >= 0.0"}, "no unit has 80 %"),
        Wrong(
            "every unit a step",
            {"profile.busy[step] for step in STEPS) < 0.9": "profile.busy.values()) < 0.9"},
            "no step is at work",
        ),
        Wrong("waiting at 90 %", {"< 0.9": "<= 0.9"}, "from 90 % on"),
        Wrong("never waiting", {"< 0.9": "< 0.0"}, "no step is at work"),
        Wrong(
            "steps alone can be the limit",
            {
                "max((share, unit) for unit, share in profile.busy.items())": (
                    "max((profile.busy[unit], unit) for unit in STEPS)"
                )
            },
            "a unit is the limit from 80 % on",
        ),
        Wrong("a gain upside down", {"1 / max(share": "max(share"}, "upside down"),
        Wrong("units as they were", {"(1 - less.get(unit, 0.0)) for": "1 for"}, "only the work that does not go"),
        Wrong(
            "steps alone bound",
            {
                "max(share * (1 - less.get(unit, 0.0)) for unit, share in profile.busy.items())": (
                    "max(profile.busy[unit] * (1 - less.get(unit, 0.0)) for unit in STEPS)"
                )
            },
            "bound the clocks, too",
        ),
        Wrong(
            "one after the other bounds",
            {"return 1 / max(share": "return work_alone(profile, less) or (share"},
            "more may",
        ),
        Wrong(
            "every unit saves",
            {
                "profile.busy[step] * less.get(step, 0.0) for step in STEPS": (
                    "profile.busy[unit] * less[unit] for unit in less"
                )
            },
            "only what goes of the three steps",
        ),
        Wrong("shares of shares", {"profile.busy[step] * less.get": "less.get"}, "of the unit's clocks"),
        Wrong(
            "all overlaps", {"return 1 / (1 - sum(": "return at_most(profile, less) or (1 - sum("}, "all else overlaps"
        ),
        Wrong("what is left", {"1 / (1 - sum(": "(1 - sum("}, "upside down"),
        Wrong(
            "named units alone bound",
            {
                "max(share * (1 - less.get(unit, 0.0)) for unit, share in profile.busy.items())": (
                    "max((profile.busy[unit] * (1 - less[unit]) for unit in less), default=max(profile.busy.values()))"
                )
            },
            "not named keep all",
        ),
        Wrong("those that can", {"< wanted": ">= wanted"}, "these can gain as much"),
        Wrong("those that gain just as much", {"< wanted": "<= wanted"}, "just as much as is wanted is not ruled out"),
        Wrong("sorted", {"return [name": "return sorted([name", "< wanted]": "< wanted])"}, "order of changes"),
    ],
    "merge_ranks": [
        Wrong("lse in 16 bits", {"    lse.copy_(both)": "    lse.copy_(both.half())"}, "both lse are fp32"),
        Wrong(
            "lse first", {"    gap = (": "    lse.copy_(both)\n    gap = ("}, "lse is already that of both sets here"
        ),
        Wrong(
            "weights by exp, lse first",
            {
                '    gap = (lse_part - lse).masked_fill(both == float("-inf"), 0.0)': (
                    '    lse.copy_(both)\n    shift = both.masked_fill(both == float("-inf"), 0.0)'
                ),
                "torch.sigmoid(-gap)": "(lse - shift).exp()",
                "torch.sigmoid(gap)": "(lse_part - shift).exp()",
            },
            "by the lse from before the merge",
        ),
        Wrong(
            "exercise 1.5, in place",
            {
                'gap = (lse_part - lse).masked_fill(both == float("-inf"), 0.0)': (
                    'shift = both.masked_fill(both == float("-inf"), 0.0)'
                ),
                "torch.sigmoid(-gap)": "(lse - shift).exp()",
                "torch.sigmoid(gap)": "(lse_part - shift).exp()",
            },
            "not add up to 1. Do they come from the new lse",
        ),
        Wrong(
            "exercise 1.5, in place, without its guard",
            {
                'gap = (lse_part - lse).masked_fill(both == float("-inf"), 0.0)': "shift = both",
                "torch.sigmoid(-gap)": "(lse - shift).exp()",
                "torch.sigmoid(gap)": "(lse_part - shift).exp()",
            },
            "not add up to 1. Do they come from the new lse",
        ),
        Wrong("-inf - (-inf)", {'.masked_fill(both == float("-inf"), 0.0)': ""}, "there is a NaN"),
        Wrong(
            "not in place",
            {"o.mul_(torch.sigmoid(-gap)[..., None])": "o = o * torch.sigmoid(-gap)[..., None]"},
            "o is what it was",
        ),
        Wrong("lse not written", {"    lse.copy_(both)\n": ""}, "lse is what it was"),
        Wrong("o not scaled", {"    o.mul_(torch.sigmoid(-gap)[..., None])\n": ""}, "as if it had all the keys"),
        Wrong("the larger one", {"torch.logaddexp(lse": "torch.maximum(lse"}, "this is the larger one"),
        Wrong(
            "the plain sum",
            {"    o.mul_(torch.sigmoid(-gap)[..., None])\n": "", "o_part * torch.sigmoid(gap)[..., None]": "o_part"},
            "this is the sum of both",
        ),
        Wrong("swapped", {"(lse_part - lse).masked": "(lse - lse_part).masked"}, "the weights are swapped"),
        Wrong(
            "out of range",
            {"torch.logaddexp(lse, lse_part)": "torch.log(lse.exp() + lse_part.exp())"},
            "logits near 1000",
        ),
        Wrong(
            "the part is scaled in place",
            {"o_part * torch.sigmoid(gap)[..., None]": "o_part.mul_(torch.sigmoid(gap)[..., None])"},
            "read only",
        ),
        Wrong(
            "lse_part becomes that of both",
            {"    lse.copy_(both)\n": "    lse.copy_(both)\n    lse_part.copy_(both)\n"},
            "read only",
            at_once=True,
        ),
        Wrong(
            "in 16 bits",
            {"o.mul_(torch.sigmoid(-gap)[..., None])": "o.copy_(o.to(o_part.dtype) * torch.sigmoid(-gap)[..., None])"},
            "o is rounded to 16 bits",
        ),
        Wrong(
            "weights in 16 bits",
            {"torch.sigmoid(gap)[..., None]": "torch.sigmoid(gap)[..., None].to(o_part.dtype)"},
            "the weights are rounded to 16 bits",
        ),
        Wrong(
            "without a head axis",
            {"o_part * torch.sigmoid(gap)[..., None]": "o_part * torch.sigmoid(gap)[:, :, None]"},
            "(2, 3, 5, 5)",
        ),
        Wrong(
            "one maximum for all queries",
            {
                "torch.logaddexp(lse, lse_part)": (
                    "torch.log(torch.exp(lse - lse.max()) + torch.exp(lse_part - lse.max())) + lse.max()"
                )
            },
            "near -1000",
        ),
        Wrong("new memory for the caller's tensor", {"lse.copy_(both)": "lse.data = both"}, "lse is what it was"),
        Wrong(
            "weights of the larger one",
            {
                'gap = (lse_part - lse).masked_fill(both == float("-inf"), 0.0)': (
                    'shift = torch.maximum(lse, lse_part).masked_fill(both == float("-inf"), 0.0)'
                ),
                "torch.sigmoid(-gap)": "(lse - shift).exp()",
                "torch.sigmoid(gap)": "(lse_part - shift).exp()",
            },
            "do not add up to 1",
        ),
        Wrong(
            "logits clamped",
            {"(lse_part - lse).masked": "(lse_part.clamp(-50, 50) - lse.clamp(-50, 50)).masked"},
            "logits near 1000: o: this is the plain average",
        ),
    ],
    "pass_keys": [
        Wrong(
            "nothing travels while it attends",
            {
                "        part = rank.attend(q, kv)\n": "",
                "        if not last:\n            sending, coming": (
                    "        part = rank.attend(q, kv)\n        if not last:\n            sending, coming"
                ),
            },
            "computes while the keys stand still",
        ),
        Wrong(
            "all send first",
            {
                "            sending, coming = rank.send(kv), rank.receive()\n": (
                    "            rank.send(kv).wait()\n            coming = rank.receive()\n"
                ),
                "            sending.wait()\n": "",
            },
            "start both, then wait",
        ),
        Wrong(
            "its send starts after the products",
            {
                "sending, coming = rank.send(kv), rank.receive()": "coming = rank.receive()",
                "            sending.wait()\n": "            rank.send(kv).wait()\n",
            },
            "computes while the keys stand still",
        ),
        Wrong("sent in the last step too", {"last = step + 1 == rank.ranks": "last = False"}, "nobody needs them"),
        Wrong("its own keys again", {"            kv = coming.wait()": "            coming.wait()"}, "again and again"),
        Wrong(
            "not merged", {"            merge_(o, lse, *part)": "            o, lse = part"}, "of the last step alone"
        ),
        Wrong("its own keys alone", {"            merge_(o, lse, *part)": "            pass"}, "its own keys alone"),
        Wrong(
            "added up",
            {"            merge_(o, lse, *part)": "            o, lse = o + part[0], lse + part[1]"},
            "are added up",
        ),
        Wrong("a send not waited for", {"            sending.wait()\n": ""}, "has not waited for a send"),
        Wrong("into its own keys", {"kv = coming.wait()": "kv.copy_(coming.wait())"}, "written into its inputs"),
        Wrong(
            "into keys that are being sent",
            {
                "            sending.wait()\n            kv = coming.wait()": (
                    "            kv += 0 * coming.wait()\n            sending.wait()"
                )
            },
            "changed the tensor of its send 1",
        ),
        Wrong("one step short", {"in range(rank.ranks)": "in range(rank.ranks - 1)"}, "its own keys alone"),
        Wrong("o alone", {"return o, lse": "return o"}, "expected (o, lse)"),
    ],
    "balance_causal": [
        Wrong(
            "neighbors", {"return rank, 2 * ranks - 1 - rank": "return 2 * rank, 2 * rank + 1"}, "Neighbors go together"
        ),
        Wrong(
            "striped", {"return rank, 2 * ranks - 1 - rank": "return rank, rank + ranks"}, "get later with its number"
        ),
        Wrong("one too far", {"2 * ranks - 1 - rank": "2 * ranks - rank"}, "exactly once"),
        Wrong(
            "late first", {"return rank, 2 * ranks - 1 - rank": "return 2 * ranks - 1 - rank, rank"}, "must come before"
        ),
        Wrong(
            "a list",
            {"return rank, 2 * ranks - 1 - rank": "return [rank, 2 * ranks - 1 - rank]"},
            "expected a pair of ints",
        ),
    ],
    "causal_ring": [
        Wrong("keys of the next rank", {"(rank.number - step)": "(rank.number + step)"}, "comes from the rank before"),
        Wrong(
            "no mask at all",
            {
                "rank.attend(q, kv, True)": "rank.attend(q, kv)",
                "elif source < rank.number:": "else:",
                "rank.attend(q, kv[:, early])": "rank.attend(q, kv)",
                "        else:\n            merge_(o[late], lse[late], *rank.attend(q[late], kv))\n": "",
            },
            "there is no mask",
        ),
        Wrong(
            "everybody else's keys are seen",
            {
                "elif source < rank.number:": "else:",
                "rank.attend(q, kv[:, early])": "rank.attend(q, kv)",
                "        else:\n            merge_(o[late], lse[late], *rank.attend(q[late], kv))\n": "",
            },
            "all keys of other ranks are seen",
        ),
        Wrong(
            "a copy of the rows",
            {
                "merge_(o[late], lse[late], *rank.attend(q[late], kv))": (
                    "merge_(o[late].clone(), lse[late].clone(), *rank.attend(q[late], kv))"
                )
            },
            "its own keys alone",
        ),
        Wrong("late keys of a rank before", {"kv[:, early]": "kv[:, late]"}, "the late keys are seen here"),
        Wrong("the cases exchanged", {"elif source < rank.number": "elif source > rank.number"}, "the right way round"),
        Wrong(
            "own keys without a mask", {"rank.attend(q, kv, True)": "rank.attend(q, kv)"}, "its own keys need the mask"
        ),
        Wrong(
            "a mask in every step",
            {
                "rank.attend(q, kv[:, early])": "rank.attend(q, kv[:, early], True)",
                "rank.attend(q[late], kv)": "rank.attend(q[late], kv, True)",
            },
            "only its own keys need a mask",
        ),
        Wrong(
            "no modulo",
            {"(rank.number - step) % rank.ranks": "rank.number - step"},
            "can the number of a rank be negative",
        ),
        Wrong(
            "early queries of a rank before",
            {
                "merge_(o[late], lse[late], *rank.attend(q[late], kv))": (
                    "merge_(o[early], lse[early], *rank.attend(q[early], kv))"
                )
            },
            "the early queries see the keys of a rank after here",
        ),
        Wrong(
            "rows that see nothing",
            {
                "merge_(o[late], lse[late], *rank.attend(q[late], kv))": (
                    "part = rank.attend(q, kv)\n            merge_(o[late], lse[late], part[0][late], part[1][late])"
                )
            },
            "which of them see nothing",
        ),
        Wrong(
            "own keys twice",
            {"o, lse = rank.attend(q, kv, True)": "o, lse = [rank.attend(q, kv, True) for _ in range(2)][1]"},
            "are computed twice",
        ),
        Wrong("keys sent in the last step too", {"step + 1 == rank.ranks": "step == rank.ranks"}, "nobody needs them"),
        Wrong(
            "early queries miss a rank before",
            {
                "merge_(o, lse, *rank.attend(q, kv[:, early]))": (
                    "merge_(o[late], lse[late], *rank.attend(q[late], kv[:, early]))"
                )
            },
            "here only the late queries see the early keys",
        ),
        Wrong(
            "late keys of a rank after are missing",
            {"rank.attend(q[late], kv)": "rank.attend(q[late], kv[:, early])"},
            "see the early chunk alone",
        ),
        Wrong(
            "early queries alone of a rank before",
            {
                "merge_(o, lse, *rank.attend(q, kv[:, early]))": (
                    "merge_(o[early], lse[early], *rank.attend(q[early], kv[:, early]))"
                )
            },
            "here only the early queries see the early keys",
        ),
        Wrong(
            "late keys of a rank after alone",
            {"rank.attend(q[late], kv)": "rank.attend(q[late], kv[:, late])"},
            "see the late chunk alone",
        ),
        Wrong(
            "rows of a chunk by the number of ranks",
            {
                "early = slice(0, q.shape[0] // 2)": "early = slice(0, q.shape[0] // rank.ranks)",
                "late = slice(q.shape[0] // 2, None)": "late = slice(q.shape[0] // rank.ranks, None)",
            },
            "half of the rank's rows",
        ),
        Wrong("what came is not used", {"kv = coming.wait()": "coming.wait()"}, "kv must become what came"),
        Wrong(
            "a part in place of the result",
            {
                "merge_(o, lse, *rank.attend(q, kv[:, early]))": "o, lse = rank.attend(q, kv[:, early])",
                "merge_(o[late], lse[late], *rank.attend(q[late], kv))": (
                    "o[late], lse[late] = rank.attend(q[late], kv)"
                ),
            },
            "a part replaces the result",
        ),
    ],
    "bring_home": [
        Wrong(
            "no way home",
            {
                "        sending_sum, coming_sum = rank.send(dkv)": (
                    "        if not last:\n            sending_sum, coming_sum = rank.send(dkv)"
                ),
                "    sending_sum.wait()\n    return dq, coming_sum.wait()": "    return dq, dkv",
            },
            "one transfer more than the keys",
        ),
        Wrong("what comes is not added", {"dkv += coming_sum.wait()": "coming_sum.wait()"}, "this is one rank's term"),
        Wrong(
            "into a sum that is being sent",
            {
                "            sending_sum.wait()\n            dkv += coming_sum.wait()\n": (
                    "            total += dkv + 0 * coming_sum.wait()\n            sending_sum.wait()\n"
                    "        else:\n            total = dkv\n"
                ),
                "rank.send(dkv)": "rank.send(total)",
            },
            "changed the tensor of its send",
        ),
        Wrong(
            "its sends start after the products",
            {
                "sending, coming = rank.send(kv), rank.receive()": "coming = rank.receive()",
                "        dq_part, dkv = rank.gradients(q, kv, o, lse, do)\n": (
                    "        dq_part, dkv = rank.gradients(q, kv, o, lse, do)\n"
                    "        if not last:\n            sending = rank.send(kv)\n"
                ),
            },
            "computes while the keys stand still",
        ),
        Wrong(
            "the sum stays with its queries",
            {
                "            dkv += coming_sum.wait()\n": (
                    "            coming_sum.wait()\n            dkv += total\n        total = dkv\n"
                )
            },
            "must go where its keys go",
        ),
        Wrong(
            "nothing travels while it computes",
            {
                "        if not last:\n            sending.wait()": (
                    "        sending_sum.wait()\n        coming_sum.wait()\n"
                    "        if not last:\n            sending.wait()"
                )
            },
            "computes while the sums stand still",
        ),
        Wrong(
            "sums travel after the products, and one rank alone keeps its own",
            {
                "            sending_sum.wait()\n            dkv += coming_sum.wait()\n": (
                    "            dkv += coming_sum\n"
                ),
                "        sending_sum, coming_sum = rank.send(dkv), rank.receive()\n": (
                    "        coming_sum = dkv\n        if rank.ranks > 1:\n"
                    "            sending_sum, coming_sum = rank.send(dkv), rank.receive()\n"
                    "            sending_sum.wait()\n            coming_sum = coming_sum.wait()\n"
                ),
                "    sending_sum.wait()\n    return dq, coming_sum.wait()": "    return dq, coming_sum",
            },
            "computes while the sums stand still",
        ),
        Wrong(
            "all send first",
            {
                "        sending_sum, coming_sum = rank.send(dkv), rank.receive()\n": (
                    "        sending_sum = rank.send(dkv)\n        sending_sum.wait()\n"
                    "        coming_sum = rank.receive()\n"
                )
            },
            "start both, then wait",
        ),
        Wrong(
            "keys sent in the last step too", {"step + 1 == rank.ranks": "step == rank.ranks"}, "nobody needs its keys"
        ),
        Wrong(
            "dq of the last step",
            {"dq_part if step == 0 else dq + dq_part": "dq_part"},
            "the last step alone: add the terms up",
        ),
        Wrong(
            "dq of its own keys",
            {"dq_part if step == 0 else dq + dq_part": "dq_part if step == 0 else dq"},
            "own keys alone",
        ),
        Wrong(
            "o and lse of a part",
            {"kv, o, lse, do)\n        dq": "kv, *rank.attend(q, kv), do)\n        dq"},
            "use the o and lse",
        ),
        Wrong(
            "lse of a part",
            {"kv, o, lse, do)\n        dq": "kv, o, rank.attend(q, kv)[1], do)\n        dq"},
            "use the lse that",
        ),
        Wrong(
            "a sum is received after the next keys",
            {
                "        dq_part, dkv = rank.gradients": (
                    "        if step > 0:\n            coming_sum = rank.receive()\n"
                    "        dq_part, dkv = rank.gradients"
                ),
                "sending_sum, coming_sum = rank.send(dkv), rank.receive()": "sending_sum = rank.send(dkv)",
                "    sending_sum.wait()\n    return": (
                    "    coming_sum = rank.receive()\n    sending_sum.wait()\n    return"
                ),
            },
            "in the order in which they are sent",
        ),
        Wrong(
            "what came is not used",
            {"            kv = coming.wait()\n": "            coming.wait()\n"},
            "kv must become what came",
        ),
        Wrong(
            "its own terms stay at home",
            {
                "        dq = dq_part if step == 0 else dq + dq_part\n        if step > 0:\n": (
                    "        dq = dq_part if step == 0 else dq + dq_part\n        if step == 0:\n"
                    "            own = dkv\n        if step > 1:\n"
                ),
                "        sending_sum, coming_sum = rank.send(dkv)": (
                    "        if step > 0:\n            sending_sum, coming_sum = rank.send(dkv)"
                ),
                "return dq, coming_sum.wait()": "return dq, own + coming_sum.wait()",
            },
            "answer exercise 5.26",
        ),
    ],
    "hide_way_home": [
        Wrong(
            "all of its own keys at first", {"kv.shape[1] // 2": "kv.shape[1]"}, "computes nothing while send 2 of 2"
        ),
        Wrong(
            "dQ of the second half",
            {"return dq + dq_part,": "return dq,"},
            "the second half of its own keys is missing",
        ),
        Wrong(
            "the second half of what came last",
            {"rank.gradients(q, own[:, half:], o, lse, do)": "rank.gradients(q, kv[:, half:], o, lse, do)"},
            "which came last, was taken in place of its own",
        ),
        Wrong(
            "products that nobody needs",
            {
                "kv.shape[1] // 2": "kv.shape[1] - 1",
                "    dq_part, dkv_rest = rank.gradients(q, own[:, half:], o, lse, do)\n": (
                    "    dq_part, dkv_rest = rank.gradients(q, own[:, half:], o, lse, do)\n"
                    "    rank.gradients(q, own, o, lse, do)\n"
                ),
            },
            "each key once",
        ),
        Wrong(
            "home before the rest",
            {
                "    dq_part, dkv_rest = rank.gradients(q, own[:, half:], o, lse, do)\n    sending_sum.wait()\n": (
                    "    sending_sum.wait()\n    home = coming_sum.wait()\n"
                    "    dq_part, dkv_rest = rank.gradients(q, own[:, half:], o, lse, do)\n"
                ),
                "dim=1) + coming_sum.wait()": "dim=1) + home",
            },
            "computes nothing while send 2 of 2",
        ),
        Wrong("all of its own keys at last", {"kv.shape[1] // 2": "0"}, "computes nothing while send 1 of 2"),
        Wrong("what comes home alone", {"torch.cat((dkv_first, dkv_rest), dim=1) + ": ""}, "own queries are missing"),
        Wrong(
            "its own terms travel",
            {
                "dq, dkv_first =": "dq, dkv =",
                "lse, do)\n    for step in": (
                    "lse, do)\n    dkv = torch.cat((dkv, 0 * own[:, half:]), dim=1)\n"
                    "    sending_sum, coming_sum = rank.send(dkv), rank.receive()\n    for step in"
                ),
                "if step > 1:": "if step > 0:",
                "torch.cat((dkv_first, dkv_rest), dim=1) + coming_sum": (
                    "torch.cat((0 * own[:, :half], dkv_rest), dim=1) + coming_sum"
                ),
            },
            "own terms of dK and dV need not travel",
        ),
        Wrong(
            "keys are waited for before the next are asked for",
            {
                "            sending, coming = rank.send(kv), rank.receive()\n": "            pass\n",
                "            sending_sum.wait()\n": (
                    "            sending_sum.wait()\n        if step + 1 < rank.ranks:\n"
                    "            sending, coming = rank.send(kv), rank.receive()\n        if step > 1:\n"
                ),
            },
            "computes nothing while",
        ),
        Wrong("the halves exchanged", {"(dkv_first, dkv_rest)": "(dkv_rest, dkv_first)"}, "two halves of its own keys"),
        Wrong("what comes is not added", {"dkv += coming_sum.wait()": "coming_sum.wait()"}, "to the sum that comes"),
        Wrong(
            "all of its own keys at last, half of them again",
            {"own[:, half:]": "own", "torch.cat((dkv_first, dkv_rest), dim=1)": "dkv_rest"},
            "each key once",
        ),
        Wrong(
            "a sum is received after the next keys",
            {
                "            sending, coming = rank.send(kv), rank.receive()\n        dq_part": (
                    "            sending, coming = rank.send(kv), rank.receive()\n"
                    "        if step > 1:\n            coming_sum = rank.receive()\n        dq_part"
                ),
                "sending_sum, coming_sum = rank.send(dkv), rank.receive()": "sending_sum = rank.send(dkv)",
                "    dq_part, dkv_rest =": "    coming_sum = rank.receive()\n    dq_part, dkv_rest =",
            },
            "in the order in which they are sent",
        ),
    ],
    "real_ring": [
        Wrong("its own keys again", {"            kv = buffer\n": ""}, "again and again"),
        Wrong("to itself", {"dist.isend(kv, (rank + 1) % ranks)": "dist.isend(kv, rank)"}, "sends to itself, where"),
        Wrong(
            "the other way round",
            {"isend(kv, (rank + 1)": "isend(kv, (rank - 1)", "irecv(buffer, (rank - 1)": "irecv(buffer, (rank + 1)"},
            "gives the same result",
        ),
        Wrong("no modulo", {"(rank + 1) % ranks": "rank + 1"}, "rank 2 sends to rank 3, where rank 0"),
        Wrong(
            "receives from the next rank",
            {"(rank - 1) % ranks": "(rank + 1) % ranks"},
            "is the one before. Without a mask",
        ),
        Wrong(
            "to itself, on a rank that has left when the others start",
            {
                "    for step": (
                    "    if rank == 2:\n        dist.isend(kv, rank)\n    __import__('time').sleep(3)\n    for step"
                )
            },
            "rank 2 sends to itself",
        ),
        Wrong("one step short", {"in range(ranks)": "in range(ranks - 1)"}, "are missing: 3 ranks take 3 steps"),
        Wrong("sent in the last step too", {"last = step + 1 == ranks": "last = False"}, "nobody needs them"),
        Wrong(
            "one step too many",
            {"in range(ranks)": "in range(ranks + 1)", "step + 1 == ranks": "step == ranks"},
            "its own keys count twice",
        ),
        Wrong("no wait for what comes", {"            coming.wait()\n": ""}, "sends what may not have come yet"),
        Wrong(
            "what comes is copied before the wait",
            {
                "            coming.wait()\n            kv = buffer\n": (
                    "            kv = buffer.clone()\n            coming.wait()\n"
                )
            },
            "before wait() of its receive",
        ),
        Wrong(
            "attends to what comes",
            {"part = attention_forward(q, *kv)": "part = attention_forward(q, *(kv if last else buffer))"},
            "attends to keys or values that may not have come yet",
        ),
        Wrong("no wait for a send", {"            sending.wait()\n": ""}, "has not waited for a send"),
        Wrong("into what is being sent", {"buffer = torch.empty_like(kv)": "buffer = kv"}, "that it is sending"),
        Wrong(
            "what is being sent changes",
            {
                "            sending.wait()\n            coming.wait()\n            kv = buffer\n": (
                    "            coming.wait()\n            kv.copy_(buffer)\n            sending.wait()\n"
                )
            },
            "changed the tensor of its send 1",
        ),
        Wrong(
            "added up",
            {"            merge_(o, lse, *part)": "            o, lse = o + part[0], lse + part[1]"},
            "are added up",
        ),
        Wrong("not merged", {"            merge_(o, lse, *part)": "            o, lse = part"}, "the last step alone"),
        Wrong(
            "keys alone travel",
            {
                "    kv = torch.stack((k, v))\n": "    kv = k.clone()\n",
                "attention_forward(q, *kv)": "attention_forward(q, kv, v)",
            },
            "values must travel too",
        ),
        Wrong(
            "a collective",
            {
                "    for step": (
                    "    everybody = [torch.empty_like(kv) for _ in range(ranks)]\n"
                    "    dist.all_gather(everybody, kv)\n    for step"
                )
            },
            "all_gather is a collective",
        ),
        Wrong(
            "the send that waits",
            {
                "sending = dist.isend(kv, (rank + 1) % ranks)": "dist.send(kv, (rank + 1) % ranks)",
                "            sending.wait()\n": "",
            },
            "dist.send returns when the transfer is done",
        ),
        Wrong(
            "all wait for their sends first",
            {
                "sending = dist.isend(kv, (rank + 1) % ranks)": "dist.isend(kv, (rank + 1) % ranks).wait()",
                "            sending.wait()\n": "",
            },
            "its send 1 in line",
        ),
        Wrong(
            "a receive that nobody sends",
            {
                "    return o, lse": (
                    "    dist.irecv(torch.empty_like(kv), (rank - 1) % ranks).wait()\n    return o, lse"
                )
            },
            "Does every rank start as many receives",
        ),
        Wrong(
            "nothing travels while it attends",
            {
                "        part = attention_forward(q, *kv)\n": "",
                "        if not last:\n            buffer": (
                    "        part = attention_forward(q, *kv)\n        if not last:\n            buffer"
                ),
            },
            "keys or values stand still",
        ),
        Wrong(
            "receives after it has attended",
            {
                "            coming = dist.irecv(buffer, (rank - 1) % ranks)\n": "",
                "            sending.wait()\n            coming.wait()\n": (
                    "            dist.irecv(buffer, (rank - 1) % ranks).wait()\n            sending.wait()\n"
                ),
            },
            "computes while keys or values stand still",
        ),
        Wrong(
            "two receives into one tensor",
            {
                "buffer = torch.empty_like(kv)": "buffer = buffer if step else torch.empty_like(kv)",
                "            coming.wait()\n            kv = buffer\n": "",
            },
            "into which its receive 1 comes: wait first",
        ),
        Wrong(
            "PyTorch computes",
            {
                "part = attention_forward(q, *kv)": (
                    "s = q @ kv[0].mT / q.shape[-1] ** 0.5\n        part = s.softmax(-1) @ kv[1], s.logsumexp(-1)"
                )
            },
            "attention_forward was not called",
        ),
        Wrong(
            "writes into its inputs",
            {"    return o, lse": "    q.zero_()\n    return o, lse"},
            "has written into its inputs",
        ),
        Wrong(
            "values do not fit",
            {"buffer = torch.empty_like(kv)": "buffer = torch.empty_like(k)"},
            "All shards have one shape",
        ),
        Wrong("o alone", {"return o, lse": "return o"}, "expected (o, lse)"),
        Wrong("a wrong name", {"torch.empty_like(kv)": "torch.empty_like(kvs)"}, "in ring_attention", kind="error"),
        Wrong(
            "all keys first, then all products",
            {
                "    for step in range(ranks):\n": (
                    "    shares = [kv]\n"
                    "    for _ in range(ranks - 1):\n"
                    "        buffer = torch.empty_like(kv)\n"
                    "        sending = dist.isend(shares[-1], (rank + 1) % ranks)\n"
                    "        dist.irecv(buffer, (rank - 1) % ranks).wait()\n"
                    "        sending.wait()\n"
                    "        shares.append(buffer)\n"
                    "    return attention_forward(q, *torch.cat(shares, dim=3))\n"
                    "    for step in range(ranks):\n"
                )
            },
            "has computed nothing since it started it",
        ),
        Wrong(
            "the first transfer beside no products",
            {
                "        part = attention_forward(q, *kv)\n": (
                    "            if step == 0:\n"
                    "                coming.wait(), sending.wait()\n"
                    "                mine, kv = kv, buffer\n"
                    "                continue\n"
                    "        part = attention_forward(q, *kv)\n"
                ),
                "        if step == 0:\n            o": "        if step == 1:\n            o",
                "    return o, lse": "    merge_(o, lse, *attention_forward(q, *mine))\n    return o, lse",
            },
            "waits for its receive 1 and has computed nothing",
        ),
        Wrong(
            "k and v received in the other order",
            _apart("dist.isend(k, after), dist.isend(v, after), dist.irecv(new_v, before), dist.irecv(new_k, before)"),
            "given Q0 K0 V0, Q0 V2 K2, Q0 K1 V1, where Q0 K0 V0, Q0 K2 V2, Q0 K1 V1 is right",
        ),
        Wrong(
            "tags that do not match",
            _apart(
                "dist.isend(k, after, tag=1), dist.isend(v, after, tag=2), "
                "dist.irecv(new_k, before, tag=0), dist.irecv(new_v, before, tag=1)"
            ),
            "of its own tag alone",
        ),
        Wrong(
            "all wait for their receives first",
            {
                "            sending = dist.isend(kv, (rank + 1) % ranks)\n": "",
                "coming = dist.irecv(buffer, (rank - 1) % ranks)": (
                    "coming = dist.irecv(buffer, (rank - 1) % ranks)\n"
                    "            coming.wait()\n"
                    "            sending = dist.isend(kv, (rank + 1) % ranks)"
                ),
            },
            "and both before it waits",
        ),
        Wrong(
            "waits twice", {"            coming.wait()\n": "            coming.wait(), coming.wait()\n"}, "once more"
        ),
        Wrong(
            "asks without a wait",
            {"            coming.wait()\n": "            while not coming.is_completed():\n                pass\n"},
            "is_completed() is False until wait()",
        ),
        Wrong(
            "threads",
            {
                "            sending = dist.isend(kv, (rank + 1) % ranks)\n": (
                    "            move = lambda kv=kv: dist.isend(kv, (rank + 1) % ranks).wait()\n"
                    "            sending = __import__('threading').Thread(target=move)\n"
                    "            sending.start()\n"
                ),
                "sending.wait()": "sending.join()",
            },
            "a thread is started",
        ),
        Wrong(
            "queries and results travel",
            {
                "    kv = torch.stack((k, v))\n": (
                    "    kv = torch.cat((q, torch.zeros_like(q), torch.full_like(q[..., :1], -1e9)), dim=-1)\n"
                    "    columns = q.shape[-1]\n"
                    "    for step in range(ranks):\n"
                    "        part = attention_forward(kv[..., :columns], k, v)\n"
                    "        merge_(kv[..., columns:-1], kv[..., -1], *part)\n"
                    "        buffer = torch.empty_like(kv)\n"
                    "        sending = dist.isend(kv, (rank + 1) % ranks)\n"
                    "        dist.irecv(buffer, (rank - 1) % ranks).wait()\n"
                    "        sending.wait()\n"
                    "        kv = buffer\n"
                    "    return kv[..., columns:-1], kv[..., -1]\n"
                )
            },
            "queries of another rank",
        ),
        Wrong(
            "results travel",
            {
                "    kv = torch.stack((k, v))\n": (
                    "    o, lse = attention_forward(q, k, v)\n    kv = torch.cat((o, lse[..., None]), dim=-1)\n"
                ),
                "part = attention_forward(q, *kv)": "part = kv[..., :-1], kv[..., -1]",
                "            o, lse = part": "            pass",
            },
            "given Q0 K0 V0, where",
        ),
        Wrong(
            "the plain average",
            {
                "            merge_(o, lse, *part)": (
                    "            o, lse = (step * o + part[0]) / (step + 1), torch.logaddexp(lse, part[1])"
                )
            },
            "as is right: look at the merge",
        ),
        Wrong(
            "each part merged with the LSE of the result",
            {"            merge_(o, lse, *part)": "            merge_(o, lse, part[0], lse)"},
            "as is right: look at the merge",
        ),
        Wrong("a mask", {"attention_forward(q, *kv)": "attention_forward(q, *kv, True)"}, "at its further arguments"),
        Wrong(
            "its own keys are sent in each step",
            {"dist.isend(kv,": "dist.isend(torch.stack((k, v)),"},
            "Q0 K0 V0, Q0 K2 V2 (2 times), where",
        ),
    ],
    "pack_group": [
        Wrong(
            "the heads of the first group",
            {"pid_bh % heads_kv * group + offs_r // seq_q, ": "offs_r // seq_q, "},
            "they begin at g * group",
        ),
        Wrong(
            "loaded in another order than stored",
            {"offs_r // seq_q, offs_r % seq_q\n": "offs_r % group, offs_r // group\n"},
            "rows of a tile have one order",
        ),
        Wrong("head and query by quotient", {"offs_r % seq_q\n": "offs_r // group\n"}, "not r // group"),
        Wrong("head and query by modulo", {"group + offs_r // seq_q,": "group + offs_r % group,"}, "head r // seq_q"),
        Wrong(
            "the first head for all rows",
            {"pid_bh % heads_kv * group + offs_r // seq_q, ": "pid_bh % heads_kv * group + 0 * offs_r, "},
            "all rows take the first head",
        ),
        Wrong("queries side by side", {"offs_m * stride_q[2]": "offs_m * HEAD_DIM"}, "a stride between queries"),
        Wrong(
            "q as if contiguous",
            {
                "offs_m * stride_q[2]": "offs_m * HEAD_DIM",
                "(pid_bh // heads_kv).to(tl.int64) * stride_q[0] + offs_h * stride_q[1]": (
                    "(pid_bh // heads_kv * heads_kv * group + offs_h) * seq_q * HEAD_DIM"
                ),
                "offs_d[None, :] * stride_q[3]": "offs_d[None, :]",
            },
            "as if it were contiguous",
        ),
        Wrong(
            "stored group after group",
            {"(part * tl.num_programs(0) + pid_bh)": "(pid_bh * tl.num_programs(1) + part)"},
            "yours are stored group after group",
        ),
        Wrong(
            "the batch counted twice",
            {"pid_bh % heads_kv * group + offs_r // seq_q, ": "pid_bh * group + offs_r // seq_q, "},
            "stride_q[0] has counted the batch",
        ),
        Wrong("one query a head", {", offs_r % seq_q\n": ", 0 * offs_r\n"}, "all rows take the first query"),
        Wrong(
            "heads by modulo",
            {"pid_bh % heads_kv * group + offs_r // seq_q, ": "pid_bh % heads_kv + offs_r // seq_q * heads_kv, "},
            "yours are heads_kv apart",
        ),
        Wrong("no batch", {"(pid_bh // heads_kv).to(tl.int64) * stride_q[0] + ": ""}, "has q its batch stride?"),
        Wrong(
            "the padding of the last tile seen", {"(offs_n < seq_k)[None": "(offs_n >= 0)[None"}, "28 keys past the end"
        ),
        Wrong("all keys in every part", {"range(begin_n, end_n,": "range(0, seq_k,"}, "it took all 150 keys"),
        Wrong("0 / 0", {"acc / l_safe[:, None]": "acc / l_i[:, None]"}, "0 / 0, l being 0?"),
        Wrong("not divided", {"acc / l_safe[:, None]": "acc"}, "o is not divided by l"),
        Wrong(
            "keys read for each head",
            {
                "        v = load_tile(": "        for _ in range(1, group):\n"
                "            k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)\n        v = load_tile("
            },
            "k is read 4 times: each head of a group reads it for itself",
            at_once=True,
        ),
        Wrong("all parts in one place", {"(part * tl.num_programs(0) + pid_bh)": "pid_bh"}, "does `part` count in"),
        Wrong(
            "v where k lies", {"head_base(v_ptr, stride_v": "head_base(v_ptr, stride_k"}, "v is read with the strides"
        ),
        Wrong("no scale", {"q, k, v, scale, visible)": "q, k, v, 1.0, visible)"}, "scale is missing"),
        Wrong(
            "rows as heads",
            {
                "offs_h * stride_q[1] + offs_m * stride_q[2]": (
                    "(pid_bh % heads_kv * group + offs_r) * stride_q[1] + 0 * offs_m"
                )
            },
            "rows are taken for heads",
        ),
        Wrong("columns side by side", {"offs_d[None, :] * stride_q[3]": "offs_d[None, :]"}, "a stride between columns"),
        Wrong(
            "keys of pid_bh // group",
            {
                "head_base(k_ptr, stride_k, pid_bh, heads_kv)": "head_base(k_ptr, stride_k, pid_bh // group, heads_kv)",
                "head_base(v_ptr, stride_v, pid_bh, heads_kv)": "head_base(v_ptr, stride_v, pid_bh // group, heads_kv)",
            },
            "it is not divided by group",
        ),
        Wrong("the first part's keys", {"range(begin_n, end_n,": "range(0, share,"}, "it took the keys of part 0"),
        Wrong("lse without m", {"lse_ptr + row, m_i + tl.log": "lse_ptr + row, tl.log"}, "m is missing"),
        Wrong(
            "q in fp32",
            {
                "other=0.0)\n\n    k_head": "other=0.0).to(tl.float32)\n\n    k_head",
                "acc, q, k, v, scale": "acc, q, k.to(tl.float32), v, scale",
            },
            "leaves the tensor cores idle",
        ),
    ],
    "merge_parts": [
        Wrong(
            "-inf - -inf", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "m_new"}, "a part without keys makes -inf"
        ),
        Wrong("0 / 0", {"tl.where(l == 0.0, 1.0, l)": "l"}, "0 / 0 at the end"),
        Wrong(
            "parts that do not exist count",
            {'mask=there, other=float("-inf")': "mask=there, other=0.0"},
            "count with lse 0",
        ),
        Wrong("acc not rescaled", {"acc = alpha * acc": "acc = acc"}, "acc is not rescaled"),
        Wrong("l not rescaled", {"l = alpha * l": "l = l"}, "l is not rescaled"),
        Wrong(
            "neither rescaled",
            {"acc = alpha * acc": "acc = acc", "l = alpha * l": "l = l"},
            "neither l nor acc is rescaled",
        ),
        Wrong(
            "the mean",
            {
                "alpha, weight = tl.exp(m - shift), tl.exp(lse_part - shift)": (
                    "alpha, weight = 1.0, tl.where(there, 1.0, 0.0)"
                )
            },
            "this is the mean of the parts",
        ),
        Wrong("not divided", {"o = acc / l_safe": "o = acc"}, "not divided by the sum of the weights"),
        Wrong(
            "no maximum",
            {
                "        m = m_new\n": "        m = 0.0 * m_new\n",
                "m_new = tl.maximum(m, tl.max(lse_part, axis=0))": "m_new = tl.max(0.0 * tl.abs(offs_p), axis=0)",
                'm = float("-inf")': "m = 0.0",
            },
            "is the largest lse so far subtracted",
        ),
        Wrong(
            "a maximum that falls",
            {"m_new = tl.maximum(m, tl.max(lse_part, axis=0))": "m_new = tl.max(lse_part, axis=0)"},
            "not of the newest block",
        ),
        Wrong(
            "a maximum that falls, but for empty parts",
            {
                "m_new = tl.maximum(m, tl.max(lse_part, axis=0))": (
                    'm_new = tl.max(lse_part, axis=0)\n        m_new = tl.where(m_new == float("-inf"), m, m_new)'
                )
            },
            "is the largest lse so far subtracted",
        ),
        Wrong(
            "no logarithm",
            {"lse = m + tl.log(l_safe)": "lse = m + 0.0 * l_safe"},
            "the logarithm of the sum of weights is missing",
        ),
        Wrong("the logarithm alone", {"lse = m + tl.log(l_safe)": "lse = tl.log(l_safe)"}, "m is missing"),
        Wrong("-1e30 for -inf", {'    m = float("-inf")': "    m = -1e30"}, "a finite number stands for -inf"),
        Wrong(
            "one part at a time",
            {
                "range(0, parts, BLOCK_P)": "range(0, parts)",
                "offs_p = first + tl.arange(0, BLOCK_P)": "offs_p = first + tl.arange(0, 1)",
            },
            "times, where 4 reads are enough",
            at_once=True,
        ),
        Wrong(
            "the first block alone", {"range(0, parts, BLOCK_P)": "range(0, BLOCK_P, BLOCK_P)"}, "only the first block"
        ),
        Wrong("reads past the end", {"mask=there, other": "mask=offs_p >= 0, other"}, "go past the last part"),
        Wrong("powers of 2", {"tl.exp(m - shift), tl.exp(": "tl.exp2(m - shift), tl.exp2("}, "yours are powers of 2"),
        Wrong("m stays", {"        m = m_new\n": ""}, "is m replaced by m_new"),
        Wrong("o without weights", {"tl.sum(weight[:, None] * o_part,": "tl.sum(o_part,"}, "added without its weight"),
        Wrong(
            "not below -1000", {'tl.where(m_new == float("-inf"), 0.0, m_new)': "tl.maximum(m_new, -1000.0)"}, "-2000"
        ),
        Wrong(
            "parts of a row as neighbors",
            {"slot = offs_p * rows + row": "slot = row * parts + offs_p"},
            "part p of row r",
        ),
    ],
    "choose_parts": [
        Wrong("one part", {CHOSEN: "    return 1"}, "8 programs leave 124 multiprocessors idle"),
        Wrong("a part for each tile", {CHOSEN: "    return tiles"}, "512 programs run in 4 rounds"),
        Wrong("always eight", {CHOSEN: "    return min(tiles, 8)"}, "walks over 32 of 256 tiles"),
        Wrong(
            "programs are not counted",
            {CHOSEN: "    return min(tiles, multiprocessors)"},
            "512 programs run in 4 rounds",
        ),
        Wrong(
            "no part where programs are many",
            {CHOSEN: "    return min(tiles, multiprocessors // programs)"},
            "there is at least one part",
        ),
        Wrong(
            "more parts than tiles",
            {CHOSEN: "    return max(1, multiprocessors // programs)"},
            "one tile of keys at least",
        ),
        Wrong(
            "as many as fit",
            {CHOSEN: "    return max(1, min(tiles, multiprocessors // programs))"},
            "10 programs leave 6 multiprocessors idle",
        ),
        Wrong("a float", {CHOSEN: "    return min(tiles, multiprocessors / programs)"}, "expected an int, got"),
        Wrong(
            "no rounds", {"rounds, share = -(-n * programs // multiprocessors)": "rounds, share = 1"}, "run in rounds"
        ),
        Wrong("half a round", {"-(-n * programs // multiprocessors)": "n * programs / multiprocessors"}, "round up"),
        Wrong(
            "half a round after the first",
            {"-(-n * programs // multiprocessors)": "max(1, n * programs / multiprocessors)"},
            "also after the first",
        ),
        Wrong("no call of one tile", {CHOSEN: CHOSEN.replace("tiles + 1", "tiles")}, "empty", kind="error"),
        Wrong("half a tile", {"-(-tiles // n)": "tiles / n"}, "the longest program has ceil(tiles / n) tiles"),
        Wrong(
            "for another machine",
            {CHOSEN: CHOSEN.replace(", multiprocessors)", ")")},
            "50 programs run in 4 rounds of 16 at a time",
        ),
        Wrong(
            "a rule for 132", {CHOSEN: "    return max(1, min(tiles, 132 // programs))"}, "130 programs run in 9 rounds"
        ),
        Wrong(
            "the memory alone", {READING: "FIRST + programs * tiles * tile_bytes / ALL"}, "however fast the memory is"
        ),
        Wrong(
            "a program alone", {READING: "rounds * (FIRST + share * TILE)"}, "the memory limits all programs together"
        ),
        Wrong("one after the other", {READING: READING.replace("max(", "(").replace(", r", " + r")}, "not their sum"),
        Wrong(
            "one wait, and one after the other",
            {READING: "FIRST + programs * tiles * tile_bytes / ALL + rounds * share * TILE"},
            "memory and programs work at the same time",
        ),
        Wrong(
            "both times of reading",
            {READING: "programs * tiles * tile_bytes / ALL + rounds * (FIRST + share * TILE)"},
            "while each round waits and gets its tiles",
        ),
        Wrong(
            "one wait in all",
            {READING: "FIRST + max(programs * tiles * tile_bytes / ALL, rounds * share * TILE)"},
            "each round waits",
            at_once=True,
        ),
        Wrong(
            "a wait in each round, and the memory's time",
            {READING: "rounds * FIRST + max(programs * tiles * tile_bytes / ALL, rounds * share * TILE)"},
            "one wait is enough",
        ),
        Wrong("no wait of the memory", {"max(FIRST + ": "max("}, "the memory, too, delivers nothing"),
        Wrong(
            "no wait", {"max(FIRST + ": "max(", "(FIRST + share * TILE)": "share * TILE"}, "in addition to the reading"
        ),
        Wrong(
            "all at once",
            {READING: f"{READING[:-1]} + {MERGING})", f"reading + {MERGING}": "reading"},
            "a merge begins",
        ),
        Wrong("no merge", {" + (n > 1) * (MERGE + n * EACH)": ""}, "parts are merged at the end"),
        Wrong("a merge of one part", {"(n > 1) * (MERGE + n * EACH)": "MERGE + n * EACH"}, "one part needs no merge"),
        Wrong("a merge for each part", {"(MERGE + n * EACH)": "n * MERGE"}, "MERGE once"),
        Wrong("a merge of any length", {"(MERGE + n * EACH)": "MERGE"}, "costs EACH for each part, too"),
        Wrong("bytes of each part", {READING: READING.replace("programs", "n * programs")}, "the bytes are the same"),
        Wrong("bytes of one program", {READING: READING.replace("programs * ", "")}, "not of one"),
        Wrong("twice the time", {"    return reading +": "    return reading + reading +"}, "is 121.2, expected 60.6"),
        Wrong("a text", {"    return reading +": "    return str(reading) or"}, "expected a number, got"),
    ],
    "rotation_gain": [
        Wrong("one factor", {"(2 * squares)": "squares"}, "both factors of a product are rounded"),
        Wrong("a variance", {"ROUNDING * (2 * squares).sqrt()": "ROUNDING**2 * 2 * squares"}, "this is a variance"),
        Wrong(
            "squared too late", {"q.square() @ k.square().mT": "(q @ k.mT).square()"}, "add up by their squares: sum"
        ),
        Wrong("at worst", {"q.square() @ k.square().mT": "(q.abs() @ k.abs().mT).square()"}, "at worst"),
        Wrong("twice", {"(2 * squares)": "(4 * squares)"}, "its square is doubled"),
        Wrong("no rounding", {"ROUNDING * (2": "(2"}, "ROUNDING is missing"),
        Wrong("not spread", {" / q.shape[3]\n    else": "\n    else"}, "there are d products, each of"),
        Wrong("one product", {" / q.shape[3]\n    else": " / q.shape[3] ** 2\n    else"}, "the error of one"),
        Wrong(
            "by the matrix",
            {
                "squares = q.square().sum(3)[..., :, None] * k.square().sum(3)[..., None, :] / q.shape[3]": (
                    "turned = [t @ rotation(t.shape[3]) for t in (q, k)]\n"
                    "        squares = turned[0].square() @ turned[1].square().mT"
                )
            },
            "no matrix is needed",
        ),
        Wrong("the same twice", {"    if rotate:\n": "    if False:\n"}, "large elements do not stay where they are"),
        Wrong("always spread", {"    if rotate:\n": "    if True:\n"}, "elements are as large as they are"),
        Wrong("q alone", {"rounded(k @ m)": "rounded(k)"}, "one is rotated and the other is not"),
        Wrong("k alone", {"rounded(q @ m)": "rounded(q)"}, "one is rotated and the other is not"),
        Wrong("q as it is", {"rounded(q @ m)": "(q @ m)"}, "one of q and k is not rounded"),
        Wrong("k as it is", {"rounded(k @ m)": "(k @ m)"}, "one of q and k is not rounded"),
        Wrong("a mean", {"off.square().mean().sqrt()": "off.abs().mean()"}, "a mean of |error|"),
        Wrong("no root", {"off.square().mean().sqrt()": "off.square().mean()"}, "the root is missing"),
        Wrong("never", {"if rotate else torch.eye": "if False else torch.eye"}, "rotate is not asked for"),
        Wrong(
            "rounded, then rotated",
            {"rounded(q @ m) @ rounded(k @ m).mT": "(rounded(q) @ m) @ (rounded(k) @ m).mT"},
            "rotated only afterwards",
        ),
        Wrong(
            "rounded twice",
            {"rounded(q @ m) @ rounded(k @ m).mT": "rounded(rounded(q) @ m) @ rounded(rounded(k) @ m).mT"},
            "round them once",
        ),
        Wrong("a tensor", {".sqrt().item()": ".sqrt()"}, "expected a float, got Tensor"),
        Wrong("outliers are spread", {'few="same"': 'few="helps"'}, "'few'] is 'helps', but with the rotation"),
        Wrong(
            "a rotation does no harm",
            {'opposite="hurts"': 'opposite="same"'},
            "'opposite'] is 'same', but",
            at_once=True,
        ),
        Wrong("not said", {'keys="same"': 'keys="?"'}, "PREDICTED['keys'] is '?': one of"),
    ],
    "key_order": [
        Wrong("as they are", {"(0, 1, 8, 9)": "(2 * t, 2 * t + 1, 2 * t + 2, 2 * t + 3)"}, "at place 2 stands key 2"),
        Wrong(
            "where each key goes",
            {
                "16 * block + 2 * t + i for block in range(keys // 16) for t in range(4) for i in (0, 1, 8, 9)": (
                    "16 * (n // 16) + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2 for n in range(keys)"
                )
            },
            "at which place each key stands",
        ),
        Wrong("eights and fours", {"(0, 1, 8, 9)": "(0, 1, 4, 5)"}, "stands nowhere"),
        Wrong("sixteen keys", {"range(keys // 16)": "range(1)"}, "value_order(32): expected 32 keys, got 16"),
        Wrong("the first sixteen again", {"16 * block + 2": "2"}, "key 16 stands nowhere"),
        Wrong("the other way round", {"rows[column] = place": "rows[place] = column"}, "in which row each key stands"),
        Wrong(
            "rows as they are",
            {"rows[column] = place": "rows[place] = place"},
            "row 2 of K holds key 2, so that thread 1 gets its logit",
        ),
    ],
}

# Other right answers than the solution: `mistake` says what they do in another way.
RIGHT = {
    "count_flops": [
        Wrong(
            "integers of NumPy",
            {"    count = 0\n    for start_m": "    import numpy\n\n    count = numpy.int64(0)\n    for start_m"},
            "sizes",
            kind="passed",
        )
    ],
    "write_dq": [
        Wrong(
            "the first waits for nobody",
            {"if ORDERED:\n            await_count": "if ORDERED and before > 0:\n            await_count"},
            "each step of 4 programs",
            kind="passed",
        ),
        Wrong(
            "the turn after the parts",
            {
                "        if ORDERED:\n            await_count(count_ptr, before)\n": "",
                "        if ORDERED and before == 0:\n": (
                    "        if ORDERED:\n            await_count(count_ptr, before)\n"
                    "        if ORDERED and before == 0:\n"
                ),
            },
            "each step of 4 programs",
            kind="passed",
        ),
    ],
    "bring_home": [
        Wrong(
            "one rank alone keeps its sum",
            {
                "    sending_sum.wait()\n    return": (
                    "    if rank.ranks == 1:\n        return dq, dkv\n    sending_sum.wait()\n    return"
                ),
                "        sending_sum, coming_sum = rank.send(dkv)": (
                    "        if rank.ranks > 1:\n            sending_sum, coming_sum = rank.send(dkv)"
                ),
            },
            "1 to 5 ranks",
            kind="passed",
        )
    ],
    "merge_ranks": [
        Wrong(
            "weights divided by their sum",
            {
                'gap = (lse_part - lse).masked_fill(both == float("-inf"), 0.0)': (
                    'shift = torch.maximum(lse, lse_part).masked_fill(both == float("-inf"), 0.0)\n'
                    "    mine, late = (lse - shift).exp(), (lse_part - shift).exp()\n"
                    "    total = (mine + late).clamp(min=1)"
                ),
                "torch.sigmoid(-gap)": "(mine / total)",
                "torch.sigmoid(gap)": "(late / total)",
            },
            "64 ranks",
            kind="passed",
        ),
        Wrong(
            "from o towards the part",
            {
                "    o.mul_(torch.sigmoid(-gap)[..., None])\n": "",
                "o.add_(o_part * torch.sigmoid(gap)[..., None])": (
                    "o.lerp_(o_part.float(), torch.sigmoid(gap)[..., None])"
                ),
            },
            "64 ranks",
            kind="passed",
        ),
        Wrong(
            "in fp64",
            {
                "torch.logaddexp(lse, lse_part)": "torch.logaddexp(lse.double(), lse_part.double())",
                'gap = (lse_part - lse).masked_fill(both == float("-inf"), 0.0)': (
                    'shift = both.masked_fill(both == float("-inf"), 0.0)'
                ),
                "torch.sigmoid(-gap)": "(lse - shift).exp()",
                "torch.sigmoid(gap)": "(lse_part - shift).exp()",
            },
            "64 ranks",
            kind="passed",
        ),
    ],
    "real_ring": [
        Wrong(mistake, edits, "3 processes over gloo", kind="passed")
        for mistake, edits in {
            "k and v apart, with tags, received in another order": _apart(
                "dist.irecv(new_v, before, tag=2), dist.irecv(new_k, before, tag=1), "
                "dist.isend(k, after, tag=1), dist.isend(v, after, tag=2)"
            ),
            "one batch": _apart(
                "*dist.batch_isend_irecv(["
                "dist.P2POp(dist.isend, k, after), dist.P2POp(dist.isend, v, after), "
                "dist.P2POp(dist.irecv, new_k, group_peer=before), dist.P2POp(dist.irecv, new_v, group_peer=before)])"
            ),
            "two buffers in turn": {
                "    kv = torch.stack((k, v))\n": "    kv = torch.stack((k, v))\n    buffer = torch.empty_like(kv)\n",
                "            buffer = torch.empty_like(kv)\n": "",
                "kv = buffer": "kv, buffer = buffer, kv",
            },
            "all receives ahead, all sends waited for at the end": {
                "    kv = torch.stack((k, v))\n": (
                    "    kv, sends = torch.stack((k, v)), []\n"
                    "    buffers = torch.empty(ranks - 1, *kv.shape)\n"
                    "    receives = [dist.irecv(buffer, (rank - 1) % ranks) for buffer in buffers]\n"
                ),
                "            buffer = torch.empty_like(kv)\n": "",
                "sending = dist.isend(kv, (rank + 1) % ranks)": "sends.append(dist.isend(kv, (rank + 1) % ranks))",
                "            coming = dist.irecv(buffer, (rank - 1) % ranks)\n": "",
                "            sending.wait()\n": "",
                "coming.wait()": "receives[step].wait()",
                "kv = buffer": "kv = buffers[step]",
                "    return o, lse": "    [sending.wait() for sending in sends]\n    return [o, lse]",
            },
            "what came is sent on before the send before it is waited for": {
                "        last = step + 1 == ranks\n": (
                    "        last = step + 1 == ranks\n        past = sending if step else None\n"
                ),
                "            sending.wait()\n": "",
                "        part = attention_forward(q, *kv)\n": (
                    "        if past:\n            past.wait()\n        part = attention_forward(q, *kv)\n"
                ),
            },
            "head by head": {
                "part = attention_forward(q, *kv)": (
                    "parts = [attention_forward(*(x[:, [head]] for x in (q, *kv))) for head in range(q.shape[1])]\n"
                    "        part = [torch.cat(of, dim=1) for of in zip(*parts)]"
                )
            },
        }.items()
    ],
    "pack_group": [
        Wrong(
            "query after query",
            {
                "offs_r // seq_q, offs_r % seq_q\n": "offs_r % group, offs_r // group\n",
                "* rows + offs_r  #": "* rows + offs_r % group * seq_q + offs_r // group  #",
            },
            "K and V read once",
            kind="passed",
        )
    ],
    "choose_parts": [
        Wrong(
            "the last round nearly full",
            {
                CHOSEN: (
                    "    n = range(1, min(tiles, 128) + 1)\n"
                    "    full = [p * programs / (-(-p * programs // multiprocessors) * multiprocessors) for p in n]\n"
                    "    near = next(p for p in n if full[p - 1] >= 0.85 * max(full))\n"
                    "    return 1 if programs >= 0.8 * multiprocessors else near"
                )
            },
            "",
            kind="passed",
        )
    ],
    "fp8": [
        Wrong("another factor", {"256.0 * p": "128.0 * p", "pid_n) / 256.0": "pid_n) / 128.0"}, "", kind="passed"),
        Wrong("up to the largest", {"256.0 * p": "448.0 * p", "pid_n) / 256.0": "pid_n) / 448.0"}, "", kind="passed"),
        Wrong(
            "sums of the codes",
            {
                "m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)": (
                    "before = l_i\n        m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)\n"
                    "        l_i = before * alpha + tl.sum((256.0 * p).to(v.dtype).to(tl.float32), 1) / 256.0"
                )
            },
            "",
            kind="passed",
        ),
    ],
    "key_order": [
        Wrong("in another order of each four", {"(0, 1, 8, 9)": "(8, 0, 9, 1)"}, "", kind="passed"),
        Wrong("a tuple", {"return rows": "return tuple(rows)"}, "", kind="passed"),
        Wrong(
            "pairs from further away",
            {
                "[16 * block + 2 * t + i for block in range(keys // 16) for t in range(4) for i in (0, 1, 8, 9)]": (
                    "[2 * t + 8 * ((2 * b + h) % (keys // 8)) + e\n"
                    "            for b in range(keys // 16) for t in range(4) for h in (1, 2) for e in (0, 1)]"
                )
            },
            "",
            kind="passed",
        ),
    ],
    "rotation_gain": [
        Wrong("in fp32", {"rounded(q @ m) @": "rounded(q.float() @ m.float()).double() @"}, "", kind="passed")
    ],
}
