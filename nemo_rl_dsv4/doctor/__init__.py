"""Whether machines are fit for a run: what a node is (`node`), what it says of its GPUs (`gpus`), what is wrong (`rules`),
and the same of every node of a Ray cluster (`cluster`)."""
