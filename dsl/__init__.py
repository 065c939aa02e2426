"""The language models are described in, and the Graph IR that tracing a description yields."""
