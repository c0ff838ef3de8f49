"""Images and containers without a Docker engine: Debian's buildah and podman, on a base made of Debian's packages.

Owns the settings that let both run inside a virtual machine as root, and the stand-in for the official Python image.
Refuses to know what is built.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.tools import find_tool, run, succeed
from tests.source_tree import ROOT

BASE = "localhost/peagle-base"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
pull_policy = "never"
[network]
network_backend = "netavark"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{directory}/graph"
runroot = "{directory}/run"
"""
_BASE_DOCKERFILE = """\
FROM scratch
ADD base.tar /
COPY ca-certificates.crt /etc/ssl/certs/
COPY pip.conf /etc/
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Containers:
    """Runs buildah and podman on a store of its own in `directory`, which keeps layers from one run to the next."""

    directory: Path

    @classmethod
    def create(cls, directory: Path) -> Containers:
        """Skips the test where a tool is not here, or where this user may not."""
        for tool in ("buildah", "podman", "mmdebstrap", "runc"):
            find_tool(tool)
        if os.geteuid() != 0:
            pytest.skip("building a base image from Debian's packages needs root")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "containers.conf").write_text(_CONTAINERS_CONF, encoding="utf-8")
        (directory / "storage.conf").write_text(_STORAGE_CONF.format(directory=directory), encoding="utf-8")
        return cls(directory=directory)

    def podman(self, *arguments: str | Path) -> str:
        """Run podman; returns stdout."""
        return succeed("podman", *arguments, env=self._environment()).strip()

    def remove(self, name: str) -> None:
        """Remove a container or pod of ours, if it is there."""
        run("podman", "rm", "--force", "--volumes", "--time", "5", name, env=self._environment())

    def build(self, tag: str, *, target: str) -> None:
        """Build a target of the Dockerfile for CPU, with torch from a directory of wheels or an index."""
        self._build_base()
        wheels, index = os.environ.get("PIP_FIND_LINKS", ""), os.environ.get("TORCH_INDEX", "")
        if not index and not (wheels and list(Path(wheels).glob("torch-*+cpu-*.whl"))):
            pytest.skip("no CPU wheel of torch: set TORCH_INDEX, or PIP_FIND_LINKS to a directory that has one")
        flags = ["--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", f"TORCH_INDEX={index}", "--target", target]
        if wheels:
            flags += ["--volume", f"{wheels}:/wheels:ro"]
        self._buildah(*flags, "--layers", "--tag", tag, ROOT)

    def _build_base(self) -> None:
        tarball = self.directory / "base.tar"
        if not tarball.exists():
            packages = "ca-certificates,python3,python3-pip,python3-venv"
            partial = self.directory / "partial.tar"
            done = run("mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", partial)
            if done.returncode != 0:
                pytest.skip(f"mmdebstrap cannot make the base image: {done.stderr[-300:]}")
            partial.rename(tarball)
        context = self.directory / "base"
        context.mkdir(exist_ok=True)
        (context / "base.tar").unlink(missing_ok=True)
        os.link(tarball, context / "base.tar")
        shutil.copy(CERTIFICATES, context)
        pip_conf = f"[global]\ncert = {CERTIFICATES}\nfind-links = /wheels\n"
        (context / "pip.conf").write_text(pip_conf, encoding="utf-8")
        (context / "Dockerfile").write_text(_BASE_DOCKERFILE, encoding="utf-8")
        self._buildah("--layers", "--tag", BASE, context)

    def _buildah(self, *arguments: str | Path) -> None:
        command = ["nice", "buildah", "bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--quiet"]
        succeed(*command, *arguments, env=self._environment())

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "CONTAINERS_CONF": str(self.directory / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.directory / "storage.conf"),
        }
