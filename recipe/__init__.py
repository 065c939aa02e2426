"""Prompt, tool and message formats that go with the models."""
