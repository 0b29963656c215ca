"""Adapters that let an engine use qkv. Import the one you need: `qkv.backends.transformers`."""
