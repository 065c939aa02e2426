"""The models, one file each: what they compute, in the DSL, driven by their Hugging Face `config.json`."""
