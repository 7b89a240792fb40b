"""What each client must get from `mtad serve`: a function per client, which runs in that client's environment.

    python -m scripts.clients.checks FUNCTION URL MODEL TOKENIZER FOLDER

It imports the standard library and the client alone. Its first line says what is checked; it raises if that fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "Table singer, columns = [*, singer_id, name]\nQuestion: How many singers are there?\nSQL:"
PERSON: dict[str, Any] = {"title": "person", "description": "Somebody.", "type": "object", "required": ["name", "age"]}
PERSON |= {"properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}}}
PERSON |= {"additionalProperties": False}


def openai(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """Completions and chats, whole and streamed alike; a JSON schema; a tool."""
    from openai import OpenAI

    client: Any = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == [model]
    asked: dict[str, Any] = {"model": model, "max_tokens": 200, "seed": 1}
    parts = [chunk.choices[0].text for chunk in client.completions.create(**asked, prompt=PROMPT, stream=True)]
    assert client.completions.create(**asked, prompt=PROMPT).choices[0].text == "".join(parts)
    asked |= {"messages": [{"role": "user", "content": PROMPT}]}
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert client.chat.completions.create(**asked).choices[0].message.content == "".join(parts)
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    message = client.chat.completions.create(**asked, response_format=form).choices[0].message
    assert set(json.loads(message.content)) == {"name", "age"}
    tools = [{"type": "function", "function": {"name": "person", "parameters": PERSON}}]
    message = client.chat.completions.create(**asked, tools=tools, tool_choice="required").choices[0].message
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"name", "age"}


def langchain(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """`OpenAI` and `ChatOpenAI`, whole and streamed alike; structured output; a tool."""
    from langchain_openai import ChatOpenAI, OpenAI

    known: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0, "seed": 1}
    completions, chat = OpenAI(**known, max_tokens=16), ChatOpenAI(**known, max_tokens=200)
    assert completions.invoke(PROMPT) == "".join(completions.stream(PROMPT))
    assert chat.invoke(PROMPT).content == "".join(str(part.content) for part in chat.stream(PROMPT))
    assert set(chat.with_structured_output(PERSON, method="json_schema").invoke(PROMPT)) == {"name", "age"}
    (call,) = chat.bind_tools([PERSON], tool_choice="person").invoke(PROMPT).tool_calls
    assert set(call["args"]) == {"name", "age"}


def llamaindex(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """`OpenAILike`: completions and chats, whole and streamed alike."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    known: Any = {"api_base": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0, "max_tokens": 16}
    known |= {"context_window": 512, "additional_kwargs": {"seed": 1}}
    completions, chat = OpenAILike(**known, is_chat_model=False), OpenAILike(**known, is_chat_model=True)
    assert completions.complete(PROMPT).text == list(completions.stream_complete(PROMPT))[-1].text
    messages = [ChatMessage(role="user", content=PROMPT)]
    assert chat.chat(messages).message.content == list(chat.stream_chat(messages))[-1].message.content


def lm_eval(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """`local-completions`: the log-likelihood of a greedy answer is the sum of what the server gave with it."""
    import requests
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # type: ignore[import-not-found]

    address = f"{url}/v1/completions"
    asked: dict[str, Any] = {"model": model, "prompt": PROMPT, "temperature": 0, "method": "sample"}
    answer = requests.post(address, json=asked | {"logprobs": 1}, timeout=60).json()["choices"][0]
    client = LocalCompletionsAPI(base_url=address, tokenizer_backend="huggingface", model=model, tokenizer=tokenizer)
    ((value, greedy),) = client.loglikelihood([Instance("loglikelihood", {}, (PROMPT, answer["text"]), 0)])
    assert abs(value - sum(answer["logprobs"]["token_logprobs"])) < 1e-3
    assert greedy


def guidellm(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """16 streams of 32 tokens, 4 at a time: all succeed."""
    report = folder / "guidellm.json"
    _command(
        *("guidellm", "run", "--disable-progress", "--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=32", "--profile", "kind=concurrent,streams=4"),
        *("--constraint", "kind=max_requests,count=16", "--output", f"kind=json,path={report}"),
    )
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (16, 0), totals


def aiperf(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """32 streams of 32 tokens, 4 at a time, completions and chats: all succeed."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # with these, a tokenizer's folder is looked up on the hub
        os.environ.pop(name, None)
    for kind in ("completions", "chat"):
        _command(
            *("aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", kind, "--streaming"),
            *("--tokenizer", tokenizer, "--concurrency", "4", "--request-count", "32", "--isl", "64", "--osl", "32"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "max_tokens:32"),
            *("--artifact-dir", str(folder / kind), "--ui", "none"),
        )
        figures = json.loads(next((folder / kind).rglob("profile_export_aiperf.json")).read_text())
        assert figures["request_count"]["avg"] == 32, figures


def schemathesis(url: str, model: str, tokenizer: str, folder: Path) -> None:
    """Requests made up from the server's OpenAPI description, right and wrong ones: none is answered with 500."""
    _command(
        *("st", "--config-file", "scripts/clients/schemathesis.toml", "run", f"{url}/openapi.json", "--no-shrink"),
        *("--checks", "not_a_server_error", "--continue-on-failure", "--phases", "examples,coverage,fuzzing"),
        *("--max-examples", "100", "--workers", "4", "--request-timeout", "120", "--suppress-health-check", "all"),
    )


def _command(name: str, *arguments: str) -> None:
    """Run a command of this environment."""
    subprocess.run([str(Path(sys.executable).parent / name), *arguments], check=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:5], Path(sys.argv[5]))
