"""A report's page, read as a browser would, for tests of what stands in it."""

from collections import Counter
from html.parser import HTMLParser

HOSTILE = '<script>alert("x")</script> & [red]$\\frac$ ]]> -->'
_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks the nesting of elements while it reads, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.text = text, ""
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.figures: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "figure":
            self._figure = dict(attrs)["id"] or ""
            self.figures[self._figure.removeprefix("plot-")] = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "figure" in self.open:
            self.figures[self._figure.removeprefix("plot-")] += data

    @property
    def ids(self) -> Counter[str]:
        """How often each is given."""
        return Counter(value for name, value in self.attributes if name == "id")

    def has(self, plot: str) -> bool:
        """Whether a plot was drawn."""
        return "Left out:" not in self.figures[plot]
