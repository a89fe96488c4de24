"""The versions of verl that the plugin's overrides were written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from trajstore.errors import ConfigurationError, MissingDependencyError

SUPPORTED = ">=0.9.1,<0.10"
"""What the trainer modes override has names with an underscore: verl may change it from one version to the next."""


def check_verl(installed: str | None = None) -> None:
    """Return if the plugin works with a version of verl.

    Args:
        installed: the version, as ``"0.9.1"``; None: of the verl that is installed.

    Raises:
        MissingDependencyError: verl is not installed.
        ConfigurationError: another version is wanted; names both.
    """
    try:
        installed = installed or version("verl")
        from packaging.specifiers import SpecifierSet  # comes with verl
    except (PackageNotFoundError, ImportError):
        raise MissingDependencyError("verl", "verl") from None
    if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        raise ConfigurationError(f"verl {installed} is installed, but trainer_hooks.verl needs verl{SUPPORTED}")
