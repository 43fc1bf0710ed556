"""The tiny DeepSeek-V4: every kind of layer of the real one, made and warmed up on the first run of a tiny recipe."""
