"""Our own flags beside the native ones."""

from __future__ import annotations

import pytest

from llamasrv.cli.flags import FLAGS, Flag, FlagError, at_least, split, usage

NUMBER = Flag("--some-number", "N", "some_number", at_least(2), 7, "LLAMASRV_SOME_NUMBER", "a number")


@pytest.mark.parametrize(
    ("args", "environ", "value", "rest"),
    [
        ([], {}, 7, []),
        (["-m", "x"], {}, 7, ["-m", "x"]),
        (["-m", "x", "--some-number", "9", "-c", "5"], {}, 9, ["-m", "x", "-c", "5"]),
        (["--some-number=9"], {}, 9, []),
        (["--some_number", "9"], {}, 9, []),
        (["--some-number", "8", "--some-number", "9"], {}, 9, []),
        ([], {"LLAMASRV_SOME_NUMBER": "3"}, 3, []),
        ([], {"LLAMASRV_SOME_NUMBER": ""}, 7, []),
        (["--some-number", "9"], {"LLAMASRV_SOME_NUMBER": "3"}, 9, []),
        (["--some-numbers", "9"], {}, 7, ["--some-numbers", "9"]),
        (["--prompt=--some-number"], {}, 7, ["--prompt=--some-number"]),
    ],
)
def test_values_and_what_is_left_for_the_native_parser(
    args: list[str], environ: dict[str, str], value: int, rest: list[str]
) -> None:
    assert split(args, environ, [NUMBER]) == ({"some_number": value}, rest)


@pytest.mark.parametrize(
    ("args", "environ", "message"),
    [
        (["--some-number"], {}, "expected a value for --some-number"),
        (["--some-number", "x"], {}, "invalid value 'x' for --some-number: expected an integer"),
        (["--some-number=1"], {}, "invalid value '1' for --some-number: must be at least 2"),
        ([], {"LLAMASRV_SOME_NUMBER": "no"}, "invalid value 'no' for LLAMASRV_SOME_NUMBER: expected an integer"),
    ],
)
def test_bad_values_are_named(args: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        split(args, environ, [NUMBER])
    assert str(caught.value) == message


def test_help_names_every_flag_with_default_and_variable() -> None:
    text = usage()
    for flag in FLAGS:
        assert f"\n{flag.name} {flag.metavar} ".rstrip() in text
        assert not flag.metavar or f"(default: {flag.default})" in text
        assert f"(env: {flag.env})" in text


def test_flags_do_not_share_names_or_variables() -> None:
    for names in ([flag.name for flag in FLAGS], [flag.env for flag in FLAGS], [flag.dest for flag in FLAGS]):
        assert len(set(names)) == len(names)
    assert all(flag.env.startswith("LLAMASRV_") for flag in FLAGS)
