"""The words of a question, and the ways of writing one query: what all kinds of questions choose from.

Two sources of choice are built in, on purpose and in known amounts:

* *style*: a query is written in one of several ways with the same result (JOIN or IN, `<>` or `!=`, ORDER BY .. LIMIT 1
  or = (SELECT MAX ..)), so the text has entropy where accuracy has none;
* *vagueness*: some questions can be read in more than one way; the reading that holds most of the time (`CONVENTION`)
  is the better guess. A plain question names its columns and is always meant in that usual way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scripts.demo.lexicon import LABELS, NUMBERS, VAGUE, VAGUE_EXTREMES
from scripts.demo.schemas import Schema, Table

CONVENTION = 0.75  # share of vague wordings that mean the usual reading
VAGUE_RATE = 0.50  # share of column mentions made with a vague word where one fits


@dataclass(frozen=True)
class Mention:
    """A column and the words that stand for it."""

    column: str
    word: str
    vague: bool = False


def article(word: str) -> str:
    """The word behind its article."""
    return f"an {word}" if word[0] in "aeio" else f"a {word}"


class Wording:
    """Chooses words and styles for one schema with one random generator.

    Attributes:
        plain: no vague words, and the usual reading always.
        readings: vague wordings chosen so far.
    """

    def __init__(self, rng: random.Random, schema: Schema, plain: bool) -> None:
        self.rng = rng
        self.schema = schema
        self.plain = plain
        self.readings = 0

    # ---- words ----

    def usual(self) -> bool:
        """True when a wording of several readings is meant in the usual way."""
        if self.plain:
            return True
        self.readings += 1
        return self.rng.random() < CONVENTION

    def mention(self, table: Table, numeric: bool) -> Mention:
        """A numeric or text column of `table` and a word for it; the first listed column is the usual reading."""
        columns = table.numbers() if numeric else table.labels()
        groups = {c: NUMBERS[c][2] if numeric else LABELS[c][1] for c in columns}
        column = self.rng.choice(columns)
        group = groups[column]
        if not self.plain and self.rng.random() < VAGUE_RATE:
            fits = [c for c in columns if groups[c] == group]
            column = fits[0] if len(fits) == 1 or self.usual() else self.rng.choice(fits[1:])
            return Mention(column, self.rng.choice(VAGUE[group]), True)
        synonyms = NUMBERS[column][3] if numeric else LABELS[column][2]
        return Mention(column, column if self.rng.random() < 0.35 else self.rng.choice(synonyms))

    def plural(self, table: Table) -> str:
        """A word for the rows of `table`; the first, which matches the table's name, a little more often."""
        return self.rng.choice((table.plural[0], *table.plural))

    def shown(self, table: Table) -> tuple[str, str]:
        """(words, column) of what to show of each row: "the names of the clubs", or vaguely "the clubs"."""
        plural = self.plural(table)
        roll = self.rng.random()
        if roll < 0.40:
            return self.rng.choice((f"the names of the {plural}", f"the names of all {plural}")), "name"
        if roll < 0.50:
            return self.rng.choice((f"the ids of the {plural}", f"the identifiers of the {plural}")), table.key
        return f"the {plural}", "name" if self.usual() else table.key

    def ask(self, what: str) -> str:
        """`what` behind a request such as "List" or "What are", with the mark that ends it."""
        verb = self.rng.choice(("List", "Show", "Give me", "Find", "What are", "Tell me", "I need", "Return"))
        return f"{verb} {what}{'?' if verb == 'What are' else '.'}"

    def condition(self, table: Table, at: str = "") -> tuple[str, str]:
        """(words that follow "the clubs", SQL condition). `at` is the qualifier with its dot."""
        numeric = bool(table.numbers()) and (not table.labels() or self.rng.random() < 0.5)
        m = self.mention(table, numeric)
        if not numeric:
            value = self.rng.choice(table.values(m.column))
            if self.rng.random() < 0.2:
                words = self.rng.choice(
                    (f"whose {m.word} is not {value}", f"with {article(m.word)} other than {value}")
                )
                return words, f"{at}{m.column} {self.rng.choice(('<>', '!=', 'NOT LIKE'))} '{value}'"
            words = self.rng.choice((f"whose {m.word} is {value}", f"with {m.word} {value}", f"of {m.word} {value}"))
            return words, f"{at}{m.column} {self.rng.choice(('=', '=', 'LIKE'))} '{value}'"
        values = sorted(table.values(m.column))
        value = self.rng.choice(values[1:-1])
        word, sign = self.rng.choice(
            (("more than", ">"), ("above", ">?"), ("over", ">?"), ("at least", ">="), ("from", ">=?"),
             ("less than", "<"), ("below", "<?"), ("under", "<?"), ("at most", "<="), ("up to", "<=?"))
        )  # fmt: skip
        if sign.endswith("?"):  # a loose word: whether the bound itself counts is a matter of custom
            sign = sign[:-1] if self.usual() else {">": ">=", ">=": ">", "<": "<=", "<=": "<"}[sign[:-1]]
        words = self.rng.choice((f"with {article(m.word)} {word} {value}", f"whose {m.word} is {word} {value}"))
        return words, f"{at}{m.column} {sign} {value}"

    def extreme(self, table: Table) -> tuple[str, str, bool]:
        """(words such as "with the highest price" or "cheapest", column, True for the largest)."""
        m = self.mention(table, True)
        largest = self.rng.random() < 0.6
        if self.rng.random() < 0.4:
            pair = VAGUE_EXTREMES[NUMBERS[m.column][2]] if m.vague else NUMBERS[m.column][4]
            return f"that is {pair[0 if largest else 1]}", m.column, largest
        words = ("highest", "greatest", "most") if largest else ("lowest", "smallest", "least")
        return f"with the {self.rng.choice(words)} {m.word}", m.column, largest

    # ---- ways of writing the same thing ----

    def count(self, table: Table, at: str = "") -> str:
        """COUNT(*) or the same count over a column that is never empty."""
        return self.rng.choice(("COUNT(*)", "COUNT(*)", f"COUNT({at}{table.key})", f"COUNT({at}name)"))

    def called(self, value: str) -> str:
        """A computed value, perhaps with a name of its own."""
        return value + self.rng.choice(("", "", " AS total", " AS result"))

    def unique(self, column: str) -> str:
        """A name or a key, perhaps with a DISTINCT that changes nothing, as both are unique."""
        return self.rng.choice(("", "", "", "DISTINCT ")) + column

    def alone(self, table: Table) -> tuple[str, str]:
        """(what follows FROM, qualifier of its columns) for a query on one table."""
        name = table.name
        styles = ((name, ""), (name, ""), (name, f"{name}."), (f"{name} AS T1", "T1."), (f"{name} AS a", "a."))
        return self.rng.choice(styles)

    # ---- the two tables of a join ----

    def link(self) -> tuple[Table, Table, str]:
        """(child, parent, foreign key column) of a random foreign key."""
        children = [t for t in self.schema.tables if t.parent]
        child = self.rng.choice(children)
        assert child.parent is not None
        return child, self.schema.get(child.parent[1]), child.parent[0]

    def join(self, child: Table, parent: Table, key: str) -> tuple[str, str, str, str]:
        """(FROM clause, word before a first condition, child qualifier, parent qualifier), in one of many styles."""
        tables = [child, parent] if self.rng.random() < 0.6 else [parent, child]
        a, b = self.rng.choice((("T1", "T2"), ("T1", "T2"), ("a", "b"), (tables[0].name, tables[1].name)))
        names = [t.name if t.name == x else f"{t.name} AS {x}" for t, x in zip(tables, (a, b), strict=True)]
        on = f"{a}.{key} = {b}.{key}" if self.rng.random() < 0.7 else f"{b}.{key} = {a}.{key}"
        c, p = (a, b) if tables[0] is child else (b, a)
        if self.rng.random() < 0.2:
            return f"FROM {names[0]}, {names[1]} WHERE {on}", "AND", f"{c}.", f"{p}."
        word = self.rng.choice(("JOIN", "JOIN", "INNER JOIN"))
        return f"FROM {names[0]} {word} {names[1]} ON {on}", "WHERE", f"{c}.", f"{p}."
