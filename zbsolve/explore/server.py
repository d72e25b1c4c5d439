"""The server of the page. It listens on the loopback interface only, under an address with a secret token.

Starlette checks the Host header (against DNS rebinding) and streams responses; uvicorn limits requests. Requests have no
bodies, and only answers are kept, in memory.
"""

from __future__ import annotations

import json
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..search.state import State as Search
from ..show.pages import script
from ..show.solved_text import state_as_text
from ..util.errors import BadInput, ZbsolveError
from .page import answer_part, controls_page, table_part, wrong_part
from .playground import Playground, Row
from .state import State, commands

HOSTS = ["127.0.0.1", "localhost"]
MAX_REQUEST = 16_384  # bytes of a request's head
MAX_REQUESTS = 40  # at the same time
TABLE_SECONDS = 0.4  # at least, between two versions of a table that grows
HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
     b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)  # fmt: skip
STALE = (
    "zbsolve explore: this address is not of the server that runs now.\n"
    "Take the address that it printed when it started; the text after ? in yours can stay.\n"
)


def serve(playground: Playground, state: State, port: int, seconds: float | None, started: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, or for `seconds`. port: 0 for any free one. state: of the page at first. started:
    called with the address. Raises BadInput if the port is not available, and KeyboardInterrupt."""
    token = secrets.token_urlsafe(16)
    listening = _listen(port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/" + (f"?{state.query}" if state.query else "")
    running = new_server(playground, token)
    if seconds is not None:
        ending = threading.Timer(seconds, lambda: setattr(running, "should_exit", True))
        ending.daemon = True
        ending.start()
    try:
        playground.warm(state)
        started(address)
        running.run(sockets=[listening])
    finally:
        playground.stop()


def new_server(playground: Playground, token: str) -> uvicorn.Server:
    """The server of the page below `/<token>/`, for a socket that is listening already."""
    return uvicorn.Server(
        uvicorn.Config(
            application(playground, token),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_REQUESTS,
            h11_max_incomplete_event_size=MAX_REQUEST,
            timeout_graceful_shutdown=1,
        )
    )


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOSTS[0], port))
        listening.listen()  # from now on a browser's early request waits
    except (OSError, OverflowError) as error:
        listening.close()
        raise BadInput(f"port {port}: cannot listen: {getattr(error, 'strerror', None) or error}") from None
    return listening


def application(playground: Playground, token: str) -> Starlette:
    """The page and its parts below `/<token>/`, as an ASGI application."""
    parts: dict[str, Callable[[Request], Response]] = {
        "": lambda request: _page(playground, request),
        "explore.js": lambda request: Response(script("explore.js"), media_type="text/javascript"),
        "answer": lambda request: HTMLResponse(_answer(playground, _asked(request), _width(request))),
        "compare": lambda request: _streamed(_table(playground, _asked(request))),
        "search": lambda request: _streamed(_search(playground, _asked(request), _width(request))),
        "schedule.json": lambda request: _schedule(playground, _asked(request)),
    }

    def reply(request: Request) -> Response:
        sent, part = request.path_params["token"], request.path_params.get("part", "")
        if not secrets.compare_digest(sent.encode(), token.encode()) or part not in parts:
            return PlainTextResponse(STALE, 404)
        try:
            return parts[part](request)
        except ZbsolveError as error:  # shown as a line in the part of the page
            return HTMLResponse(wrong_part(str(error)), 422 if part == "schedule.json" else 200)

    routes = [Route("/{token}/", reply), Route("/{token}/{part}", reply)]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    return Starlette(routes=routes, middleware=[Middleware(_SafeHeaders), hosts])


def _page(playground: Playground, request: Request) -> Response:
    """The page; if the query in its address is wrong, the default page with an error line."""
    try:
        return HTMLResponse(controls_page(State.parse(request.url.query), playground.profile))
    except BadInput as error:
        return HTMLResponse(controls_page(State(), playground.profile, str(error)), 422)


def _asked(request: Request) -> State:
    return State.parse(request.query_params.get("state", ""))


def _width(request: Request) -> int:
    text = request.query_params.get("width", "")
    return int(text) if text.isdecimal() and len(text) < 6 else 0


def _answer(playground: Playground, state: State, width: int) -> str:
    answer, seconds = playground.answer(state)
    return answer_part(answer, seconds, commands(answer.state, playground.path, answer.options), width)


def _streamed(pieces: Iterator[dict[str, str]]) -> StreamingResponse:
    """A response with a line of JSON for each piece, sent at once: {"said": text} for progress, {"part": HTML} to show."""
    return StreamingResponse((json.dumps(piece) + "\n" for piece in pieces), media_type="application/x-ndjson")


def _table(playground: Playground, state: State) -> Iterator[dict[str, str]]:
    """The table, repeatedly, while it gets more rows."""
    shown, rows = time.monotonic(), tuple[Row, ...]()
    for rows in playground.compared(state):
        if time.monotonic() - shown > TABLE_SECONDS:
            yield {"part": table_part(rows)}
            shown = time.monotonic()
    yield {"part": table_part(rows)}


def _search(playground: Playground, state: State, width: int) -> Iterator[dict[str, str]]:
    """The progress of a longer search, and the answer at its end."""
    began = time.monotonic()
    try:
        for now in playground.search(state):
            if isinstance(now, Search):
                yield {"said": state_as_text(now, time.monotonic() - began)}
        yield {"part": _answer(playground, state, width)}
    except ZbsolveError as error:
        yield {"part": wrong_part(str(error))}


def _schedule(playground: Playground, state: State) -> Response:
    """The schedule's file, for `zbsolve check`."""
    answer, _ = playground.answer(state)
    if answer.over:
        raise BadInput(f"memory: {answer.over}: there is no schedule to save")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.json"
        answer.schedule.save(path)
        return Response(path.read_bytes(), media_type="application/json", headers={"content-disposition": "attachment"})


class _SafeHeaders:
    """Adds headers to every response: no external resources, no frames, no caching, no referrer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self.app(scope, receive, headed)
