"""The words of a question, and the ways of writing one query: what all kinds of questions choose from.

Two sources of choice are built in, on purpose and in known amounts:

* *style*: a query is written in one of several ways with the same result (JOIN or IN, `<>` or `!=`, ORDER BY .. LIMIT 1
  or = (SELECT MAX ..)), so the text has entropy where accuracy has none;
* *vagueness*: some questions can be read in more than one way; the reading that holds most of the time (`CONVENTION`)
  is the better guess. A plain question names its columns and is always meant in that usual way.
"""

from __future__ import annotations

import random
from typing import NamedTuple, TypeVar

from scripts.demo.lexicon import COLUMNS, TABLES, VAGUE, VAGUE_EXTREMES
from scripts.demo.schemas import Schema, Table

CONVENTION = 0.75  # share of vague wordings that mean the usual reading
VAGUE_RATE = 0.50  # share of column mentions made with a vague word where one fits
LOOSE = {">": ">=", ">=": ">", "<": "<=", "<=": "<"}
"""The unusual reading of a bound."""
T = TypeVar("T")


class Mention(NamedTuple):
    """A column and the words that stand for it."""

    column: str
    word: str
    vague: bool = False


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

    def pick(self, *options: T) -> T:
        """One of the options; one that is given twice is twice as likely."""
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # ---- words ----

    def usual(self) -> bool:
        """True when a wording of several readings is meant in the usual way."""
        if self.plain:
            return True
        self.readings += 1
        return self.chance(CONVENTION)

    def mention(self, table: Table, numeric: bool) -> Mention:
        """A numeric or text column of `table` and a word for it; the first listed column is the usual reading."""
        columns = table.numbers() if numeric else table.labels()
        column = self.pick(*columns)
        group = COLUMNS[column].group
        if not self.plain and self.chance(VAGUE_RATE):
            fits = [c for c in columns if COLUMNS[c].group == group]
            column = fits[0] if len(fits) == 1 or self.usual() else self.pick(*fits[1:])
            return Mention(column, self.pick(*VAGUE[group]), True)
        return Mention(column, column if self.chance(0.35) else self.pick(*COLUMNS[column].words))

    def plural(self, table: Table) -> str:
        """A word for the rows of `table`; the first, which matches the table's name, a little more often."""
        words = TABLES[table.name]
        return self.pick(words[0], *words)

    def shown(self, table: Table) -> tuple[str, str]:
        """(words, column) of what to show of each row: "the names of the clubs", or vaguely "the clubs"."""
        plural = self.plural(table)
        roll = self.rng.random()
        if roll < 0.40:
            return self.pick(f"the names of the {plural}", f"the names of all {plural}"), "name"
        if roll < 0.50:
            return self.pick(f"the ids of the {plural}", f"the identifiers of the {plural}"), table.key
        return f"the {plural}", "name" if self.usual() else table.key

    def ask(self, what: str) -> str:
        """`what` behind a request, with the mark that ends it."""
        verb = self.pick("List", "Show", "Give me", "Find", "What are", "Tell me", "I need", "Return")
        return f"{verb} {what}{'?' if verb == 'What are' else '.'}"

    def bound(self, *words: tuple[str, str]) -> tuple[str, str]:
        """(words, sign) of a bound. With a sign that ends in `?`, custom decides whether the bound itself counts."""
        word, sign = self.pick(*words)
        if sign.endswith("?"):
            sign = sign[:-1] if self.usual() else LOOSE[sign[:-1]]
        return word, sign

    def condition(self, table: Table, at: str = "") -> tuple[str, str]:
        """(words that follow "the clubs", SQL condition). `at` is the qualifier with its dot."""
        numeric = self.chance(0.5)
        m = self.mention(table, numeric)
        article = f"an {m.word}" if m.word[0] in "aeio" else f"a {m.word}"
        if numeric:
            value = self.pick(*sorted(table.values(m.column))[1:-1])
            more = ("more than", ">"), ("above", ">?"), ("over", ">?"), ("at least", ">="), ("from", ">=?")
            less = ("less than", "<"), ("below", "<?"), ("under", "<?"), ("at most", "<="), ("up to", "<=?")
            word, sign = self.bound(*more, *less)
            words = self.pick(f"with {article} {word} {value}", f"whose {m.word} is {word} {value}")
            return words, f"{at}{m.column} {sign} {value}"
        value = self.pick(*table.values(m.column))
        if self.chance(0.2):
            words = self.pick(f"whose {m.word} is not {value}", f"with {article} other than {value}")
            return words, f"{at}{m.column} {self.pick('<>', '!=', 'NOT LIKE')} '{value}'"
        words = self.pick(f"whose {m.word} is {value}", f"with {m.word} {value}", f"of {m.word} {value}")
        return words, f"{at}{m.column} {self.pick('=', '=', 'LIKE')} '{value}'"

    def extreme(self, table: Table) -> tuple[str, str, str, str]:
        """(words such as "with the highest price" or "cheapest", column, its ORDER, its aggregate)."""
        m = self.mention(table, True)
        largest = self.chance(0.6)
        order, call = ("DESC", "MAX") if largest else ("ASC", "MIN")
        if self.chance(0.4):
            column = COLUMNS[m.column]
            most, least = VAGUE_EXTREMES[column.group] if m.vague else column.extremes
            return f"that is {most if largest else least}", m.column, order, call
        words = ("highest", "greatest", "most") if largest else ("lowest", "smallest", "least")
        return f"with the {self.pick(*words)} {m.word}", m.column, order, call

    # ---- ways of writing the same thing ----

    def count(self, table: Table, at: str = "") -> str:
        """COUNT(*) or the same count over a column that is never empty."""
        return self.pick("COUNT(*)", "COUNT(*)", f"COUNT({at}{table.key})", f"COUNT({at}name)")

    def called(self, value: str) -> str:
        """A computed value, perhaps with a name of its own."""
        return value + self.pick("", "", " AS total", " AS result")

    def unique(self, column: str) -> str:
        """A name or a key, perhaps with a DISTINCT that changes nothing, as both are unique."""
        return self.pick("", "", "", "DISTINCT ") + column

    def alone(self, table: Table) -> tuple[str, str]:
        """(what follows FROM, qualifier of its columns) for a query on one table."""
        name = table.name
        return self.pick((name, ""), (name, ""), (name, f"{name}."), (f"{name} AS T1", "T1."), (f"{name} AS a", "a."))

    def link(self) -> tuple[Table, Table, str]:
        """(child, parent, foreign key column) of a random foreign key."""
        child = self.pick(*(t for t in self.schema.tables if t.parent))
        parent = next(t for t in self.schema.tables if t.name == child.parent)
        return child, parent, parent.key

    def join(self, child: Table, parent: Table, key: str) -> tuple[str, str, str, str]:
        """(FROM clause, word before a first condition, child qualifier, parent qualifier), in one of many styles."""
        tables = [child, parent] if self.chance(0.6) else [parent, child]
        a, b = self.pick(("T1", "T2"), ("T1", "T2"), ("a", "b"), (tables[0].name, tables[1].name))
        names = [t.name if t.name == x else f"{t.name} AS {x}" for t, x in zip(tables, (a, b), strict=True)]
        on = f"{a}.{key} = {b}.{key}" if self.chance(0.7) else f"{b}.{key} = {a}.{key}"
        c, p = (a, b) if tables[0] is child else (b, a)
        if self.chance(0.2):
            return f"FROM {names[0]}, {names[1]} WHERE {on}", "AND", f"{c}.", f"{p}."
        word = self.pick("JOIN", "JOIN", "INNER JOIN")
        return f"FROM {names[0]} {word} {names[1]} ON {on}", "WHERE", f"{c}.", f"{p}."
