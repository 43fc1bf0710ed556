"""The training side: AutoModel's DeepSeek-V4 on any number of ranks, and the Ray group that drives it."""
