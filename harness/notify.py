"""Tells the owner that a search has ended: through apprise, which knows how to reach a phone, a chat or a mailbox.

The addresses of ``[notify] urls`` hold passwords and tokens, so they appear in no message, row or log of ours. Sending
comes after everything else and may fail: the result is on the disk by then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from harness.errors import BadInput, CannotStart

SEND_SECONDS = 30


def check(urls: Sequence[str]) -> None:
    """Raise before the night if an address would not be understood; it is named by its place and its scheme only."""
    if not urls:
        return
    try:
        import apprise
    except ImportError as error:
        raise CannotStart(
            "[notify] urls need the package apprise: pip install 'apprise>=2.2,<3', or remove the addresses"
        ) from error
    for number, url in enumerate(urls, 1):
        if not _quietly(apprise.Apprise().add, url):
            scheme = url.partition("://")[0] if "://" in url else "no scheme"
            raise BadInput(
                f"address {number} of [notify] urls is not understood (scheme: {scheme[:20]});"
                " examples: ntfy://TOPIC, mailto://USER:PASSWORD@HOST, json://HOST/PATH"
            )


def tell(urls: Sequence[str], *, title: str, text: str) -> bool:
    """Send one message to every address; False if one of them could not be reached."""
    if not urls:
        return True
    import apprise

    sender = apprise.Apprise()
    for url in urls:
        _quietly(sender.add, url)
    return bool(_quietly(sender.notify, body=text, title=title, timeout=SEND_SECONDS))


def _quietly(call: Any, *arguments: Any, **options: Any) -> Any:
    """Call into apprise without its log lines, which name addresses."""
    logger = logging.getLogger("apprise")
    before = logger.disabled
    logger.disabled = True
    try:
        return call(*arguments, **options)
    finally:
        logger.disabled = before
