"""Every request field has a test, and the document that says so is up to date."""

from __future__ import annotations

import pytest

import api_coverage


def test_every_field_has_a_test() -> None:
    _, missing = api_coverage.build()
    assert missing == []


def test_the_document_lists_every_field() -> None:
    text, _ = api_coverage.build()
    kept = api_coverage.TARGET.read_text()
    assert api_coverage.fields_of(kept) == api_coverage.fields_of(text), "run scripts/api_coverage.py"


def test_a_field_that_no_test_sends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {file: names - {"n_discard"} for file, names in api_coverage.tests().items()}
    monkeypatch.setattr(api_coverage, "tests", lambda: sent)
    _, missing = api_coverage.build()
    assert missing == ["n_discard"]
