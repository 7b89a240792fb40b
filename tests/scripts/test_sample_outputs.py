"""Sample outputs of the docs are what their commands print."""

from __future__ import annotations

from scripts.sample_outputs import renew

PAGE = """# Page

```console
$ first &&
  second
old
```

```console
$ long
one
...
last
```

```python
print(1)
```

```text
old
```
"""


def test_outputs_are_replaced_and_nothing_else() -> None:
    ran: list[str] = []

    def shell(code: str) -> str:
        ran.append(code)
        return "\n".join(map(str, range(9))) if code == "long" else "new\n"

    renewed = renew(PAGE, shell, lambda code: code.upper())
    assert ran == ["first &&\n  second", "long"]
    expected = PAGE.replace("old", "new", 1).replace("one\n...\nlast", "0\n...\n8").replace("old", "PRINT(1)")
    assert renewed == expected
