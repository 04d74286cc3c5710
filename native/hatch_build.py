"""Hatchling hook: a wheel carries the native files in `llamasrv/_native`, an editable install gets them in place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nativebuild.llama import build_libraries, make_plan
from nativebuild.package import install, stage, wheel_tag
from nativebuild.report import BuildError


class NativeBuildHook(BuildHookInterface[Any]):
    """Builds what is missing (see native/build.py) before the files of the wheel are gathered."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            plan = make_plan()
            build_libraries(plan)
            staged = stage(plan)
        except BuildError as error:
            sys.exit(f"llamasrv: error: {error}")
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag()
        if version == "editable":
            install(staged, Path(self.root) / "llamasrv" / "_native")
        else:
            files = {str(file): f"llamasrv/_native/{file.name}" for file in staged.iterdir()}
            build_data["force_include"].update(files)
