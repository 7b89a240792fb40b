"""Kinds of questions over a generated schema, each with several SQL queries that are all right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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

    def filter_rows(self) -> tuple[str, list[str]]:
        t = self.rng.choice(self.schema.tables)
        what, column = self.shown(t)
        source, at = self.alone(t)
        head = f"SELECT {self.unique(at + column)} FROM {source} WHERE"
        if self.rng.random() < 0.4:
            (words, one), (more, two) = self.condition(t, at), self.condition(t, at)
            word, sign = self.rng.choice((("and", "AND"), ("or", "OR")))
            return self.ask(f"{what} {words} {word} {more}"), [
                f"{head} {one} {sign} {two}",
                f"{head} {two} {sign} {one}",
            ]
        words, one = self.condition(t, at)
        return self.ask(f"{what} {words}"), [f"{head} {one}"]

    def count_rows(self) -> tuple[str, list[str]]:
        t = self.rng.choice(self.schema.tables)
        source, at = self.alone(t)
        plural, (words, one) = self.plural(t), self.condition(t, at)
        text = self.rng.choice((f"How many {plural} are there {words}?", f"Count the {plural} {words}.",
                                f"What is the number of {plural} {words}?"))  # fmt: skip
        return text, [f"SELECT {self.called(self.count(t, at))} FROM {source} WHERE {one}"]

    def aggregate(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.numbers()])
        m = self.mention(t, True)
        source, at = self.alone(t)
        word, call = self.rng.choice((("average", "AVG"), ("mean", "AVG"), ("typical", "AVG"), ("total", "SUM"),
                                      ("combined", "SUM"), ("highest", "MAX"), ("lowest", "MIN")))  # fmt: skip
        plural = self.plural(t)
        text = self.rng.choice(
            (f"What is the {word} {m.word} of the {plural}", f"Find the {word} {m.word} of all {plural}")
        )
        head = f"SELECT {self.called(f'{call}({at}{m.column})')} FROM {source}"
        if self.rng.random() < 0.5:
            words, one = self.condition(t, at)
            return f"{text} {words}?", [f"{head} WHERE {one}"]
        return f"{text}?", [head]

    def superlative(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.numbers()])
        what, column = self.shown(t)
        source, at = self.alone(t)
        words, by, largest = self.extreme(t)
        order, call = ("DESC", "MAX") if largest else ("ASC", "MIN")
        return self.ask(f"{what} {words}"), [
            f"SELECT {at}{column} FROM {source} ORDER BY {at}{by} {order} LIMIT 1",
            f"SELECT {self.unique(at + column)} FROM {source} WHERE {at}{by} = (SELECT {call}({by}) FROM {t.name})",
        ]

    def ordered(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.numbers()])
        what, column = self.shown(t)
        m = self.mention(t, True)
        source, at = self.alone(t)
        word, order = self.rng.choice(
            (("sorted by", "ASC?"), ("ordered by", "ASC?"), ("ranked by", "DESC?"), ("from highest to lowest", "DESC"),
             ("in descending order of", "DESC"), ("in increasing order of", "ASC"))
        )  # fmt: skip
        if order.endswith("?"):  # the direction is not said: custom decides
            order = order[:-1] if self.usual() else {"ASC?": "DESC", "DESC?": "ASC"}[order]
        limit = self.rng.choice(("", "", " LIMIT 2", " LIMIT 3"))
        first = {"": "", " LIMIT 2": ", first 2 only", " LIMIT 3": ", only 3 of them"}[limit]
        tail = [f" {order}{limit}"] if order == "DESC" else [f" ASC{limit}", limit]
        return self.ask(f"{what} {word} {m.word}{first}"), [
            f"SELECT {at}{column} FROM {source} ORDER BY {at}{m.column}{x}" for x in tail
        ]

    def distinct(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.labels()])
        m, plural = self.mention(t, False), self.plural(t)
        source, at = self.alone(t)
        if self.rng.random() < 0.4:
            text = self.rng.choice((f"How many different values of {m.word} do the {plural} have?",
                                    f"Count the distinct {m.word} values among {plural}."))  # fmt: skip
            return text, [f"SELECT {self.called(f'COUNT(DISTINCT {at}{m.column})')} FROM {source}"]
        if self.rng.random() < 0.3:
            text, distinct = self.ask(f"the different {m.word} values of the {plural}"), True
        else:  # whether repeats are wanted is not said
            text, distinct = self.ask(f"the {m.word} of all {plural}"), not self.usual()
        if not distinct:
            return text, [f"SELECT {at}{m.column} FROM {source}"]
        return text, [f"SELECT DISTINCT {at}{m.column} FROM {source}",
                      f"SELECT {at}{m.column} FROM {source} GROUP BY {at}{m.column}"]  # fmt: skip

    def above_average(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.numbers()])
        what, column = self.shown(t)
        m = self.mention(t, True)
        source, at = self.alone(t)
        word, sign = self.rng.choice((("above", ">"), ("below", "<")))
        text = self.rng.choice((f"{what} whose {m.word} is {word} the average", f"{what} with {word} average {m.word}"))
        average = f"(SELECT AVG({m.column}) FROM {t.name})"
        return self.ask(text), [
            f"SELECT {self.unique(at + column)} FROM {source} WHERE {at}{m.column} {sign} {average}"
        ]

    def grouped(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.labels() and t.numbers()])
        m, plural = self.mention(t, False), self.plural(t)
        source, at = self.alone(t)
        if self.rng.random() < 0.5:
            n, roll = self.mention(t, True), self.rng.choice((("average", "AVG"), ("total", "SUM"), ("highest", "MAX")))
            what, value = f"the {roll[0]} {n.word} of the {plural}", f"{roll[1]}({at}{n.column})"
        else:
            what, value = f"the number of {plural}", self.count(t, at)
        text = self.rng.choice((f"For each {m.word}, what is {what}?", f"Show {what} per {m.word}.",
                                f"Give {what} for every {m.word}."))  # fmt: skip
        column, value = at + m.column, self.called(value)
        order = f"SELECT {column}, {value}" if self.usual() else f"SELECT {value}, {column}"
        return text, [f"{order} FROM {source} GROUP BY {column}"]

    def having(self) -> tuple[str, list[str]]:
        t = self.rng.choice([t for t in self.schema.tables if t.labels()])
        m, plural = self.mention(t, False), self.plural(t)
        source, at = self.alone(t)
        number = self.rng.choice((1, 2, 3))
        word, sign = self.rng.choice((("more than", ">"), ("at least", ">="), ("fewer than", "<"), ("over", "?")))
        if sign == "?":  # as in `condition`
            sign = ">" if self.usual() else ">="
        text = self.rng.choice((f"Which {m.word} values have {word} {number} {plural}?",
                                self.ask(f"the {m.word} values shared by {word} {number} {plural}")))  # fmt: skip
        column = at + m.column
        return text, [f"SELECT {column} FROM {source} GROUP BY {column} HAVING {self.count(t, at)} {sign} {number}"]

    def child_of(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(child)
        (words, bare), name = self.condition(parent), self.rng.choice(parent.values("name"))
        if self.rng.random() < 0.4:
            words, bare = self.rng.choice((f"named {name}", f"called {name}")), f"name = '{name}'"
        source, where, c, p = self.join(child, parent, key)
        alone, at = self.alone(child)
        tail = self.rng.choice(("belonging to", "of", "that are linked to", "from"))
        up = f"{tail} {self.plural(parent)} {words}"
        nested = f"{at}{key} IN (SELECT {key} FROM {parent.name} WHERE {bare})"
        head = f"SELECT {self.unique(at + column)} FROM {alone} WHERE"
        joined = f"SELECT {c}{column} {source} {where}"
        if self.rng.random() < 0.4:
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
        name = self.rng.choice(parent.values("name"))
        source, where, c, p = self.join(child, parent, key)
        alone, at = self.alone(child)
        inner = f"(SELECT {key} FROM {parent.name} WHERE name = '{name}')"
        text = self.rng.choice((f"How many {self.plural(child)} does {name} have?",
                                f"Count the {self.plural(child)} of {name}."))  # fmt: skip
        joined, nested = self.called(self.count(child, c)), self.called(self.count(child, at))
        return text, [f"SELECT {joined} {source} {where} {p}name = '{name}'",
                      f"SELECT {nested} FROM {alone} WHERE {at}{key} = {inner}"]  # fmt: skip

    def parent_with(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(parent)
        words, bare = self.condition(child)
        source, where, c, p = self.join(child, parent, key)
        alone, at = self.alone(parent)
        tail = self.rng.choice(("that have", "with", "having some"))
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
        tail = self.rng.choice((f"without any {plural}", f"that have no {plural}", f"lacking {plural}"))
        outer = f"FROM {parent.name} AS T1 LEFT JOIN {child.name} AS T2 ON T1.{key} = T2.{key}"
        return self.ask(f"{what} {tail}"), [
            f"SELECT {at}{column} FROM {alone} WHERE {at}{key} NOT IN (SELECT {key} FROM {child.name})",
            f"SELECT {at}{column} FROM {alone} WHERE {at}{key} NOT IN (SELECT {key} FROM {child.name})",
            f"SELECT T1.{column} {outer} WHERE T2.{key} IS NULL",
        ]

    def children_per_parent(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        source, _, c, p = self.join(child, parent, key)
        numbers = child.numbers()
        if numbers and self.rng.random() < 0.4:
            m = self.mention(child, True)
            what, value = f"the average {m.word} of its {self.plural(child)}", f"AVG({c}{m.column})"
        else:
            what, value = f"the number of its {self.plural(child)}", self.count(child, c)
        text = self.rng.choice((f"For each of the {self.plural(parent)}, show the name and {what}.",
                                f"What are the names of the {self.plural(parent)}, each with {what}?"))  # fmt: skip
        value = self.called(value)
        return text, [f"SELECT {p}name, {value} {source} GROUP BY {p}{key}",
                      f"SELECT {p}name, {value} {source} GROUP BY {p}name"]  # fmt: skip

    def most_children(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        what, column = self.shown(parent)
        source, _, c, p = self.join(child, parent, key)
        alone, at = self.alone(parent)
        inner = f"(SELECT {key} FROM {child.name} GROUP BY {key} ORDER BY {self.count(child)} DESC LIMIT 1)"
        by = f"GROUP BY {self.rng.choice((p + key, c + key))} ORDER BY {self.count(child, c)} DESC LIMIT 1"
        return self.ask(f"{what} with the most {self.plural(child)}"), [
            f"SELECT {p}{column} {source} {by}",
            f"SELECT {at}{column} FROM {alone} WHERE {at}{key} = {inner}",
        ]

    def child_of_extreme(self) -> tuple[str, list[str]]:
        child, parent, key = self.link()
        if not parent.numbers():
            return self.child_of()
        what, column = self.shown(child)
        alone, at = self.alone(child)
        words, by, largest = self.extreme(parent)
        order, call = ("DESC", "MAX") if largest else ("ASC", "MIN")
        head = f"SELECT {self.unique(at + column)} FROM {alone} WHERE {at}{key} = (SELECT {key} FROM {parent.name}"
        tail = self.rng.choice(("of", "belonging to"))
        return self.ask(f"{what} {tail} the {parent.name} {words}"), [
            f"{head} ORDER BY {by} {order} LIMIT 1)",
            f"{head} WHERE {by} = (SELECT {call}({by}) FROM {parent.name}))",
        ]

    def write(self) -> Question:
        """One random question with its gold query."""
        intent = self.rng.choice(INTENTS)
        self.readings = 0
        text, variants = intent(self)
        return Question(text, self.rng.choice(variants), tuple(variants), self.readings)


INTENTS: tuple[Callable[[Author], tuple[str, list[str]]], ...] = (
    Author.filter_rows, Author.filter_rows, Author.count_rows, Author.aggregate, Author.superlative, Author.ordered,
    Author.distinct, Author.above_average, Author.grouped, Author.having, Author.child_of, Author.child_of,
    Author.child_of, Author.count_children_of, Author.parent_with, Author.parent_with, Author.childless,
    Author.children_per_parent, Author.most_children, Author.child_of_extreme, Author.child_of_extreme,
)  # fmt: skip
