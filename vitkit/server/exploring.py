"""The explorable page of the served model, at /explore/: its files are made once, when somebody first opens it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from vitkit.errors import VitkitError

log = logging.getLogger("vitkit")
Make = Callable[[Callable[[str], None]], Mapping[str, bytes]]


class ExplorablePage:
    """Files by name. No request ever becomes a path.

    Args:
        page: the files of the page itself.
        make: makes those that hold the model, and tells the function that it is given what it is doing. It is called at
            most once, in a thread, because it takes a while.
    """

    def __init__(self, page: Mapping[str, bytes], make: Make) -> None:
        self.page, self._make = dict(page), make
        self.status = ""  # what is being done
        self.error: VitkitError | None = None
        self._made: Mapping[str, bytes] | None = None
        self._lock, self._thread = (
            threading.Lock(),
            threading.Thread(target=self._run, name="vitkit-explore", daemon=True),
        )

    def _say(self, what: str) -> None:
        self.status = what

    def _run(self) -> None:
        try:
            self._made = self._make(self._say)
        except VitkitError as error:
            self.error = error
        except Exception as error:  # the exporter's own
            log.exception("the explorable page could not be made")
            self.error = VitkitError(f"The model could not be exported ({type(error).__name__}); see the server log.")

    def file(self, name: str) -> bytes | None:
        """Return a file of the page, or None if there is none of this name."""
        return self.page.get(name)

    def made(self) -> Mapping[str, bytes] | None:
        """Return the files that hold the model, or None while they are being made; the first call begins to make them.

        Raises:
            VitkitError: they cannot be made.
        """
        with self._lock:
            if self._thread.ident is None:
                self.status = "starting"
                self._thread.start()
        if self.error is not None:
            raise self.error
        return self._made

    def wait(self) -> None:
        """Wait until the files are made."""
        if self._thread.ident is not None:
            self._thread.join()
