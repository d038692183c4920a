"""Of several rounds over the same prompts, each prompt's fastest answer counts, method by method."""

from moray.bench.runner import Asked, Measurement, Method
from moray.decoding.generation import Generation
from sweeps.trainings.measure import fastest


def method(name: str, seconds: list[float], lossless: list[bool]) -> Method:
    def run(*_):
        raise AssertionError("nothing is decoded here")

    generations = [Generation([1, 2], seconds=spent, prefill_seconds=0.5) for spent in seconds]
    return Method(name, "", run, generations, lossless)


def test_the_fastest_round_of_each_prompt_and_method_counts():
    plain = method("plain", [3.0, 9.0, 2.0, 8.0, 4.0, 7.0], [True] * 6)
    drafted = method("moa", [1.0, 5.0, 2.0, 4.0, 3.0, 6.0], [True, True, True, False, True, True])
    asked = [Asked("a", 0.0), Asked("b", 0.0)] * 3
    found = fastest(Measurement([plain, drafted], asked, num_skipped=3), rounds=3)
    assert [[one.seconds for one in each.generations] for each in found.methods] == [[2.0, 7.0], [1.0, 4.0]]
    assert [each.lossless for each in found.methods] == [[True, True], [True, False]]
    assert [one.category for one in found.asked] == ["a", "b"]
    assert found.num_skipped == 1
