"""The test that docs/developer/testing.md shows runs, and holds."""

from documented_code import python_blocks, run_block
from side_by_side import SHAPES

PAGE = "docs/developer/testing.md"


def test_the_page_s_test_runs(tiny, learnt):
    (code,) = python_blocks(PAGE)
    run_block(code, PAGE)["test_my_promise"](tiny, learnt, "eagle-0", SHAPES["chain"])
