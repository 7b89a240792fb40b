"""What the serving benchmark compares: this package's loop, Hugging Face `generate`, onnxruntime-genai.

One shape for all of them. A system is loaded with prompts by `begin`, then runs in slices of wall-clock time, so that
several can take turns on one machine; between slices it stands still, and so does its clock. Prompts go in as token
ids and tokens come out: tokenising and scoring are in no system's time. Storing the prompt is in every one's.

* `InFlight` serves a closed loop: a request that ends is replaced at once. A slice may end in the middle of requests;
  the next one goes on there.
* The batching baselines serve static batches, as many prompts as are in flight, the next batch when the last one has
  ended. Their requests count as submitted when their batch starts: waiting for it is not held against them.
* Assisted `generate` allows a batch of one only, so it serves requests one after another, whatever is in flight.
"""

from scripts.systems.genai import GENAI, GenAI
from scripts.systems.hugging_face import HuggingFace, load_checkpoint
from scripts.systems.in_flight import InFlight
from scripts.systems.system import Finished, Prompt, Slice, System, useful

__all__ = [
    "GENAI",
    "Finished",
    "GenAI",
    "HuggingFace",
    "InFlight",
    "Prompt",
    "Slice",
    "System",
    "load_checkpoint",
    "useful",
]
