"""`within`: a deadline for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float, call: Callable[[], None]) -> None:
    """`call()`, in a thread of its own, which is left behind when it takes too long. Raises what it raises.

    Raises:
        TimeoutError: it takes longer than `seconds`.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"not done within {seconds:g} s")
    if errors:
        raise errors[0]
