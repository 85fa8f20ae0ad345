"""vLLM's entry point, kept outside of the package.

vLLM logs a plugin that cannot be imported and goes on without it, but lets an error through that
the plugin's function raises. A broken installation of `mtp_kernels` must stop the engine, not
silently give stock drafting; so this module imports nothing until it is called.
"""


def register() -> None:
    """Install the plugin into this process's vLLM; see :mod:`mtp_kernels.vllm.plugin`."""
    from mtp_kernels.vllm import plugin

    plugin.install()
