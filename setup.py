"""Where the sub-packages lie: shardwise.kernels is kernels/ beside this file, and so on. The rest is in pyproject.toml.

shardwise/ has links to these folders, for programs that run in a checkout. A build does not look at them: zip files and
git with core.symlinks=false leave text files in their place, and a wheel that is made there must be whole too.

Rooms that only a checkout has a use for stay out of a wheel: what they compare with, read and write lies there.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = ("data", "embeddings", "inference", "jagged", "kernels", "models", "perf", "planner", "sharding")

# their commands say that they need a checkout
LEFT_OUT = ("perf.compile", "perf.counts", "perf.evidence", "perf.gpu", "perf.gpu_scripts")

ROOT = Path(__file__).resolve().parent
missing = [folder for folder in FOLDERS if not (ROOT / folder / "__init__.py").is_file()]
if missing:
    sys.exit(f"shardwise cannot be built from {ROOT}: it lacks {', '.join(missing)}; take a whole checkout or archive")

rooms = [name for folder in FOLDERS for name in (folder, *(f"{folder}.{part}" for part in find_packages(folder)))]
inside = [name for name in rooms if not f"{name}.".startswith(tuple(f"{room}." for room in LEFT_OUT))]
own = find_packages("shardwise", exclude=[name for folder in FOLDERS for name in (folder, f"{folder}.*")])
setup(
    packages=["shardwise", *(f"shardwise.{name}" for name in (*own, *inside))],
    package_dir={f"shardwise.{folder}": folder for folder in FOLDERS},
)
