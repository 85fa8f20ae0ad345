"""The vLLM plugin: only this package imports vLLM, and `plugin` and `compat` only when called."""
