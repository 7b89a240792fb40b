"""What a pair with two vocabularies gives: the demo's auxiliary is taught another one, and drafts what both have.

    python -m scripts.vocabularies build/demo-pair      tokens per pass of `block`, with either; about 20 minutes

`--taught FOLDER` keeps what was taught.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from transformers import AutoModelForCausalLM, AutoTokenizer

from export.options import ExportOptions
from export.pair import export_pair
from mtad import LLM, DecodingParams, RuntimeConfig
from runtime.commands.entry import Parser, command
from scripts.demo import corpus, dataset, train
from scripts.paths import DEMO

TARGET, AUXILIARY, PROMPTS = DEMO / "pair" / "target", DEMO / "pair" / "auxiliary", 60
RECIPE = replace(
    train.RECIPES["auxiliary"], steps=150, matrix_rate=2e-3, embedding_rate=1e-3, decay=0.8, warmup=10, guided_from=1.0
)


def teach(folder: Path) -> None:
    """The demo's auxiliary with a vocabulary made of half of the code and fewer queries, taught for `RECIPE`."""
    words, code = train.material(len(corpus.files("train")) // 2, 150)
    model, old = AutoModelForCausalLM.from_pretrained(AUXILIARY), AutoTokenizer.from_pretrained(AUXILIARY)
    table, known = model.get_input_embeddings().weight.data, old.get_vocab()
    before = table.clone()
    for token, place in words.get_vocab().items():
        parts = [known[token]] if token in known else old(words.decode([place])).input_ids
        table[place] = before[parts].mean(0)
    model.save_pretrained(folder / "start")
    batches = train.batches_of(RECIPE, words, code)
    train.fit(RECIPE, words, batches, folder / "auxiliary", compiled=False, start=folder / "start")


@command
def main() -> None:
    parser = Parser(prog="scripts.vocabularies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", type=Path, help="the exported demo pair")
    parser.add_argument(
        "--taught", type=Path, help="folder that keeps what was taught; what it holds is not taught again"
    )
    options = parser.parse_args()
    params = DecodingParams(method="block", draft="model", draft_len=4, max_tokens=64, seed=1)
    with tempfile.TemporaryDirectory() as temporary:
        taught, other = options.taught or Path(temporary), Path(temporary, "pair")
        if not (taught / "auxiliary" / "config.json").is_file():
            teach(taught)
        checkpoints = str(TARGET), str(taught / "auxiliary")
        export_pair(other, ExportOptions(*checkpoints, rows=1, capacity=2048), progress=print)
        for name, folder in (("one vocabulary", options.pair), ("two", other)):
            llm = LLM(folder, RuntimeConfig(rows=1, threads=1, provider="cpu"))
            for kind in ("sql", "code"):
                prompts = [example.prompt for example in dataset.load("test", kind)[:PROMPTS]]
                costs = [llm.generate([prompt], params)[0].statistics for prompt in prompts]
                rates = [one.block_efficiency for one in costs]
                error = stdev(rates) / PROMPTS**0.5
                print(f"{name}, {kind}: {fmean(rates):.2f} ± {error:.2f} tokens per pass", flush=True)


if __name__ == "__main__":
    main()
