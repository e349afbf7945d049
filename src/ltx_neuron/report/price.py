"""What clips cost by the price of an hour of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass

_UNITS = {"dollars_per_clip": "a clip", "dollars_per_video_second": "a second of video"}


@dataclass(frozen=True)
class Price:
    """per_hour: US dollars of the machine; at_once: runs that share it, all of them busy."""

    per_hour: float
    at_once: int

    def dollars(self, seconds: float) -> float:
        """The price of one run's `seconds`."""
        return self.per_hour / 3600 / self.at_once * seconds

    def of(self, seconds: float, clips: float, video_seconds: float) -> dict[str, float]:
        """The price of clips that one run made in `seconds`; of none, only the machine's."""
        dollars = self.dollars(seconds)
        counts = zip(_UNITS, (clips, video_seconds), strict=True)
        prices = {name: dollars / count for name, count in counts if count}
        return {"dollars_per_hour": self.per_hour, "runs_at_once": self.at_once} | prices


def format_price(price: Mapping[str, float]) -> str:
    """As $0.0027 a clip, $0.00053 a second of video; $14.56 an hour, 16 runs at once."""
    prices = [f"${price[name]:.2g} {unit}" for name, unit in _UNITS.items() if name in price]
    runs = price["runs_at_once"]
    machine = f"${price['dollars_per_hour']:,.2f} an hour, {runs} run{'s' * (runs > 1)} at once"
    return f"{', '.join(prices) or 'no clip'}; {machine}"
