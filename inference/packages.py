"""Predict factories in packages of torch.package, as TorchRec's `model_packager` makes them for servers.

A package has the code of the factory, its configs and extra files. shardwise itself, torch and what a packager names
extern are not in it: the process that loads it has them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from .predict import PredictFactory

if TYPE_CHECKING:
    from torch.package.importer import Importer
    from torch.package.package_exporter import PackageExporter
    from torch.package.package_importer import PackageImporter

T = TypeVar("T")

LOADER_MODULE: str = "__module_loader"
LOADER_FACTORY: str = "MODULE_FACTORY"
LOADER_CODE: str = f"""
import %PACKAGE%

{LOADER_FACTORY} = %PACKAGE%.%CLASS%
"""
CONFIG_MODULE: str = "__configs"
# before the loader's own code, where the factory was saved under the alias
_INSTALL = "import shardwise.torchrec\nshardwise.torchrec.install()\n"
# of kernels and tables nothing is Python alone
_EXTERN = ["shardwise", "shardwise.**", "torchrec", "torchrec.**", "fbgemm_gpu", "fbgemm_gpu.**", "sys"]


def load_config_text(name: str) -> str:
    """A text among the configs of the package that the caller's code is from.

    Raises:
        RuntimeError: the caller's code is not from a package.
    """
    return _package_of_caller("load_config_text").load_text(CONFIG_MODULE, name)


def load_pickle_config(name: str, clazz: type[T]) -> T:
    """An object among the configs of the package that the caller's code is from.

    Raises:
        RuntimeError: the caller's code is not from a package.
        TypeError: the object is no `clazz`.
    """
    config = _package_of_caller("load_pickle_config").load_pickle(CONFIG_MODULE, name)
    if not isinstance(config, clazz):
        raise TypeError(f"config {name!r} is a {type(config).__name__}, not a {clazz.__name__}")
    return config


def _package_of_caller(asked: str) -> PackageImporter:
    frame = sys._getframe(2)
    names = frame.f_globals
    if "__torch_package__" not in names:
        raise RuntimeError(f"{asked} reads a package of torch.package: {names.get('__name__')} was not loaded from one")
    # what code of a package imports as torch_package_importer is the package
    importer: PackageImporter = names["__builtins__"]["__import__"]("torch_package_importer")
    return importer


class PredictFactoryPackager:
    """Saves a `PredictFactory` in a package; a subclass says which modules are not in it.

    Example:
        >>> class Packager(PredictFactoryPackager):
        ...     @classmethod
        ...     def set_extern_modules(cls, pe):
        ...         pe.extern(["numpy"])
        >>> Packager.save_predict_factory(Factory, {"model.json": text, "state": model.state_dict()}, "model.pt", {})
        >>> factory = torch.package.PackageImporter("model.pt").import_module("__module_loader").MODULE_FACTORY()
    """

    @classmethod
    def set_extern_modules(cls, pe: PackageExporter) -> None:
        """Name modules (`pe.extern`) that the loading process has."""

    @classmethod
    def set_mocked_modules(cls, pe: PackageExporter) -> None:
        """Name modules (`pe.mock`) that the packaged code imports and never uses."""

    @classmethod
    def save_predict_factory(
        cls,
        predict_factory: type[PredictFactory],
        configs: Mapping[str, Any],
        output: str | Path | BinaryIO,
        extra_files: Mapping[str, str | bytes],
        loader_code: str = LOADER_CODE,
        package_importer: Importer | list[Importer] | None = None,
    ) -> None:
        """Write the package: the modules that the factory's class comes from, configs and extra files.

        Args:
            predict_factory: the class; it is made without arguments where it is loaded.
            configs: texts, which `load_config_text` reads, and objects to pickle, which `load_pickle_config` reads.
            output: a path or a file to write to.
            extra_files: by name, for whoever reads the package without running it.
            loader_code: Python that leaves the class as `MODULE_FACTORY`; %PACKAGE% and %CLASS% stand for its module
                and name.
            package_importer: where modules are looked for; by default this process.

        Raises:
            TypeError: an extra file is neither text nor bytes.
            ValueError: the class is of a program's own file, which is `__main__` and nothing that can be imported.
        """
        from torch.package.importer import sys_importer
        from torch.package.package_exporter import PackageExporter

        module = predict_factory.__module__
        if module == "__main__":
            raise ValueError(f"{predict_factory.__name__} is defined in __main__: move it to a module of its own")
        if module.startswith("<torch_package_"):
            # a class that was loaded from another package
            module = module.partition(".")[2]
        for name, content in extra_files.items():
            if not isinstance(content, str | bytes):
                raise TypeError(f"extra file {name!r} must be text or bytes, got {type(content).__name__}")
        code = loader_code.replace("%PACKAGE%", module).replace("%CLASS%", predict_factory.__name__)
        importer = sys_importer if package_importer is None else package_importer
        with PackageExporter(output, importer=importer) as package:
            package.extern(_EXTERN)
            cls.set_extern_modules(package)
            cls.set_mocked_modules(package)
            package.intern("**")
            for name, content in extra_files.items():
                if isinstance(content, str):
                    package.save_text("extra_files", name, content)
                else:
                    package.save_binary("extra_files", name, content)
            package.save_source_string(LOADER_MODULE, (_INSTALL if _is_aliased() else "") + code)
            for name, config in configs.items():
                if isinstance(config, str):
                    package.save_text(CONFIG_MODULE, name, config)
                else:
                    package.save_pickle(CONFIG_MODULE, name, config)
            package.save_module(module)


def _is_aliased() -> bool:
    """Is `torchrec` of this process ours?"""
    spec = find_spec("torchrec")
    return spec is not None and type(spec.loader).__module__.startswith("shardwise.")
