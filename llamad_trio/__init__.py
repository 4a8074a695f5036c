"""In-process GGUF inference for Trio programs.

    async with open_engine("model.gguf") as eng:
        print((await eng.complete("Tell me a joke")).text)

Importing this package loads neither Trio nor llama.cpp: each public name is imported when it is
first used, from the module that `__init__.pyi` says.
"""

import logging

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# An application that sets up no logging hears nothing from a library.
logging.getLogger(__name__).addHandler(logging.NullHandler())
