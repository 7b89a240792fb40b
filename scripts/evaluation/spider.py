"""Spider (Yu et al. 2018): questions about databases, scored by execution.

A folder as it is distributed: `dev.json` (question, query, db_id), `tables.json` (schemas) and
`database/<db_id>/<db_id>.sqlite`. The prompt is the schema, the question and "SQL:", in the layout the demo pair is
trained on too; no examples are shown.

Execution match is that of Spider's test-suite evaluation on the one database there is: the order of rows matters only
if the gold query has an ORDER BY, their number always does, the order of columns never, and DISTINCT is kept
(`--keep_distinct` there). Databases are opened read-only; a query has 10 seconds and 100,000 rows.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from scripts.demo.dataset import question_prompt
from scripts.demo.schemas import schema_prompt
from scripts.evaluation.prompt_set import Prompt, PromptSet
from scripts.scoring.sqlite import QueryError, Rows, fetch, same_in_some_column_order

TIME_LIMIT, ROW_LIMIT = 10.0, 100_000


class Spider(PromptSet):
    """The development set in a folder.

    Raises:
        InvalidInput: a file is missing or not in Spider's format, or a gold query does not run.
    """

    name = "spider"
    stop = (";", "\n\n")
    how = "execution match; order matters with ORDER BY only"

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        schemas = {_field(s, "db_id", "tables.json", n): s for n, s in enumerate(_read(folder / "tables.json"))}
        self.prompts, self._gold, self._databases = [], [], []
        for number, entry in enumerate(_read(folder / "dev.json")[:limit]):
            name = _field(entry, "db_id", "dev.json", number)
            if name not in schemas:
                raise InvalidInput(f"dev.json [{number}] db_id", name, "tables.json does not have it")
            file = folder / "database" / name / f"{name}.sqlite"
            if not file.is_file():
                raise InvalidInput("spider", str(file), "no such database; give the folder as it is distributed")
            question = question_prompt(_field(entry, "question", "dev.json", number))
            self.prompts.append(Prompt(f"spider-{number:04d}", _schema(schemas[name]) + question))
            self._gold.append(_field(entry, "query", "dev.json", number))
            self._databases.append(file)
        self._results: dict[int, Rows] = {}

    def right(self, number: int, text: str) -> bool | None:
        """Whether the query returns the rows of the gold query, which is run once.

        Raises:
            InvalidInput: the gold query does not run, so nothing can be compared.
        """
        gold = self._gold[number]
        if number not in self._results:
            try:
                self._results[number] = _run(self._databases[number], gold)
            except QueryError as error:
                raise InvalidInput(f"dev.json [{number}] query", gold, f"does not run: {error}") from None
        try:
            predicted = _run(self._databases[number], text.split(";")[0].strip())
        except QueryError:
            return False
        return same_in_some_column_order(self._results[number], predicted, "order by" in gold.lower())


def _run(file: Path, sql: str) -> Rows:
    connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="ignore")  # some of Spider's text is not UTF-8
    try:
        return fetch(connection, sql, TIME_LIMIT, ROW_LIMIT)
    finally:
        connection.close()


def _schema(values: dict[str, Any]) -> str:
    try:
        tables, columns = values["table_names_original"], values["column_names_original"]
        full = [f"{tables[table]}.{column}" if table >= 0 else column for table, column in columns]
        own = [(name, [c for at, c in columns if at == number]) for number, name in enumerate(tables)]
        return schema_prompt(own, [(full[column], full[referred]) for column, referred in values["foreign_keys"]])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidInput("tables.json", values.get("db_id"), f"not in Spider's format: {error!r}") from None


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("spider", str(path), f"cannot be read: {error}") from None
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise InvalidInput("spider", str(path), "not a list of objects")
    return values


def _field(values: dict[str, Any], name: str, file: str, number: int) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{file} [{number}] {name}", value, "give non-empty text")
    return value
