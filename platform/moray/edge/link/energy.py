"""Energy that this machine has used, where it has counters that can be read: RAPL on x86 (Linux, usually as root)."""

from pathlib import Path

_RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules of all processor packages since the meter was made."""

    def __init__(self, root: Path = _RAPL) -> None:
        """`root` is where the kernel shows the counters."""
        self._zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self.missing: str | None = None
        """Why nothing can be read; None if something can."""
        self._joules = 0.0
        self._last: dict[Path, int] = {}
        if not self._zones:
            self.missing = f"no counter of energy (RAPL) under {root}"
            return
        try:
            self._ranges = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in self._zones}
            self._last = self._read()
        except OSError as error:
            self.missing = f"the counters of energy (RAPL) cannot be read: {error.strerror}"

    def joules(self) -> float | None:
        """Energy so far; None if nothing can be read. Call it at least once per turn of a counter, every few minutes:
        counters start again at 0."""
        if self.missing is not None:
            return None
        now = self._read()
        for zone, value in now.items():
            used = value - self._last[zone]
            self._joules += (used if used >= 0 else used + self._ranges[zone]) / 1e6
        self._last = now
        return self._joules

    def _read(self) -> dict[Path, int]:
        return {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}
