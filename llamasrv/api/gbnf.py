"""Reads a GBNF grammar far enough to tell whether libllama can work with it.

libllama recurses over brackets and over chains of rules, multiplies out repetitions, and does not see a left recursion
behind rules that are empty only through others; a hostile grammar overflows its stack, fills the memory or never ends.
:func:`check` finds these beforehand, in time linear in the grammar. Syntax is that of libllama's own parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: Brackets within brackets; the bridge has the same limit.
MAX_NESTING = 256
#: Rules that may begin with one another in a row.
MAX_CHAIN = 1000
#: Elements of all rules after repetitions are multiplied out.
MAX_ELEMENTS = 1_000_000
#: Characters of the grammar's text.
MAX_LENGTH = 1_000_000
#: Ways from a rule to what it may begin with, over all rules; libllama follows each of them.
MAX_WAYS = 5_000_000
#: Ways in which a text may begin: libllama compares each with every other.
MAX_BEGINNINGS = 10_000
#: Rules; the bridge has the same limit.
MAX_RULES = 10_000
#: Limits of libllama: a count above the first is an error, a maximum above it means "no maximum".
MAX_REPEAT = 2000

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])"
_LITERAL = re.compile(rf'(?:{_ESCAPE}|[^\\"])*')
_CHAR = re.compile(rf"{_ESCAPE}|[^\\]", re.DOTALL)
_ANY_ESCAPE = re.compile(_ESCAPE)
_TOKEN = re.compile(r"<\[[0-9]+\]>|<[^>]*>")

#: Element of an alternative that is no rule: a character, a class, a token.
_TERMINAL = -1


class GrammarError(ValueError):
    """The grammar cannot be used; the text says why."""


@dataclass(slots=True)
class _Rule:
    """Alternatives of elements ``(rule or _TERMINAL, how many of them in a row)``.

    ``chain``: libllama makes a chain of this many rules of it.
    """

    alternatives: list[list[tuple[int, int]]] = field(default_factory=list)
    chain: int = 1


def check(text: str) -> None:
    """Raises :class:`GrammarError` if ``text`` is no grammar with a rule ``root`` or would overtax libllama."""
    if len(text) > MAX_LENGTH:
        raise GrammarError(f"the grammar is too large ({len(text)} characters, limit {MAX_LENGTH})")
    if "\0" in text:
        raise GrammarError("the grammar contains a NUL character")
    if text.count("::=") > MAX_RULES:
        raise GrammarError(f"the grammar has too many rules (limit {MAX_RULES})")
    parser = _Parser(text)
    _analyse(parser.parse(), parser.root)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._rules: list[_Rule] = []
        self._names: dict[str, int] = {}
        self._n_elements = 0

    def parse(self) -> list[_Rule]:
        self._skip(lines=True)
        while self._pos < len(self._text):
            self._rule()
        if "root" not in self._names:
            raise GrammarError("there is no rule named 'root'")
        for name, index in self._names.items():
            if not self._rules[index].alternatives:
                raise GrammarError(f"undefined rule '{name}'")
        return self._rules

    @property
    def root(self) -> int:
        """Number of the rule that everything begins with, once the text is parsed."""
        return self._names["root"]

    def _skip(self, lines: bool) -> None:
        match = (_SPACE_LINES if lines else _SPACE).match(self._text, self._pos)
        if match:
            self._pos = match.end()

    def _at(self, text: str) -> bool:
        return self._text.startswith(text, self._pos)

    def _fail(self, message: str) -> GrammarError:
        line = self._text.count("\n", 0, self._pos) + 1
        column = self._pos - self._text.rfind("\n", 0, self._pos)
        return GrammarError(f"{message} at line {line}, column {column}")

    def _take(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._pos)
        if not match:
            raise self._fail(f"expecting {what}")
        self._pos = match.end()
        return match.group()

    def _named(self, name: str) -> int:
        index = self._names.get(name)
        if index is None:
            index = self._names[name] = self._new_rule()
        return index

    def _new_rule(self) -> int:
        self._rules.append(_Rule())
        return len(self._rules) - 1

    def _rule(self) -> None:
        name = self._take(_NAME, "a rule name")
        index = self._named(name)
        self._skip(lines=False)
        if not self._at("::="):
            raise self._fail("expecting ::=")
        self._pos += 3
        self._skip(lines=True)
        self._rules[index] = _Rule(self._alternatives())
        if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
            raise self._fail("expecting a new line")
        self._skip(lines=True)

    def _alternatives(self) -> list[list[tuple[int, int]]]:
        """Everything up to the end of the rule. Groups are kept on a list, so that depth costs no stack."""
        groups: list[tuple[list[list[tuple[int, int]]], _Sequence]] = []
        done: list[list[tuple[int, int]]] = []
        now = _Sequence()
        text = self._text
        while True:
            char = text[self._pos] if self._pos < len(text) else ""
            if char == '"':
                self._pos += 1
                literal = self._take(_LITERAL, "a literal")
                if not self._at('"'):
                    raise self._fail("unknown escape" if self._at("\\") else "unexpected end of literal")
                self._pos += 1
                now.add(_TERMINAL, len(_ANY_ESCAPE.sub(".", literal)))
            elif char == "[":
                now.add(_TERMINAL, self._char_class(), single=True)
            elif char == ".":
                self._pos += 1
                now.add(_TERMINAL, 1)
            elif char in ("<", "!"):
                self._pos += char == "!"
                self._take(_TOKEN, "a token such as <[1]> or <name>")
                now.add(_TERMINAL, 1)
            elif char == "(":
                self._pos += 1
                self._skip(lines=True)
                groups.append((done, now))
                if len(groups) > MAX_NESTING:
                    raise GrammarError(f"the grammar is too deep: more than {MAX_NESTING} brackets within one another")
                done, now = [], _Sequence()
                continue
            elif char == ")" and groups:
                self._pos += 1
                group = self._new_rule()
                self._rules[group].alternatives = [*done, self._close(now)]
                done, now = groups.pop()
                now.add(group, 1)
            elif char in ("*", "+", "?", "{"):
                self._repetition(char, now, nested=bool(groups))
                continue
            elif char == "|":
                self._pos += 1
                self._skip(lines=True)
                done.append(self._close(now))
                now = _Sequence()
                continue
            elif _NAME.match(char):
                now.add(self._named(self._take(_NAME, "a rule name")), 1)
            elif groups:
                raise self._fail("expecting ')'")
            else:
                return [*done, self._close(now)]
            self._skip(lines=bool(groups))

    def _close(self, sequence: _Sequence) -> list[tuple[int, int]]:
        self._count(sequence.size + 1)
        return sequence.elements

    def _count(self, n_elements: int) -> None:
        self._n_elements += n_elements
        if self._n_elements > MAX_ELEMENTS:
            raise GrammarError(f"the grammar is too large (limit {MAX_ELEMENTS} elements after repetitions)")

    def _char_class(self) -> int:
        """Move behind the class; its number of elements."""
        self._pos += 1
        text = self._text
        if self._at("^"):
            self._pos += 1
        n_elements = 0
        while not self._at("]"):
            self._class_char()
            n_elements += 1
            if self._at("-") and not text.startswith("]", self._pos + 1):
                self._pos += 1
                self._class_char()
                n_elements += 1
        self._pos += 1
        return n_elements

    def _class_char(self) -> None:
        if self._pos >= len(self._text):
            raise self._fail("unexpected end of character class")
        self._take(_CHAR, "a known escape")

    def _repetition(self, char: str, sequence: _Sequence, nested: bool) -> None:
        self._pos += 1
        self._skip(lines=nested)
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, None)}[char]
        if char == "{":
            least, most = self._counts(nested)
        if not sequence.last:
            raise self._fail("expecting something to repeat")
        self._repeat(sequence, least, most)

    def _counts(self, nested: bool) -> tuple[int, int | None]:
        least = self._number()
        self._skip(lines=nested)
        most: int | None = least
        if self._at(","):
            self._pos += 1
            self._skip(lines=nested)
            most = None
            if not self._at("}"):
                most = self._number()
                self._skip(lines=nested)
        if not self._at("}"):
            raise self._fail("expecting '}'")
        self._pos += 1
        self._skip(lines=nested)
        if least > MAX_REPEAT:
            raise self._fail(f"number of repetitions exceeds {MAX_REPEAT}")
        if most is not None and most > MAX_REPEAT:
            most = None
        if most is not None and most < least:
            # libllama counts from one to the other and never arrives
            raise self._fail("the maximum of a repetition is below its minimum")
        return least, most

    def _number(self) -> int:
        digits = self._take(_DIGITS, "an integer")
        # longer ones overflow in libllama too
        if len(digits) > 18:
            raise self._fail("number out of range")
        return int(digits)

    def _repeat(self, sequence: _Sequence, least: int, most: int | None) -> None:
        n_optional = 1 if most is None else most - least
        last, last_size = sequence.last, sequence.last_size
        self._count(last_size * max(0, least - 1) + n_optional * (last_size + 3))
        elements: list[tuple[int, int]] = []
        size = 0
        if least:
            elements = last if least == 1 else [(rule, count * least) for rule, count in last]
            size = last_size * least
        if n_optional:
            tail = self._new_rule()
            self._rules[tail].alternatives = [[*last, (tail, 1)], []] if most is None else [last, []]
            if n_optional > 1:
                # the last of the chain is followed by nothing, all others by the next one
                end, tail = tail, self._new_rule()
                self._rules[tail] = _Rule([[*last, (end, 1)], []], chain=n_optional - 1)
            elements = [*elements, (tail, 1)]
            size += 1
        sequence.replace_last(elements, size)


class _Sequence:
    """Elements of an alternative under way; ``last`` is what a repetition applies to."""

    __slots__ = ("_n_before", "_size_before", "elements", "size")

    def __init__(self) -> None:
        self.elements: list[tuple[int, int]] = []
        self.size = 0
        self._n_before = 0
        self._size_before = 0

    @property
    def last(self) -> list[tuple[int, int]]:
        return self.elements[self._n_before :]

    @property
    def last_size(self) -> int:
        return self.size - self._size_before

    def add(self, rule: int, size: int, single: bool = False) -> None:
        self._n_before, self._size_before = len(self.elements), self.size
        self.size += size
        if size:
            self.elements.append((rule, 1 if single else size))

    def replace_last(self, elements: list[tuple[int, int]], size: int) -> None:
        self.elements[self._n_before :] = elements
        self.size = self._size_before + size


def _analyse(rules: list[_Rule], root: int) -> None:
    nullable = _nullable(rules)
    # rule -> rules it may begin with: (rule, how often, whether something follows it)
    first: list[list[tuple[int, int, bool]]] = []
    # alternatives that may begin with a character
    n_terminals = [0] * len(rules)
    for number, rule in enumerate(rules):
        edges: list[tuple[int, int, bool]] = []
        for alternative in rule.alternatives:
            for position, (index, count) in enumerate(alternative):
                if index == _TERMINAL:
                    n_terminals[number] += 1
                    break
                follows = count > 1 or position + 1 < len(alternative)
                if not nullable[index]:
                    edges.append((index, 1, follows))
                    break
                edges.append((index, count, follows))
        first.append(edges)
    _measure(rules, first, nullable, n_terminals, root)


def _nullable(rules: list[_Rule]) -> list[bool]:
    """Which rules may be empty, in time linear in the grammar."""
    nullable = [False] * len(rules)
    waiting: list[list[tuple[int, list[int]]]] = [[] for _ in rules]
    found: list[int] = []
    for index, rule in enumerate(rules):
        for alternative in rule.alternatives:
            parts = {element for element, _ in alternative}
            if not parts:
                if not nullable[index]:
                    nullable[index] = True
                    found.append(index)
            elif _TERMINAL not in parts:
                missing = [len(parts)]
                for part in parts:
                    waiting[part].append((index, missing))
    while found:
        for index, missing in waiting[found.pop()]:
            missing[0] -= 1
            if not missing[0] and not nullable[index]:
                nullable[index] = True
                found.append(index)
    return nullable


def _measure(
    rules: list[_Rule],
    first: list[list[tuple[int, int, bool]]],
    nullable: list[bool],
    n_terminals: list[int],
    root: int,
) -> None:
    """Refuse left recursion, long chains and too many ways, going over the components from the ends on."""
    depth = [0] * len(rules)
    ways = [0] * len(rules)
    beginnings = [0] * len(rules)
    total = 0
    for component in _components(first):
        members = set(component)
        deepest, n_ways, n_beginnings, chain = 0, 0, 0, len(component)
        for index in component:
            rule = rules[index]
            n_beginnings += n_terminals[index]
            for target, count, follows in first[index]:
                if target not in members:
                    deepest = max(deepest, depth[target])
                    n_ways += count * ways[target]
                    n_beginnings += count * beginnings[target]
                elif follows:
                    raise GrammarError("unsupported grammar: left recursion")
            if rule.chain > 1 and any(nullable[target] for target, _, _ in first[index]):
                chain += rule.chain
        deepest += chain
        n_ways = chain * (n_ways + 1)
        total += n_ways * len(component)
        if deepest > MAX_CHAIN:
            raise GrammarError(f"the grammar is too deep: more than {MAX_CHAIN} rules begin with one another")
        if total > MAX_WAYS:
            raise GrammarError("the grammar is too complex: its rules can begin in too many ways")
        for index in component:
            depth[index], ways[index], beginnings[index] = deepest, n_ways, n_beginnings
    if beginnings[root] > MAX_BEGINNINGS:
        raise GrammarError(f"the grammar is too complex: a text may begin in more than {MAX_BEGINNINGS} ways")


def _components(first: list[list[tuple[int, int, bool]]]) -> list[list[int]]:
    """Strongly connected components of the rules, each after all that it leads to (Tarjan, without recursion)."""
    components: list[list[int]] = []
    number = [0] * len(first)
    low = [0] * len(first)
    on_stack = [False] * len(first)
    stack: list[int] = []
    counter = 0
    for start in range(len(first)):
        if number[start]:
            continue
        work = [(start, 0)]
        while work:
            index, position = work.pop()
            if position == 0:
                counter += 1
                number[index] = low[index] = counter
                stack.append(index)
                on_stack[index] = True
            descended = False
            edges = first[index]
            for at in range(position, len(edges)):
                target = edges[at][0]
                if not number[target]:
                    work.append((index, at + 1))
                    work.append((target, 0))
                    descended = True
                    break
                if on_stack[target]:
                    low[index] = min(low[index], number[target])
            if descended:
                continue
            if low[index] == number[index]:
                component = []
                while True:
                    member = stack.pop()
                    on_stack[member] = False
                    component.append(member)
                    if member == index:
                        break
                components.append(component)
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[index])
    return components
