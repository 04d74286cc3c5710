"""Hatchling hook: a wheel carries the native files in `llamasrv/_native` and the web UI in `llamasrv/_ui`; an editable
install gets them in place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nativebuild.llama import build_libraries, is_complete, make_plan
from nativebuild.package import install, require_python_headers, stage, wheel_tag
from nativebuild.report import BuildError
from nativebuild.ui import build_ui, install_ui, plan_ui, wants_ui
from nativebuild.ui_tree import files_of


class NativeBuildHook(BuildHookInterface[Any]):
    """Builds what is missing (see native/build.py) before the files of the wheel are gathered."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            plan = make_plan()
            if not is_complete(plan):
                require_python_headers()
            build_libraries(plan)
            staged = stage(plan)
            ui = build_ui(plan_ui(plan.source)) if wants_ui() else None
        except BuildError as error:
            sys.exit(f"llamasrv: error: {error}")
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag()
        if version == "editable":
            install(staged, Path(self.root) / "llamasrv" / "_native")
            install_ui(ui, Path(self.root) / "llamasrv" / "_ui")
        else:
            files = {str(file): f"llamasrv/_native/{file.name}" for file in staged.iterdir()}
            if ui is not None:
                files.update({str(ui / name): f"llamasrv/_ui/{name}" for name in files_of(ui)})
            build_data["force_include"].update(files)
