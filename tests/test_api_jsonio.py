"""Request bodies that are no JSON, or too much of it; JSON that goes out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from llamasrv.api import jsonio
from llamasrv.api.errors import ApiError


def refused(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        jsonio.parse_object(body)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value.message


def test_an_object_is_read() -> None:
    assert jsonio.parse_object('{"a": [1, 2.5, "é\\u0000"]}'.encode()) == {"a": [1, 2.5, "é\0"]}


def test_a_utf8_byte_order_mark_is_skipped() -> None:
    assert jsonio.parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_the_last_of_equal_keys_wins() -> None:
    assert jsonio.parse_object(b'{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{:",
        b'{"a": 1,}',
        b'{"a": 1} x',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e400}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "b\tc"}',
        b'{"a": "b',
        b"// comment\n{}",
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-32"),
    ],
)
def test_what_is_not_json_in_utf8_is_a_400_that_says_so(body: bytes) -> None:
    assert refused(body).startswith("parse error")


@pytest.mark.parametrize(
    ("body", "type_"), [(b"[]", "array"), (b"5", "number"), (b'"x"', "string"), (b"null", "null"), (b"true", "boolean")]
)
def test_a_top_level_that_is_no_object_is_named(body: bytes, type_: str) -> None:
    assert refused(body) == f"the request body must be a JSON object, but is {type_}"


@pytest.mark.parametrize("depth", [jsonio.MAX_DEPTH + 1, 3_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_refused_with_and_without_its_end(depth: int, opening: bytes, closing: bytes) -> None:
    for body in (opening * depth + b"1" + closing * depth, opening * depth):
        assert "too deeply" in refused(b'{"tools": ' + body + b"}")


def test_nesting_up_to_the_limit_is_read() -> None:
    depth = jsonio.MAX_DEPTH - 1
    value: Any = jsonio.parse_object(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")
    for _ in range(depth):
        value = value["a"] if isinstance(value, dict) else value[0]
    assert value == []


def test_many_brackets_beside_one_another_or_in_strings_are_not_depth() -> None:
    body = json.dumps({"a": [[1]] * 5_000, "b": '[[[{{{"\\' * 5_000}).encode()
    assert len(jsonio.parse_object(body)["a"]) == 5_000


def test_integers_beyond_64_bits_come_as_float() -> None:
    assert isinstance(jsonio.parse_object(b'{"a": 99999999999999999999}')["a"], float)


def test_infinities_and_nan_go_out_as_null() -> None:
    assert jsonio.dumps([math.inf, -math.inf, math.nan]) == b"[null,null,null]"


def test_broken_utf8_is_replaced() -> None:
    assert jsonio.to_text(b"a\xf0\x9fb\xff") == "a\ufffdb\ufffd"
