"""The child process that scores answers: ``python -m nemo_rl_dsv4.environments.verify_worker``.

It is a process of its own because math-verify limits its time with SIGALRM, which works in a main thread only (a Ray
actor may call from others), and because sympy can be stuck where no signal reaches it: then the parent ends the
process.

Requests come in as lines of base64 pickle from the parent alone; each is answered by a line with a JSON number.
``("prepare", kind)`` imports what that kind of request needs. The process ends when its input does.
"""

import base64
import json
import pickle
import resource
import sys

from nemo_rl_dsv4.environments.scoring import prepare, score_request

MEMORY_BYTES = 8 * 2**30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # What libraries print must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin.buffer:
        request = pickle.loads(base64.b64decode(line))
        if request[0] == "prepare":
            prepare(request[1])
            score = 0.0
        else:
            score = score_request(request)
        print(json.dumps(score), file=answers, flush=True)


if __name__ == "__main__":
    main()
