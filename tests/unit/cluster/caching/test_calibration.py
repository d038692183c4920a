"""The result of a cache's calibration pass: it is forgotten under both of its names."""

from moray.activations.format.store import CacheStore
from moray.cluster.caching.calibration import CALIBRATION_FILE, forget_calibration


def test_what_an_earlier_version_measured_is_forgotten_too(tmp_path):
    store = CacheStore(str(tmp_path))
    for name in (CALIBRATION_FILE, "rehearsal.json"):
        store.write_json(name, {"tokens_per_second": 1.0, "hidden_rms": {}})
    forget_calibration(store)
    assert list(tmp_path.glob("*.json")) == []
    forget_calibration(store)
