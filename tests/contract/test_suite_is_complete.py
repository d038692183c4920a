"""Nothing that the library supports is missing from this suite."""

from tiny_drafters import DRAFTERS, union_members
from tiny_targets import TARGETS


def test_every_member_of_the_union_is_under_this_contract():
    assert union_members() == set(DRAFTERS)
    for kind, configs in DRAFTERS.items():
        assert configs
        assert all(config.model_dump()["type"] == kind for config in configs)


def test_targets_of_this_suite_differ(tiny):
    fingerprints = {tiny(name).target.spec.fingerprint for name in TARGETS}
    assert len(fingerprints) == len(TARGETS)


def test_every_supported_family_is_tested():
    from moray.models.families import FAMILIES

    assert {options["family"] for options in TARGETS.values()} == set(FAMILIES)
