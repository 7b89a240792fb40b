"""What a pair with two vocabularies would give: the demo's auxiliary is taught another one, and drafts what both have.

    python -m scripts.vocabularies build/demo-pair      tokens per pass of `block`, with either; about 20 minutes

It reads the committed text in its own tokens, as transformers' `UniversalSpeculativeDecodingGenerator` lets it.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.base import Engine, EngineSpec, Step
from engines.cache.columns import ColumnCache
from runtime import LLM, DecodingParams, RuntimeConfig
from runtime.commands.entry import Parser, command
from runtime.pair import open_pair
from scripts.demo import corpus, dataset, train
from scripts.paths import DEMO

AUXILIARY, PROMPTS = DEMO / "pair" / "auxiliary", 60
RECIPE = replace(
    train.RECIPES["auxiliary"], steps=150, matrix_rate=2e-3, embedding_rate=1e-3, decay=0.8, warmup=10, guided_from=1.0
)


class Translating(Engine):
    """An auxiliary with a vocabulary of its own, for one row and chains; it keeps the text in place of a cache."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        super().__init__(spec, ColumnCache(spec))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.ours, self.theirs = map(AutoTokenizer.from_pretrained, (AUXILIARY, folder))
        ours, theirs = self.ours.get_vocab(), self.theirs.get_vocab()
        self.ids, self.text = {ours[token]: theirs[token] for token in ours.keys() & theirs.keys()}, dict[int, int]()
        print(f"{len(self.ids)} of {len(ours)} tokens are in both vocabularies")

    @torch.inference_mode()
    def step(self, step: Step) -> Tensor:
        start, tokens = int(step.write_at[0]), step.tokens[0].tolist()
        self.text |= dict(enumerate(tokens, start))
        committed = start - step.drafted if len(tokens) == 1 else start + len(tokens)  # a draft's first step has two
        read = self.theirs(self.ours.decode([self.text[n] for n in range(committed)])).input_ids
        read += [self.ids[self.text[n]] for n in range(committed, start + len(tokens))]
        logits = torch.full((1, len(step.keep), self.spec.vocab_size), -1e4)
        if len(step.keep):
            found = self.model(torch.tensor([read]), use_cache=False, logits_to_keep=1).logits[0, -1]
            logits[0, 0, list(self.ids)] = found[list(self.ids.values())]
        return logits


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
    pair = open_pair(parser.parse_args().pair, RuntimeConfig(rows=1, threads=1, provider="cpu"))
    params = DecodingParams(method="block", draft="model", draft_len=4, max_tokens=64, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        teach(Path(folder))
        other = Translating(pair.auxiliary.spec, Path(folder, "auxiliary"))
    for name, auxiliary in (("one vocabulary", pair.auxiliary), ("two", other)):
        llm = LLM(replace(pair, auxiliary=auxiliary), RuntimeConfig())
        for kind in ("sql", "code"):
            prompts = [example.prompt for example in dataset.load("test", kind)[:PROMPTS]]
            costs = [llm.generate([prompt], params)[0].statistics for prompt in prompts]
            rates = [one.block_efficiency for one in costs]
            error = stdev(rates) / PROMPTS**0.5
            print(f"{name}, {kind}: {fmean(rates):.2f} ± {error:.2f} tokens per pass", flush=True)


if __name__ == "__main__":
    main()
