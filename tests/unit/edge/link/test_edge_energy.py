"""Counters of energy: joules of all packages, also when one starts again at 0; None with the reason where none is."""

from pathlib import Path

from moray.edge.link.energy import EnergyMeter


def zone(root: Path, name: str, microjoules: int, most: int = 1_000_000_000) -> Path:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_packages_add_up_and_a_counter_that_starts_again_is_followed(tmp_path):
    for name, start in (("intel-rapl:0", 10_000_000), ("intel-rapl:1", 999_000_000), ("intel-rapl:0:0", 5)):
        zone(tmp_path, name, start)
    meter = EnergyMeter(tmp_path)
    assert meter.missing is None
    assert meter.joules() == 0.0
    zone(tmp_path, "intel-rapl:0", 12_500_000)
    zone(tmp_path, "intel-rapl:1", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", 999)
    assert meter.joules() == 2.5 + 2.0


def test_the_reason_is_said_where_nothing_can_be_read(tmp_path):
    meter = EnergyMeter(tmp_path)
    assert meter.joules() is None
    assert "no counter" in meter.missing
