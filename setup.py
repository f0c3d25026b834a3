"""Where the sub-packages lie: shardwise.kernels is kernels/ beside this file, and so on. The rest is in pyproject.toml.

shardwise/ has links to these folders, for programs that run in a checkout. A build does not look at them: zip files and
git with core.symlinks=false leave text files in their place, and a wheel that is made there must be whole too.

Rooms that only a checkout has a use for stay out of a wheel: what they compare with, read and write lies there. A
source archive has them (MANIFEST.in), and gives the same wheel.
"""

import re
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("data", "embeddings", "fbgemm", "inference", "jagged", "kernels", "models", "perf", "planner", "sharding")

# rooms, whose commands say that they need a checkout, and what `pytest perf/` collects there
LEFT_OUT = (
    *("perf/compile/", "perf/counts/", "perf/evidence/", "perf/gpu/", "perf/gpu_scripts/"),
    *("perf/conftest.py", "perf/test_cases.py"),
)

# https://..., once the sources have a public address; docs/project/releasing.md
REPOSITORY = ""


def readme() -> str:
    """README.md as the page on an index: links and pictures lead to the files, or are words alone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    link = rf"[\1]({REPOSITORY}/blob/HEAD/\2)" if REPOSITORY else r"\1"
    return re.sub(r"!?\[([^]]+)\]\((?![a-z]+:|#)([^)\s]+)\)", link, text)


class Build(build_py):
    def run(self) -> None:
        # files of an older tree in build/ would go into the wheel
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "shardwise", ignore_errors=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if not module[2].replace("\\", "/").startswith(LEFT_OUT)]


ROOT = Path(__file__).resolve().parent
missing = [folder for folder in FOLDERS if not (ROOT / folder / "__init__.py").is_file()]
if missing:
    sys.exit(f"shardwise cannot be built from {ROOT}: it lacks {', '.join(missing)}; take a whole checkout or archive")

rooms = [name for folder in FOLDERS for name in (folder, *(f"{folder}.{part}" for part in find_packages(folder)))]
inside = [name for name in rooms if not f"{name.replace('.', '/')}/".startswith(LEFT_OUT)]
own = find_packages("shardwise", exclude=[name for folder in FOLDERS for name in (folder, f"{folder}.*")])
setup(
    cmdclass={"build_py": Build},
    packages=["shardwise", *(f"shardwise.{name}" for name in (*own, *inside))],
    package_dir={f"shardwise.{folder}": folder for folder in FOLDERS},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={
        name: REPOSITORY + place
        for name, place in (("Source", ""), ("Documentation", "/tree/HEAD/docs"), ("Issues", "/issues"))
        if REPOSITORY
    },
)
