"""The dashboard's files: plain HTML, CSS and JavaScript modules that load nothing from elsewhere."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import Response

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # No script, style or picture but our own, and no call but to this server.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

FILES = frozenset(path.name for path in _DIRECTORY.iterdir() if path.suffix in _TYPES)
PAGE_PATHS = frozenset({"/dashboard", *(f"/dashboard/{name}" for name in FILES)})


def page_file(name: str) -> Response:
    """One of the files. Raises HTTPException 404 for any other name."""
    if name not in FILES:
        raise HTTPException(404, f"the dashboard has no file {name!r}")
    return Response(_read(name), headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


@lru_cache
def _read(name: str) -> bytes:
    return (_DIRECTORY / name).read_bytes()
