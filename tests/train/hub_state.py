"""What the Hub of the tests keeps, and what goes wrong with it."""

import hashlib
from dataclasses import dataclass, field

TOKEN = "hf_" + "a1" * 17
READER = "hf_" + "b2" * 17  # may only read
FINE = "hf_" + "c3" * 17  # of fine grain, without the right to write here
ROLES = {TOKEN: "write", READER: "read", FINE: "fineGrained"}
START = {".gitattributes": b""}


@dataclass
class Repo:
    """One repository: every commit's files, the files that are large, and the tags."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    large: set[str] = field(default_factory=set)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """The branch's files."""
        return self.commits[self.head]

    def commit(self, files: dict[str, bytes]) -> str:
        """Record a new state of all files and return its hash."""
        state = repr((len(self.commits), sorted(files.items()))).encode()
        self.head = hashlib.sha1(state).hexdigest()
        self.commits[self.head] = files
        return self.head


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD path" the pattern finds.

    `how` is "cut", the connection closed amid the body; "mute", closed after acting, before the answer; or a status.
    """

    where: str
    how: str | int
    times: int = 1000


def blob(data: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
