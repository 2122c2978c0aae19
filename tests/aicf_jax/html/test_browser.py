"""Pages in a headless Chromium: no error, no request, nothing wider than the window."""

import functools
import json
import re
import shutil
import subprocess

import pytest

from tests.aicf_jax.report_support import KINDS, report

NAMES = ("chromium", "chromium-browser", "google-chrome")

#: A policy under which every request is a violation, and a script that writes down what it sees.
WATCHED = """<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<script>
const seen = {violations: [], errors: []};
addEventListener("securitypolicyviolation", e => seen.violations.push(e.blockedURI));
addEventListener("error", e => seen.errors.push(String(e.message)), true);
addEventListener("load", () => {
  const root = document.documentElement;
  seen.requests = performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:"));
  seen.sideways = root.scrollWidth - root.clientWidth;
  seen.background = getComputedStyle(document.querySelector(".aicf-report")).backgroundColor;
  seen.height = root.scrollHeight;
  const unseen = [...document.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().height === 0);
  seen.unseen = unseen.length;
  const out = document.createElement("pre");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>"""


@functools.cache
def browser():
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    return found


def look(page, folder, width, dark=False):
    """What the script in the page saw, in a window of this width."""
    path = folder / "page.html"
    path.write_text(page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{WATCHED}', 1), encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom",
    ]
    done = subprocess.run([browser(), *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert "CONSOLE" not in done.stderr
    return json.loads(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_asks_for_nothing_and_fits_a_narrow_window(kind, tmp_path):
    seen = look(report(kind).to_html(), tmp_path, width=400)
    assert seen["violations"] == seen["errors"] == seen["requests"] == []
    assert seen["sideways"] <= 0 and seen["unseen"] == 0 and seen["height"] > 300


def test_the_page_follows_the_colour_scheme(tmp_path):
    light, dark = (look(report("mlp").to_html(), tmp_path, width=1200, dark=d)["background"] for d in (False, True))
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 23, 28)")
