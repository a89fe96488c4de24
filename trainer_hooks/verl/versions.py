"""The versions of verl that the plugin supports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from trajstore.errors import ConfigurationError, MissingDependencyError

SUPPORTED = ">=0.9.1,<0.10"
"""The trainer modes override private methods, which verl may change in any version."""


def check_verl(installed: str | None = None) -> None:
    """Check that the plugin supports a version of verl.

    Args:
        installed: a version such as ``"0.9.1"``; None = the installed version.

    Raises:
        MissingDependencyError: verl is not installed.
        ConfigurationError: the version is not supported; the message names both.
    """
    try:
        installed = installed or version("verl")
        from packaging.specifiers import SpecifierSet  # comes with verl
    except (PackageNotFoundError, ImportError):
        raise MissingDependencyError("verl", "verl") from None
    if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        raise ConfigurationError(f"verl {installed} is installed, but trainer_hooks.verl needs verl{SUPPORTED}")
