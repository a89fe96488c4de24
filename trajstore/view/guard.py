"""Checks on requests before they are answered, and security headers of all answers."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trajstore.view.page import POLICY

SAID_TO_BROWSERS = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one, which no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refusal(method: str, headers: Mapping[str, str], *, only_loopback: bool) -> str | None:
    """Return why a request is refused; None if it is accepted.

    Args:
        method: HTTP method.
        headers: headers by lower-case name.
        only_loopback: whether ``Host`` must name this machine. This blocks DNS rebinding, where ``Host`` has the name
            of the foreign page.
    """
    if method not in ("GET", "HEAD"):
        return f"method {method}: this page is read-only; `trajstore annotate` sets values"
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if only_loopback and not is_loopback(name):
        return f"Host {host!r}: must be a name of this machine, such as localhost"
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"Origin {origin!r}: requests of other sites are refused"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return "Sec-Fetch-Site: requests of other sites are refused"
    return None


class Guard:
    """Middleware that refuses foreign pages and clients without the token.

    Args:
        app: the application.
        token: required token; None if only this machine can connect.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token
        self._cookie = "trajstore-" + hashlib.sha256((token or "").encode()).hexdigest()[:8]
        """Cookie name, different for each token because all ports of a host share cookies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or forward it to the application."""

        async def send_saying(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SAID_TO_BROWSERS)
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await (self._instead(scope) or self._app)(scope, receive, send_saying)

    def _instead(self, scope: Scope) -> Response | None:
        """Return the response that replaces the application's; None to forward the request."""
        headers = Headers(scope=scope)
        why = refusal(scope["method"], headers, only_loopback=self._token is None)
        if why is not None:
            return PlainTextResponse(why, 403)
        if self._token is None or self._is_token(HTTPConnection(scope).cookies.get(self._cookie, "")):
            return None
        if self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse("A token is required: use the address that `trajstore view` printed.", 401)

    def _is_token(self, given: str) -> bool:
        return self._token is not None and secrets.compare_digest(given.encode(), self._token.encode())
