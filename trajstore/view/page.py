"""The page's files and its security policy, for the server and for bundles."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'"
"""Content security policy of the page."""

_BUNDLED = {
    '<meta charset="utf-8">': (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="trajstore-bundle" content="1">'
    ),
    '<main id="main" tabindex="-1"></main>': (
        '<main id="main" tabindex="-1"><p class="nothing">Loading … If this stays, the page was opened as a file. '
        "Serve its folder instead, for example with <code>python3 -m http.server</code>.</p></main>"
    ),
}


def bundled_index() -> str:
    """Return the page of a bundle, with the policy inside, because no server adds headers."""
    text = (STATIC / "index.html").read_text()
    for plain, bundled in _BUNDLED.items():
        text = text.replace(plain, bundled)
    return text
