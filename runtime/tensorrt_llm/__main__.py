"""`python -m runtime.tensorrt_llm CONFIG [options of trtllm-serve]`: the library's server, with our acceptance."""

import sys

from mtad.errors import InvalidInput
from runtime.tensorrt_llm.worker import serve

if __name__ == "__main__":
    try:
        serve(sys.argv[1:])
    except InvalidInput as error:
        print(f"runtime.tensorrt_llm: error: {error}", file=sys.stderr)
        sys.exit(2)
