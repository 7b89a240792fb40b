"""Kinds of questions over a generated schema, each with several SQL queries that are all right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo.schemas import Table
from scripts.demo.wording import Wording


@dataclass(frozen=True)
class Question:
    """A question in English and equivalent queries that answer it; `gold`, one of them, is written in the data."""

    text: str
    gold: str
    variants: tuple[str, ...]
    readings: int  # places where the wording can be read in two ways


class Author(Wording):
    """Writes questions about one schema; each kind is a method that returns (question, right queries)."""

    def table(self) -> Table:
        return self.pick(*self.schema.tables)

    def filter_rows(self) -> tuple[str, list[str]]:
        t = self.table()
        what, column = self.shown(t)
        source, at = self.alone(t)
        head = f"SELECT {self.unique(at + column)} FROM {source} WHERE"
        if self.chance(0.4):
            (words, one), (more, two) = self.condition(t, at), self.condition(t, at)
            word = self.pick("and", "or")
            sign = word.upper()
            return self.ask(f"{what} {words} {word} {more}"), [
                f"{head} {one} {sign} {two}",
                f"{head} {two} {sign} {one}",
            ]
        words, one = self.condition(t, at)
        return self.ask(f"{what} {words}"), [f"{head} {one}"]

    def count_rows(self) -> tuple[str, list[str]]:
        t = self.table()
        source, at = self.alone(t)
        plural, (words, one) = self.plural(t), self.condition(t, at)
        text = self.pick("How many {} are there {}?", "Count the {} {}.", "What is the number of {} {}?")
        return text.format(plural, words), [f"SELECT {self.called(self.count(t, at))} FROM {source} WHERE {one}"]

    def aggregate(self) -> tuple[str, list[str]]:
        t = self.table()
        m = self.mention(t, True)
        source, at = self.alone(t)
        averages, sums = (
            (("average", "AVG"), ("mean", "AVG"), ("typical", "AVG")),
            (("total", "SUM"), ("combined", "SUM")),
        )
        word, call = self.pick(*averages, *sums, ("highest", "MAX"), ("lowest", "MIN"))
        plural = self.plural(t)
        text = self.pick("What is the {} {} of the {}", "Find the {} {} of all {}").format(word, m.word, plural)
        head = f"SELECT {self.called(f'{call}({at}{m.column})')} FROM {source}"
        if self.chance(0.5):
            words, one = self.condition(t, at)
            return f"{text} {words}?", [f"{head} WHERE {one}"]
        return f"{text}?", [head]

    def superlative(self) -> tuple[str, list[str]]:
        t = self.table()
        what, column = self.shown(t)
        source, at = self.alone(t)
        words, by, order, call = self.extreme(t)
        return self.ask(f"{what} {words}"), [
            f"SELECT {at}{column} FROM {source} ORDER BY {at}{by} {order} LIMIT 1",
            f"SELECT {self.unique(at + column)} FROM {source} WHERE {at}{by} = (SELECT {call}({by}) FROM {t.name})",
        ]

    def ordered(self) -> tuple[str, list[str]]:
        t = self.table()
        what, column = self.shown(t)
        m = self.mention(t, True)
        source, at = self.alone(t)
        falling = ("from highest to lowest", "DESC"), ("in descending order of", "DESC")
        unsaid = ("sorted by", "ASC?"), ("ordered by", "ASC?"), ("ranked by", "DESC?")
        word, order = self.pick(*unsaid, *falling, ("in increasing order of", "ASC"))
        if order.endswith("?"):  # the direction is not said: custom decides
            order = order[:-1] if self.usual() else {"ASC?": "DESC", "DESC?": "ASC"}[order]
        first, limit = self.pick(("", ""), ("", ""), (", first 2 only", " LIMIT 2"), (", only 3 of them", " LIMIT 3"))
        directions = (" DESC",) if order == "DESC" else (" ASC", "")
        return self.ask(f"{what} {word} {m.word}{first}"), [
            f"SELECT {at}{column} FROM {source} ORDER BY {at}{m.column}{direction}{limit}" for direction in directions
        ]

    def distinct(self) -> tuple[str, list[str]]:
        t = self.table()
        m, plural = self.mention(t, False), self.plural(t)
        source, at = self.alone(t)
        own = f"{at}{m.column}"
        if self.chance(0.4):
            text = self.pick(
                "How many different values of {} do the {} have?", "Count the distinct {} values among {}."
            )
            return text.format(m.word, plural), [f"SELECT {self.called(f'COUNT(DISTINCT {own})')} FROM {source}"]
        if self.chance(0.3):
            text, distinct = self.ask(f"the different {m.word} values of the {plural}"), True
        else:  # whether repeats are wanted is not said
            text, distinct = self.ask(f"the {m.word} of all {plural}"), not self.usual()
        if not distinct:
            return text, [f"SELECT {own} FROM {source}"]
        return text, [f"SELECT DISTINCT {own} FROM {source}", f"SELECT {own} FROM {source} GROUP BY {own}"]

    def above_average(self) -> tuple[str, list[str]]:
        t = self.table()
        what, column = self.shown(t)
        m = self.mention(t, True)
        source, at = self.alone(t)
        word, sign = self.pick(("above", ">"), ("below", "<"))
        text = self.pick(f"{what} whose {m.word} is {word} the average", f"{what} with {word} average {m.word}")
        wanted = f"{at}{m.column} {sign} (SELECT AVG({m.column}) FROM {t.name})"
        return self.ask(text), [f"SELECT {self.unique(at + column)} FROM {source} WHERE {wanted}"]

    def grouped(self) -> tuple[str, list[str]]:
        t = self.table()
        m, plural = self.mention(t, False), self.plural(t)
        source, at = self.alone(t)
        if self.chance(0.5):
            n, (word, call) = self.mention(t, True), self.pick(("average", "AVG"), ("total", "SUM"), ("highest", "MAX"))
            what, value = f"the {word} {n.word} of the {plural}", f"{call}({at}{n.column})"
        else:
            what, value = f"the number of {plural}", self.count(t, at)
        text = self.pick(
            f"For each {m.word}, what is {what}?", f"Show {what} per {m.word}.", f"Give {what} for every {m.word}."
        )
        column, value = at + m.column, self.called(value)
        selected = f"{column}, {value}" if self.usual() else f"{value}, {column}"
        return text, [f"SELECT {selected} FROM {source} GROUP BY {column}"]

    def having(self) -> tuple[str, list[str]]:
        t = self.table()
        m, plural = self.mention(t, False), self.plural(t)
        source, at = self.alone(t)
        number = self.pick(1, 2, 3)
        word, sign = self.bound(("more than", ">"), ("at least", ">="), ("fewer than", "<"), ("over", ">?"))
        shared = self.ask(f"the {m.word} values shared by {word} {number} {plural}")
        text = self.pick(f"Which {m.word} values have {word} {number} {plural}?", shared)
        column = at + m.column
        return text, [f"SELECT {column} FROM {source} GROUP BY {column} HAVING {self.count(t, at)} {sign} {number}"]

    def child_of(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(child)
        (words, bare), name = self.condition(parent), self.pick(*parent.values("name"))
        if self.chance(0.4):
            words, bare = self.pick(f"named {name}", f"called {name}"), f"name = '{name}'"
        source, where, c, p = self.join(child, parent, key)
        alone, at = self.alone(child)
        tail = self.pick("belonging to", "of", "that are linked to", "from")
        up = f"{tail} {self.plural(parent)} {words}"
        nested = f"{at}{key} IN (SELECT {key} FROM {parent.name} WHERE {bare})"
        head = f"SELECT {self.unique(at + column)} FROM {alone} WHERE"
        joined = f"SELECT {c}{column} {source} {where}"
        if self.chance(0.4):
            more, own = self.condition(child)
            return self.ask(f"{what} {more} {up}"), [
                f"{joined} {p}{bare} AND {c}{own}",
                f"{joined} {c}{own} AND {p}{bare}",
                f"{head} {at}{own} AND {nested}",
                f"{head} {nested} AND {at}{own}",
            ]
        return self.ask(f"{what} {up}"), [f"{joined} {p}{bare}", f"{head} {nested}"]

    def count_children_of(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        name = self.pick(*parent.values("name"))
        source, where, c, p = self.join(child, parent, key)
        alone, at = self.alone(child)
        inner = f"(SELECT {key} FROM {parent.name} WHERE name = '{name}')"
        many, counted = self.plural(child), self.plural(child)
        text = self.pick(f"How many {many} does {name} have?", f"Count the {counted} of {name}.")
        joined, nested = self.called(self.count(child, c)), self.called(self.count(child, at))
        return text, [
            f"SELECT {joined} {source} {where} {p}name = '{name}'",
            f"SELECT {nested} FROM {alone} WHERE {at}{key} = {inner}",
        ]

    def parent_with(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(parent)
        words, bare = self.condition(child)
        source, where, c, p = self.join(child, parent, key)
        alone, at = self.alone(parent)
        tail = self.pick("that have", "with", "having some")
        inner = f"SELECT T2.{key} FROM {child.name} AS T2 WHERE T2.{key} = T1.{key} AND T2.{bare}"
        return self.ask(f"{what} {tail} {self.plural(child)} {words}"), [
            f"SELECT DISTINCT {p}{column} {source} {where} {c}{bare}",
            f"SELECT {at}{column} FROM {alone} WHERE {at}{key} IN (SELECT {key} FROM {child.name} WHERE {bare})",
            f"SELECT T1.{column} FROM {parent.name} AS T1 WHERE EXISTS ({inner})",
        ]

    def childless(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(parent)
        plural = self.plural(child)
        alone, at = self.alone(parent)
        tail = self.pick(f"without any {plural}", f"that have no {plural}", f"lacking {plural}")
        nested = f"SELECT {at}{column} FROM {alone} WHERE {at}{key} NOT IN (SELECT {key} FROM {child.name})"
        outer = f"FROM {parent.name} AS T1 LEFT JOIN {child.name} AS T2 ON T1.{key} = T2.{key}"
        return self.ask(f"{what} {tail}"), [nested, nested, f"SELECT T1.{column} {outer} WHERE T2.{key} IS NULL"]

    def children_per_parent(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        source, _, c, p = self.join(child, parent, key)
        if self.chance(0.4):
            m = self.mention(child, True)
            what, value = f"the average {m.word} of its {self.plural(child)}", f"AVG({c}{m.column})"
        else:
            what, value = f"the number of its {self.plural(child)}", self.count(child, c)
        shown, asked = self.plural(parent), self.plural(parent)
        text = self.pick(
            f"For each of the {shown}, show the name and {what}.",
            f"What are the names of the {asked}, each with {what}?",
        )
        head = f"SELECT {p}name, {self.called(value)} {source} GROUP BY"
        return text, [f"{head} {p}{key}", f"{head} {p}name"]

    def most_children(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(parent)
        source, _, c, p = self.join(child, parent, key)
        alone, at = self.alone(parent)
        inner = f"(SELECT {key} FROM {child.name} GROUP BY {key} ORDER BY {self.count(child)} DESC LIMIT 1)"
        by = f"GROUP BY {self.pick(p + key, c + key)} ORDER BY {self.count(child, c)} DESC LIMIT 1"
        return self.ask(f"{what} with the most {self.plural(child)}"), [
            f"SELECT {p}{column} {source} {by}",
            f"SELECT {at}{column} FROM {alone} WHERE {at}{key} = {inner}",
        ]

    def child_of_extreme(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(child)
        alone, at = self.alone(child)
        words, by, order, call = self.extreme(parent)
        head = f"SELECT {self.unique(at + column)} FROM {alone} WHERE {at}{key} = (SELECT {key} FROM {parent.name}"
        tail = self.pick("of", "belonging to")
        return self.ask(f"{what} {tail} the {parent.name} {words}"), [
            f"{head} ORDER BY {by} {order} LIMIT 1)",
            f"{head} WHERE {by} = (SELECT {call}({by}) FROM {parent.name}))",
        ]

    def write(self) -> Question:
        """One random question with its gold query."""
        self.readings = 0
        text, variants = self.pick(*INTENTS)(self)
        return Question(text, self.pick(*variants), tuple(variants), self.readings)


INTENTS: tuple[Callable[[Author], tuple[str, list[str]]], ...] = (
    Author.filter_rows, Author.filter_rows, Author.count_rows, Author.aggregate, Author.superlative, Author.ordered,
    Author.distinct, Author.above_average, Author.grouped, Author.having, Author.child_of, Author.child_of,
    Author.child_of, Author.count_children_of, Author.parent_with, Author.parent_with, Author.childless,
    Author.children_per_parent, Author.most_children, Author.child_of_extreme, Author.child_of_extreme,
)  # fmt: skip
