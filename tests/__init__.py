import os
import signal

# Nothing here multiplies matrices in NumPy.  Its threads, which spin for a tenth of a second in
# each process that imports it, would slow down all that is tested beside.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
