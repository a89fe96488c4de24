"""The page over HTTP: routes, two reading threads, and event streams. Thin."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from trajstore._core.base.arguments import INT64_MAX, whole
from trajstore.errors import ConfigurationError, SchemaMismatchError, TrajectoryUnavailableError, TrajstoreError
from trajstore.view.answers import Answer
from trajstore.view.guard import Guard, is_loopback
from trajstore.view.living import Living, State, told
from trajstore.view.page import STATIC

T = TypeVar("T")

Parse = Callable[[Request, str], Any]
"""Returns a parameter of a request by its name."""

Call = tuple[Callable[..., Answer | bytes], Mapping[str, Parse]]
"""A function that answers requests, and their parameters, which are its arguments."""

WATCHED = 1.0
"""Seconds between refreshes while a page is open."""

UNWATCHED = 30.0
"""Seconds between refreshes while no page is open; they also advance the reader's lease."""

_ALIVE = 15.0
"""Seconds between keep-alive messages on an event stream, which detect closed connections."""

_MOST_ROWS = 1000


class Service:
    """Answers HTTP requests.

    Args:
        living: the contents.
    """

    def __init__(self, living: Living) -> None:
        self._living = living
        self._asking = ThreadPoolExecutor(1, "trajstore-view-asking")
        self._reading = ThreadPoolExecutor(1, "trajstore-view-reading")
        self._changed = asyncio.Event()
        self._watched = asyncio.Event()
        self._watching = 0
        self._end: asyncio.Future[None]

    def end(self) -> None:
        """End event streams and waiting requests, which would otherwise delay the server's shutdown."""
        self._end.set_result(None)
        self._changed.set()

    async def _result(self, thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        """Return the result of a call in a thread; raise ClientDisconnect if the server ends first."""
        running = asyncio.get_running_loop().run_in_executor(thread, call)
        awaited: set[asyncio.Future[Any]] = {running, self._end}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise ClientDisconnect("the server is ending")
        finally:
            running.cancel()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Read the facts in advance, and refresh until the server ends."""
        self._end = asyncio.get_running_loop().create_future()
        self._asking.submit(self._living.about)  # an error recurs at the page's own request
        following = asyncio.create_task(self._follow())
        yield
        following.cancel()
        self._asking.shutdown(cancel_futures=True)
        self._reading.shutdown(cancel_futures=True)

    async def _follow(self) -> None:
        before = self._living.state
        while True:
            refreshing = asyncio.get_running_loop().run_in_executor(self._asking, self._living.refresh)
            state = await refreshing  # a request may have refreshed already
            if state != before:
                before = state
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            if self._watching:
                await asyncio.sleep(WATCHED)
                continue
            self._watched.clear()
            await _within(UNWATCHED, self._watched)

    # -- routes -------------------------------------------------------------------------------------

    def routes(self) -> list[Route | Mount]:
        """Return the handlers by path."""
        living = self._living
        trajectory, rows = {"id": _text}, {"where": _text, "order": _texts}
        about_many: dict[str, Call] = {
            "about": (living.about, {}),
            "keys": (living.keys, {}),
            "page": (living.page, {**rows, "first": _whole, "count": _count, "state": _text, "columns": _texts}),
            "around": (living.around, {**trajectory, **rows}),
            "group": (living.group, {"task": _text, "version": _version}),
            "facts": (living.facts, trajectory),
            "notes": (living.notes, trajectory),
            "sessions": (living.open_sessions, {}),
            "path": (living.open_path, {"id": _text, "call": _text}),
            "overview": (living.overview, {"where": _text}),
        }
        about_one: dict[str, Call] = {
            "rollout": (living.rollout, trajectory),
            "frames": (living.frames, {**trajectory, "name": _text, "environment": _whole, "step": _wholes}),
        }
        return [
            *(Route(f"/api/{name}", self._handler(self._asking, *call)) for name, call in about_many.items()),
            *(Route(f"/api/{name}", self._handler(self._reading, *call)) for name, call in about_one.items()),
            Route("/", self._index),
            Route("/api/session", self._session),
            Route("/api/events", self._events),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    async def _index(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def _handler(
        self, thread: ThreadPoolExecutor, call: Callable[..., Answer | bytes], parameters: Mapping[str, Parse]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer requests with the result of a call in a thread; its arguments are these parameters of the request."""

        async def answer(request: Request) -> Response:
            given = [parse(request, name) for name, parse in parameters.items()]
            result = await self._result(thread, partial(call, *given))
            if isinstance(result, bytes):
                return Response(result, media_type="application/octet-stream")
            return _json(result)

        return answer

    async def _session(self, request: Request) -> Response:
        name, row = _text(request, "id"), _text(request, "row")
        opened = await self._result(self._asking, lambda: self._living.open_session(name))
        return _json(opened or await self._result(self._reading, lambda: self._living.session(name, row)))

    async def _events(self, request: Request) -> Response:
        stream = self._states(request.headers.get("last-event-id"))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _states(self, seen: str | None) -> AsyncIterator[bytes]:
        """Yield each state that differs from the last one sent to the page."""
        self._watching += 1
        self._watched.set()
        try:
            while not self._end.done():
                changed, state = self._changed, self._living.state
                yield _event(state) if state.moment != seen else b": alive\n\n"
                seen = state.moment
                await _within(_ALIVE, changed)
        finally:
            self._watching -= 1


def _event(state: State) -> bytes:
    data = orjson.dumps({**told(state), "sessions": state.sessions, "written": state.written})
    return b"id: " + state.moment.encode() + b"\ndata: " + data + b"\n\n"


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Return after an event, or after a timeout."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return


def _text(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _texts(request: Request, name: str) -> list[str]:
    return list(request.query_params.getlist(name))


def _whole(request: Request, name: str, default: int = 0) -> int:
    return _parsed(name, request.query_params.get(name, str(default)))


def _wholes(request: Request, name: str) -> list[int]:
    return [_parsed(name, text) for text in request.query_params.getlist(name)]


def _count(request: Request, name: str) -> int:
    return min(_whole(request, name, 100), _MOST_ROWS)


def _version(request: Request, name: str) -> int | str | None:
    given: str | None = request.query_params.get(name)
    return given if given in (None, "all") else _parsed(name, str(given), -INT64_MAX)


def _parsed(name: str, text: str, least: int = 0) -> int:
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise ConfigurationError(f"{name}: {text!r}, must be a whole number")
    return whole(name, int(text), least)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    """Return an error as a sentence."""
    asked_wrongly = isinstance(error, ConfigurationError | SchemaMismatchError)
    status = 400 if asked_wrongly else 404 if isinstance(error, TrajectoryUnavailableError) else 500
    return _json({"error": str(error)}, status)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._call_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._call_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.end()
        await super().shutdown(sockets)


def server_of(living: Living, token: str | None = None, started: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """Return a server of the page; ``run(sockets=[...])`` serves until a signal or ``should_exit`` ends it.

    Args:
        living: the contents; the server owns its reader from now on.
        token: required token; None if only this machine can connect.
        started: called once the server handles signals and requests.
    """
    service = Service(living)
    app = Starlette(
        routes=service.routes(),
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={TrajstoreError: _refused, OSError: _refused, ClientDisconnect: _refused},
        lifespan=service.lifespan,
    )
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    return _Server(config, service, started)


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str | None, str]]:
    """Listen; yield the socket, the required token (None if only this machine can connect), and the address.

    Raises:
        ConfigurationError: the address does not exist here, or the port is taken.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {error}; --port 0 chooses a free port"
        ) from error
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    name = f"[{host}]" if ":" in host else host
    with listener:
        yield listener, token, f"http://{name}:{listener.getsockname()[1]}/{f'?token={token}' if token else ''}"
