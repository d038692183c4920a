"""Every acceptance method gives the target's law: chi-square on a world of tables that can be enumerated."""

import pytest
from laws import COUPLING, REJECTION, SHORT_CHAIN, SHORT_DYNAMIC, SIBLINGS, TableWorld, counts_of, fits, keeps_the_law

from moray.decoding.params import SamplingParams
from moray.trees.shapes import FixedShape

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

METHODS = {
    "chain sampled from q": (SHORT_CHAIN, REJECTION, False),
    "independent siblings": (SIBLINGS, REJECTION, True),
    "three independent siblings": (FixedShape(type="fixed", branching=(3,)), REJECTION, True),
    "deterministic tree": (SIBLINGS, REJECTION, False),
    "deterministic dynamic tree": (SHORT_DYNAMIC, REJECTION, False),
    "coupled chain": (SHORT_CHAIN, COUPLING, False),
    "coupled tree": (SHORT_DYNAMIC, COUPLING, False),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_target_s_law(method):
    assert keeps_the_law(*METHODS[method])


@pytest.mark.parametrize("shape", [SHORT_CHAIN, SIBLINGS], ids=["chain", "tree"])
@pytest.mark.parametrize("method", ["rejection", "gumbel_coupled"])
def test_filters_hold_under_every_method(shape, method):
    world = TableWorld(vocabulary=4, sharpness=0.7, seed=2)
    params = SamplingParams(temperature=0.9, top_k=3, top_p=0.9, acceptance_method=method)
    law = world.law(params, 3)
    assert 8 <= int((law > 0).sum()) < law.numel() - 8, "the filters forbid many texts and leave many"
    assert keeps_the_law(shape, params, world=world)


@pytest.mark.parametrize("name", ["drafter is the target", "drafter is sure and wrong"])
def test_extreme_drafters_keep_the_law(name):
    world = TableWorld(seed=3)
    world.drafter = world.target if name == "drafter is the target" else (-40 * world.target)
    for method in ("chain sampled from q", "deterministic tree", "independent siblings"):
        assert keeps_the_law(*METHODS[method], world=world, samples=600)


def test_the_check_tells_close_laws_apart():
    """The chi-square itself can fail: texts of a slightly warmer target do not pass for the target's."""
    world, warmer = TableWorld(), TableWorld()
    warmer.target = world.target / 1.3
    counts = counts_of(warmer, SHORT_CHAIN, COUPLING)
    assert fits(counts, warmer.law(COUPLING, 3))
    assert not fits(counts, world.law(COUPLING, 3))
