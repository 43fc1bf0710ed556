"""A child process that compares answers with math-verify.

``python -m nemo_rl_dsv4.environments.verify_worker`` reads one JSON list ``[gold, answer]`` a line and writes ``true`` or
``false`` a line. It is a process of its own because math-verify limits its time with SIGALRM, which works in a main thread only (a Ray
actor calls from others), and because sympy can be stuck where no signal reaches it: then the parent ends the process.
"""

import json
import resource
import sys

PARSE_SECONDS = 3
COMPARE_SECONDS = 3
MEMORY_BYTES = 4 * 2**30


def is_equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers are the same mathematical object. Call it in a main thread: it uses SIGALRM."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed_gold, parsed_answer = (
        parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=PARSE_SECONDS) for text in (gold, answer)
    )
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=COMPARE_SECONDS))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # What libraries print must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    is_equal("1", "1")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            equal = is_equal(gold, answer)
        except (Exception, MemoryError, RecursionError):  # sympy raises nearly anything on what a model writes
            equal = False
        print(json.dumps(equal), file=answers, flush=True)


if __name__ == "__main__":
    main()
