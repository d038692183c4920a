"""Random numbers are a function of their place, filters keep what they should, and samples have the right law."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from moray.decoding.params import SamplingParams
from moray.decoding.sampling import sampler as sampling
from moray.decoding.sampling.sampler import Sampler, counter_uniform, gumbel, highest

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def positions(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def sampler(vocabulary: int = 11, sequence: int = 0, **params) -> Sampler:
    return Sampler(SamplingParams(**params), vocabulary, CPU, sequence)


# --- Randomness ---


def test_a_number_depends_on_nothing_but_its_place():
    whole = counter_uniform(7, 0, torch.arange(50), 40)
    assert torch.equal(counter_uniform(7, 0, positions(31), 40), whole[31:32]), "alone as in a batch"
    assert torch.equal(counter_uniform(7, 0, positions(31, 2, 31), 40), whole[[31, 2, 31]]), "in any order"
    assert torch.equal(counter_uniform(7, 0, torch.arange(50), 3), whole[:, :3]), "whatever else is drawn"
    assert torch.equal(counter_uniform(7, 0, torch.arange(50), 40), whole), "again"


def test_seed_stream_sequence_and_position_all_count():
    base = counter_uniform(1, 0, positions(5), 64)
    others = [
        counter_uniform(2, 0, positions(5), 64),
        counter_uniform(1, 1, positions(5), 64),
        counter_uniform(1, 0, positions(6), 64),
        counter_uniform(1, 0, positions(5), 64, sequence=1),
        counter_uniform(-1, 0, positions(5), 64),
        counter_uniform(1 + 2**40, 0, positions(5), 64),
    ]
    for other in others:
        assert not torch.isin(other, base).any()


def test_the_numbers_are_these():
    """Plain Python integers give the same bits: the same text on every device and in every later version."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    for seed, stream, position, index, sequence in ((0, 0, 0, 0, 0), (5, 3, 1234567, 96, 2), (-3, 1, 7, 40, 0)):
        key = mix((mix(mix(seed & MASK) + sequence) + stream) & MASK)
        row = mix((position * 0x9E3779B97F4A7C15 + key) & MASK)
        bits = mix((row + (index + 1) * 0xD1342543DE82EF95) & MASK)
        got = counter_uniform(seed, stream, positions(position), index + 1, sequence)[0, index]
        assert float(got) == ((bits >> 12) + 0.5) * 2.0**-52


def test_numbers_are_uniform_and_independent():
    numbers = counter_uniform(3, 0, torch.arange(400), 256).numpy()
    assert kstest(numbers.ravel()[:20000], "uniform").pvalue > 0.01
    assert kstest(numbers[:, 0], "uniform").pvalue > 0.01
    assert kstest(numbers[0], "uniform").pvalue > 0.01
    test = counter_uniform(3, 2, torch.arange(400), 256).numpy()
    seed = counter_uniform(4, 0, torch.arange(400), 256).numpy()
    pairs = {
        "next position": (numbers[:-1], numbers[1:]),
        "next index": (numbers[:, :-1], numbers[:, 1:]),
        "other stream": (numbers, test),
        "other seed": (numbers, seed),
        "position against index": (numbers[:256, :256], numbers[:256, :256].T),
    }
    for name, (a, b) in pairs.items():
        cells = np.histogram2d(a.ravel(), b.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
        if name == "position against index":
            cells = np.histogram2d(*(x[np.triu_indices(256, 1)] for x in (a, b)), bins=8, range=[[0, 1], [0, 1]])[0]
        assert chisquare(cells.ravel()).pvalue > 0.001, name


@pytest.mark.parametrize("bits", [0, -1])
def test_no_number_is_zero_or_one(bits, monkeypatch):
    """The extreme hashes: their Gumbel noise must stay finite."""
    monkeypatch.setattr(sampling, "_mix_tensor", lambda value: torch.full_like(value, bits))
    number = counter_uniform(0, 0, positions(0), 1)
    assert 0.0 < float(number) < 1.0
    assert math.isfinite(float(gumbel(number)))


def test_gumbel_noise_has_its_law():
    noise = gumbel(counter_uniform(9, 0, torch.arange(100), 100)).ravel().numpy()
    assert kstest(noise, "gumbel_r").pvalue > 0.01


# --- Filters ---


def naive_filter(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then the k best, then the smallest head of them whose mass reaches top_p."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass / total >= top_p:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.8), (1, 1.0), (100, 0.95), (0, 1e-9)])
def test_filters_equal_a_plain_reference(temperature, top_k, top_p):
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)) * 2
    log_probs = sampler(temperature=temperature, top_k=top_k, top_p=top_p).log_probs(logits)
    expected = torch.tensor([naive_filter(row, temperature, top_k, top_p) for row in logits.tolist()])
    torch.testing.assert_close(log_probs.exp(), expected, atol=1e-5, rtol=0)
    assert torch.equal(log_probs.isneginf(), expected == 0), "a refused token is impossible, not improbable"


def test_every_filter_leaves_a_token():
    flat = torch.zeros(1, 11)
    for params in ({"top_p": 1e-12}, {"top_k": 1}, {"top_k": 1, "top_p": 1e-12}):
        log_probs = sampler(temperature=1.0, **params).log_probs(flat)
        assert int((log_probs > -math.inf).sum()) >= 1
        torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0))


def test_low_precision_logits_are_filtered_in_float32():
    logits = torch.randn(2, 11).bfloat16()
    assert sampler(temperature=0.5).log_probs(logits).dtype == torch.float32


# --- Samples ---


def test_greedy_takes_the_likeliest():
    assert sampler().choose(torch.tensor([[0.0, 3.0, 1.0]]), 4).tolist() == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-6])
def test_as_good_as_no_temperature_is_greedy(temperature):
    """Divided by it, logits would not be finite."""
    logits = torch.tensor([[-5.0, 3.0, 30.0, -1.0]])
    drawn = [sampler(4, temperature=temperature).choose(logits, position).item() for position in range(20)]
    assert drawn == [2] * 20
    assert sampler(4, temperature=2e-5).choose(logits, 0).item() == 2
    assert not sampler(temperature=2e-5).params.is_greedy


def test_samples_have_the_law_of_the_logits():
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5, -30.0]])
    for params in ({"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}):
        one = sampler(5, seed=3, **params)
        drawn = torch.cat([one.choose(logits, position) for position in range(3000)])
        counts = drawn.bincount(minlength=5).double()
        law = torch.tensor(naive_filter(logits[0].tolist(), params["temperature"], params.get("top_k", 0), 1.0))
        possible = law * 3000 > 1
        assert counts[~possible].sum() == 0
        assert chisquare(counts[possible], law[possible].double() / law[possible].double().sum() * 3000).pvalue > 0.01


def test_a_sample_is_a_function_of_seed_sequence_and_position():
    logits = torch.zeros(1, 1000)

    def draw(position: int, seed: int = 1, sequence: int = 0) -> int:
        return int(sampler(1000, sequence, temperature=1.0, seed=seed).choose(logits, position))

    assert draw(5) == draw(5)
    assert len({draw(5), draw(6), draw(5, seed=2), draw(5, sequence=1)}) == 4
    one = sampler(1000, temperature=1.0, seed=1)
    assert [int(one.choose(logits, p)) for p in (6, 5)] == [draw(6), draw(5)], "what came before does not count"


# --- Children of draft nodes ---


def test_coupled_drafts_are_the_drafter_s_own_samples():
    """The first child is what plain sampling from the drafter would give at that position: so a perfect drafter is
    always accepted."""
    one = sampler(temperature=0.9, seed=4)
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    select = one.selector(root_position=20, depth=3, is_chain=False)
    for level in range(3):
        tokens, scores, probs = select(logits, level, 4)
        assert tokens[:, 0].tolist() == [int(one.choose(row[None], 21 + level)) for row in logits]
        assert torch.equal(scores, scores.sort(dim=-1, descending=True).values)
        assert probs is None


def test_a_rejection_chain_hands_on_the_very_distribution_it_drew_from():
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(2)) * 2
    counts, q = torch.zeros(11, dtype=torch.float64), torch.zeros(11)
    for seed in range(2000):
        one = sampler(temperature=0.8, top_k=5, seed=seed, acceptance_method="rejection")
        tokens, scores, probs = one.selector(3, 1, is_chain=True)(logits, 0, 1)
        assert probs is not None
        assert torch.equal(probs, one.log_probs(logits).exp())
        torch.testing.assert_close(scores[0, 0], probs[0, tokens[0, 0]].log())
        counts[int(tokens)] += 1
        q = probs[0]
    possible = q > 0
    assert int(possible.sum()) == 5
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], q[possible].double() / q[possible].double().sum() * 2000).pvalue > 0.01


def test_greedy_and_rejection_trees_take_the_best():
    logits = torch.randn(2, 11, generator=torch.Generator().manual_seed(3))
    for params in ({}, {"temperature": 1.0, "acceptance_method": "rejection"}):
        tokens, scores, probs = sampler(**params).selector(0, 2, is_chain=False)(logits, 1, 3)
        assert torch.equal(tokens, logits.topk(3).indices)
        torch.testing.assert_close(scores, logits.log_softmax(-1).topk(3).values)
        assert probs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_score_is_the_first_of_equal_ones(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (3, 17, 49_152), generator=generator).to(dtype)  # thousands of ties in each row
    scores[1, 4] = -torch.inf
    is_highest = scores == scores.amax(dim=-1, keepdim=True)
    first = torch.where(is_highest, torch.arange(49_152), 49_152).amin(dim=-1)
    assert torch.equal(highest(scores), first)
