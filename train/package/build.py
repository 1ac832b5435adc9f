"""The build step of a wheel and an sdist: everything goes under headstart, so that site-packages gets one name.

A checkout keeps its top-level folders and an editable install finds them there; a wheel's modules import each other
as `headstart.heads` and so on.
"""

import re
import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

FOLDERS = ("heads", "inference", "data", "eval", "train", "ops", "conf", "examples/tiny")
FRONT = "train/package/"  # the folder whose modules become headstart's own
SCRIPTS = ("examples/", f"{FRONT}build.py")  # modules that no installed command runs
IMPORT = re.compile(r"^(\s*(?:from|import) )(?=(?:heads|inference|data|eval|train|ops)\b)", re.MULTILINE)
PATH = re.compile(r"sys\.path\[0\] \+?= .*")  # the line by which a script keeps its own folder from shadowing modules


class BuildPackage(build_py):
    """The build step: copies all folders below headstart and renames their imports."""

    def run(self) -> None:
        """Write the installed files; an editable install has none."""
        if self.editable_mode:
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # otherwise files of an earlier build would be installed too
        for source in self.get_source_files():
            path = source.removeprefix(FRONT) if source.startswith(FRONT) else source
            if source.endswith(".py") and source.startswith(SCRIPTS):
                continue
            target = Path(self.build_lib, "headstart", path)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = Path(source).read_bytes()
            target.write_bytes(renamed(content.decode()).encode() if path.endswith(".py") else content)

    def get_source_files(self) -> list[str]:
        """Return the files of all folders, except untracked local ones."""
        files = [file for folder in FOLDERS for file in sorted(Path(folder).rglob("*")) if file.is_file()]
        return [file.as_posix() for file in files if not {"__pycache__", "local"}.intersection(file.parts)]


def renamed(source: str) -> str:
    """Return a module's source with imports of our packages below headstart."""
    return IMPORT.sub(r"\1headstart.", PATH.sub("del sys.path[0]", source))
