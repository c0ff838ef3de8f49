"""From the bytes of a body to a checked request, and what becomes of fields that nothing here reads.

A misspelt field that is silently ignored costs its sender hours. So it is named in a header of the answer and once in
the log, or refused if the server is strict. Owns this policy. Refuses to know any single field.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

from pydantic import ValidationError

from peagle.errors import InvalidParameterError
from server.schemas.client_model import ClientModel, ignored_fields

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-ignored-fields"
_MOST_NAMED = 16

Body = TypeVar("Body", bound=ClientModel)


def parse_body(body: bytes, kind: type[Body], *, is_strict: bool) -> Body:
    """Check a body.

    Raises:
        pydantic.ValidationError: not JSON, or not a request that is served.
        InvalidParameterError: a number of thousands of digits, which Python refuses to read; or, if the server is
            strict, a field that nothing here reads.
    """
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError:
        raise
    except ValueError as error:
        raise InvalidParameterError("The body has a number that is too long to be read.") from error
    if is_strict:
        for path in ignored_fields(parsed):
            raise InvalidParameterError(
                f"'{path}' is not a field that this server knows; leave it out, or start the server without "
                "--strict-params.",
                param=path,
                code="unsupported_parameter",
            )
    return parsed


def ignored_header(body: ClientModel) -> Mapping[str, str]:
    """The header that names the fields which have no effect; none if there are none."""
    names = list(islice(ignored_fields(body), _MOST_NAMED))
    if not names:
        return {}
    value = ", ".join(names).encode("ascii", "backslashreplace").decode("ascii")
    printable = "".join(char if char.isprintable() else "?" for char in value)
    logger.warning("a request has fields without effect: %s", printable)
    return {IGNORED_HEADER: printable}
