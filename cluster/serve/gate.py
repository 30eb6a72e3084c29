"""What every HTTP request passes before a route sees it: CORS, API keys, and the limit of the body's size."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from ray.exceptions import TaskCancelledError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.config import EngineConfig
from cluster.serve.dashboard.page import PAGE_PATHS
from cluster.serve.errors import AuthenticationError, Problem, problem_of

# Probes and scrapers have no key, nor has a browser before the dashboard's page has asked for one.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", *PAGE_PATHS})


class Gate:
    """ASGI middleware. Its rules come with the replica's settings, later than the application is made: see `open`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rules: Rules = scope["app"].state.rules
        handler = self._guarded
        if rules.cors_origins:
            handler = CORSMiddleware(
                handler, rules.cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["Retry-After"]
            )
        await handler(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        rules: Rules = scope["app"].state.rules
        headers = Headers(scope=scope)
        try:
            if path_in_app(scope) not in OPEN_PATHS:
                rules.check_key(headers.get("authorization"))
            rules.check_length(headers.get("content-length"))
        except (AuthenticationError, HTTPException) as error:
            await respond(problem_of(error))(scope, receive, send)
            return
        await self._app(scope, rules.limited(receive), send)


def path_in_app(scope: Scope) -> str:
    """The path without the application's `route_prefix`, as the routes have it. Nothing else is taken off or resolved
    (`..`, a second prefix), so that no other route answers at a path that is open."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class Rules:
    """Who may call, with how large a body, and from which origins."""

    def __init__(self, config: EngineConfig) -> None:
        self._keys = [key.get_secret_value().encode() for key in config.api_key]
        self._max_body_bytes = config.max_body_bytes
        self.cors_origins: Sequence[str] = tuple(config.cors_origin)

    def check_key(self, authorization: str | None) -> None:
        """Raises AuthenticationError unless the header carries one of the keys, or none is needed.

        Every key is compared, in a time that does not depend on where the first difference is.
        """
        if not self._keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        matches = [secrets.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise AuthenticationError(
                "this server needs an API key: send 'Authorization: Bearer KEY' with one of its keys"
            )

    def check_length(self, content_length: str | None) -> None:
        """Raises HTTPException 413 for a body that is announced as too large."""
        if content_length is not None and content_length.isdecimal() and int(content_length) > self._max_body_bytes:
            raise self._too_large()

    def limited(self, receive: Receive) -> Receive:
        """`receive`, raising HTTPException 413 once the body is larger than allowed, whatever was announced.

        Serve cancels the reading of a client that went away; to the application that is a disconnect like any other.
        """
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            try:
                message = await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than the {self._max_body_bytes} bytes this server takes")


def respond(problem: Problem) -> Response:
    """The HTTP response to a problem."""
    # Escaped to ASCII: a message may quote text of the request that UTF-8 cannot hold.
    body = json.dumps(problem.body, separators=(",", ":"))
    return Response(body, problem.status, problem.headers, "application/json")
