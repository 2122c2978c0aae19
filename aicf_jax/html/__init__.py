"""A report as a page: one self-contained HTML text, and a part of one for notebooks. No script, no network.

One module a part: `headline`, `graph` (with `layout`), `tables`, `program`, `lifetime`; `page` puts them together.
`markup` builds elements, and everything that is not an element is escaped there.
"""

from aicf_jax.html.page import fragment, page

__all__ = ["fragment", "page"]
