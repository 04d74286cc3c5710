"""Grammars that libllama could not survive, and those that it can."""

from __future__ import annotations

import pytest

from llamasrv.api import gbnf

ENDLESS = [
    'root ::= root "x"',
    'root ::= a "x"\na ::= root',
    # a is empty only through b, which libllama overlooks
    'root ::= a root "x" | "y"\na ::= b\nb ::= ""',
    'root ::= a{0,2}\na ::= root | "x"',
    'root ::= a{2}\na ::= ("x"?) root "y" | "z"',
    'root ::= [] root "x"',
]


@pytest.mark.parametrize("text", ENDLESS)
def test_left_recursion_is_found_also_behind_empty_rules(text: str) -> None:
    with pytest.raises(gbnf.GrammarError, match="left recursion"):
        gbnf.check(text)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "x" root | "y"',
        'root ::= ("a"?)*',
        'root ::= (("a" | "b")* "c"?)+ "d"',
        'root ::= "a"{2} "b"{1,} "c"{0,3} "d"{0,0}',
        'root ::= [a-zA-Z0-9_\\-\\]\\x41\\u00e9]+ [^\\n"] [-a] [a-] []',
        'root ::= a |\n  b # comment "(\na ::= "x"\r\nb ::= (\n"y" # inside\n)\n',
        "root ::= <[3]> !<[4]> <name> !<x> .",
        'root ::= "é\\"\\\\\\t" ""',
        'root ::= a\n\n\na ::= "1"\na ::= "2"',
        'root ::= ("a" ) * ?',
        "root ::=",
        # an empty alternative reaches over the line's end
        'root ::= "x" |\n\n',
        "".join(f'r{i} ::= "x" r{i + 1}\n' for i in range(5_000)) + 'r5000 ::= "a"\nroot ::= r0\n',
        "root ::= " + "(" * gbnf.MAX_NESTING + '"a"' + ")" * gbnf.MAX_NESTING,
        "root ::= " + " | ".join(f'"word{i}"' for i in range(9_000)),
        "root ::= " + "(" * 200 + '"a"' + ")" * 200 + "\nb ::= " + "(" * 200 + '"b"' + ")" * 200,
    ],
)
def test_sound_grammars_pass(text: str) -> None:
    gbnf.check(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rule named 'root'"),
        ("# only a comment", "no rule named 'root'"),
        ('Root ::= "x"', "no rule named 'root'"),
        ("root ::= missing", "undefined rule 'missing'"),
        ('root := "x"', "expecting ::= at line 1, column 6"),
        ('root ::= "x"\nother = "y"', "expecting ::= at line 2, column 7"),
        ('root ::= "x', "unexpected end of literal"),
        ('root ::= "\\q"', "unknown escape"),
        ("root ::= [a", "unexpected end of character class"),
        ("root ::= [\\q]", "known escape"),
        ('root ::= ("x"', "expecting ')'"),
        ('root ::= "x")', "expecting a new line"),
        ("root ::= *", "something to repeat"),
        ('root ::= ""*', "something to repeat"),
        ('root ::= "x"{', "an integer"),
        ('root ::= "x"{1;2}', "expecting '}'"),
        ('root ::= "x"{3000}', "exceeds 2000"),
        ('root ::= "x"{99999999999999999999999}', "out of range"),
        ('root ::= "x"{5,3}', "below its minimum"),
        ("root ::= <", "a token"),
        ('root ::= "a\0b"', "NUL"),
        ('root ::= "x" é', "expecting a new line"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(gbnf.GrammarError) as caught:
        gbnf.check(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000,
        "root ::= " + "(" * 60_000,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5_000)) + 'r5000 ::= "a"\n',
        "root ::= r0\n" + "".join(f'r{i} ::= "x"? r{i + 1} "y"\n' for i in range(5_000)) + 'r5000 ::= "a"\n',
        'root ::= (("x"?){0,2000}){0,2000} "y"',
    ],
)
def test_depth_that_libllama_would_recurse_into_is_refused(text: str) -> None:
    with pytest.raises(gbnf.GrammarError, match="too deep"):
        gbnf.check(text)


def test_rules_that_begin_in_exponentially_many_ways_are_refused() -> None:
    text = "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} "x" | r{i + 1} "y"\n' for i in range(40)) + 'r40 ::= "a"\n'
    with pytest.raises(gbnf.GrammarError, match="too complex"):
        gbnf.check(text)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "' + "a" * 10_000 + '"{2000}',
        "root ::= " + '"aaaaaaaaaa"{0,2000} ' * 60,
        "root ::= #" + "x" * 1_000_000,
    ],
)
def test_grammars_that_grow_beyond_memory_are_refused(text: str) -> None:
    with pytest.raises(gbnf.GrammarError, match="too large"):
        gbnf.check(text)
