"""Every way in which a request can fail, as a status and JSON: `{"error": {"code": ..., "message": ...}}`."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from batches import Closed, ModelFailed, QueueFull
from instances import BadRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# what a client may try again, and after how many seconds
_LATER = {"Retry-After": "1"}


class Refused(Exception):
    """A request that is answered with `status` before anybody looks into its body."""

    def __init__(self, status: int, code: str, message: str, permitted: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.permitted = status, code, permitted


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """ValueError for NaN and infinities, which JSON does not have."""
    return web.json_response(text=json.dumps(content, allow_nan=False), status=status, headers=headers)


@web.middleware
async def respond_to_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a handler raises."""
    try:
        return await handler(request)
    except BadRequest as error:
        return json_response({"error": error.as_json()}, status=400)
    except Refused as error:
        return _error(error.status, error.code, str(error), error.permitted)
    except QueueFull as error:
        return _error(503, "queue_full", str(error))
    except Closed as error:
        return _error(503, "draining", str(error))
    except ModelFailed as error:
        _log(error)
        return _error(500, "model_failed", str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return _error(413, "body_too_large", str(error.text), f"at most {request.client_max_size} bytes")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, "wrong_method", f"{request.path} has no {request.method}", allowed, {"Allow": allowed})
    except web.HTTPException as error:
        return _error(error.status, error.reason.lower().replace(" ", "_"), f"{request.path}: {error.reason}")
    except Exception as error:
        # ours to mend: the client gets the kind, the log the rest
        _log(error)
        return _error(500, "internal", type(error).__name__)


def _error(
    status: int, code: str, message: str, permitted: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    content = {"code": code, "message": message, **({"permitted": permitted} if permitted else {})}
    return json_response({"error": content}, status=status, headers=_LATER if status == 503 else headers)


def _log(error: Exception) -> None:
    print(f"server: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
