"""Elements: the only way text becomes HTML here. What is not an element already is escaped."""

from __future__ import annotations

import html
from typing import Any

#: Elements without an end tag.
_VOID = frozenset({"meta", "link", "wbr"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """``<name attributes>children</name>``.

    Children that are not `Markup` are escaped; None stands for nothing. Attributes: a trailing underscore is dropped
    (``class_``), other underscores become dashes; None leaves an attribute out, True writes its name alone as value.
    """
    written = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is not None and value is not False:
            written.append(f' {key}="{html.escape(key if value is True else str(value))}"')
    end = "" if name in _VOID else f"</{name}>"
    return Markup(f"<{name}{''.join(written)}>{join(*children)}{end}")


def join(*children: Any) -> Markup:
    """Children one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children if c is not None))


def place(site: str) -> Markup:
    """A source line, short; all of it is its tooltip. It may break after a slash and before the function's name."""
    parts = html.escape(short_site(site)).replace("/", "/<wbr>").replace(" (", " <wbr>(")
    return tag("span", Markup(parts), title=site, class_="site")


def short_site(site: str) -> str:
    """The last folder, the file, the line and the function of a source line."""
    path, dot, rest = site.partition(".py:")
    folders = path.replace("\\", "/").split("/")
    return "/".join(folders[-2:]) + dot + rest


def bytes_text(n: int) -> str:
    """``1.5 MB``: three digits, powers of 1000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 1000 * size else f"{n / size:,.0f} {unit}"
    return f"{n} B"


def plural(n: int, word: str, many: str | None = None) -> str:
    """``1 fusion``, ``2 fusions``."""
    return f"{n:,} {word if n == 1 else many or word + 's'}"


def saved(before: int, after: int) -> str:
    """How much less `after` is, in words."""
    if before <= 0 or after == before:
        return "unchanged"
    if after < before:
        return f"{100 * (1 - after / before):.0f} % less"
    return f"{100 * (after / before - 1):.0f} % more"
