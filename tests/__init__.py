import os

# Nothing here multiplies matrices in NumPy.  Its threads, which spin for a tenth of a second in
# each process that imports it, would slow down all that is tested beside.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
