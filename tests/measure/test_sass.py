"""What is read from a listing, on a listing that is small enough to be read here."""

from common.measure import sass

SETS = """
        /*0000*/                   UTMALDG.4D [UR8], [UR4] ;             /* 0x0000 */
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;  /* 0x0000 */
"""
PRODUCTS = "\n".join(
    f"        /*{0x40 + 16 * n:04x}*/  HGMMA.64x64x16.F32 R24, {left}, R24 ;  /* 0x0000 */"
    for n, left in enumerate(["gdesc[UR16]"] * 4 + ["R88, gdesc[UR16].tnspB"] * 4)
)
# Both waits stand behind half of the exponentials.
REST = "\n".join(
    f"        /*{0xC0 + 16 * n:04x}*/  {text} ;  /* 0x0000 */"
    for n, text in enumerate(
        [
            "WARPGROUP.DEPBAR.LE gsb0, 0x1",
            *["MUFU.EX2 R5, R5"] * 10,
            "WARPGROUP.DEPBAR.LE gsb0, 0x0",
            *["MUFU.EX2 R5, R5"] * 10,
            "@P0 BRA 0x0",
            "EXIT",
        ]
    )
)
SASS = SETS + PRODUCTS + "\n" + REST


def test_a_turn_ends_with_the_branch_back():
    body = sass.turn(SASS)
    assert body[0].what == "ask for a tile"
    assert body[-1].opcode == "BRA"
    assert len(body) == 2 + 8 + 23


def test_products_are_under_way_until_they_are_waited_for():
    body = sass.turn(SASS)
    assert sass.under_way(body) == [("copy", 0, 1), ("S", 2, 10), ("PV", 6, 21)]
    assert sass.hidden(body) == (10, 20)
    assert sass.beside_products(body) == 11  # the exponentials, and the wait for all but one group


def test_a_product_may_be_waited_for_in_the_next_turn():
    texts = ["IADD3", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "FADD", "HGMMA", "FMUL", "HGMMA", "IMAD"]
    body = [sass.Instruction(16 * n, text) for n, text in enumerate(texts)]
    assert sass.beside_products(body) == 3  # FMUL, IMAD, IADD3
    assert sass.wait_for_last(body) == 2
    assert sass.wait_for_last(sass.turn(SASS)) == 2 + 8 + 12


def test_copies_of_threads_are_under_way_until_their_group_is_waited_for():
    texts = [
        "LDGSTS",
        "LDGSTS",
        "LDGDEPBAR",
        "LDGSTS",
        "LDGDEPBAR",
        "DEPBAR.LE SB0, 0x1",
        "IADD3",
        "DEPBAR.LE SB0, 0x0",
    ]
    body = [sass.Instruction(16 * n, text) for n, text in enumerate(texts)]
    assert sass.under_way(body) == [("copy", 0, 5), ("copy", 3, 7)]


def test_a_mask_is_what_a_branch_skips():
    texts = ["@!P0 BRA 0x240", "ISETP.GE.AND P1, PT, R2, R3, PT", *["FSEL R5, R5, -INF, P1"] * 34, "MUFU.EX2 R5, R5"]
    code = [sass.Instruction(16 * n, text) for n, text in enumerate(texts)]
    assert sass.masks(code) == [(1, 35)]
    assert sass.masks(code[1:]) == []
    assert sass.counted(code) == {"BRA": 1, "MUFU": 1}


def test_the_outline_names_what_is_waited_for():
    text = sass.outline(sass.turn(SASS))
    assert "    3    4  product, left factor from shared memory" in text
    assert "    7    4  product, left factor from registers" in text
    assert "wait until 1 group of products is under way" in text
    assert "wait until no group of products is under way" in text


def test_a_turn_lasts_as_long_as_its_instructions():
    body = sass.turn(SASS)
    starts = sass.starts(body)
    assert starts[:5] == [0, 1, 2, 2 + 33, 2 + 66]  # a product of 64 x 64 x 16 takes 32 clocks, and one to be issued
    assert starts[-1] == 2 + 8 * 33 + 20 * 8 + 3


def test_a_mask_that_is_skipped_takes_no_time():
    texts = ["@!P0 BRA 0x240", "ISETP.GE.AND P1, PT, R2, R3, PT", *["FSEL R5, R5, -INF, P1"] * 34, "MUFU.EX2 R5, R5"]
    code = [sass.Instruction(16 * n, text) for n, text in enumerate(texts)]
    assert sass.starts(code)[-1] == 1 + 8
