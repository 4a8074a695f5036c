/* What can be wrong with a compiled llama.cpp, put in its way: preloaded before the real library,
   or in place of it.  BREAKS says where it goes wrong, HOW says how. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void go_wrong(void) {
    const char * how = getenv("HOW");
    if (how == NULL) {
        return;
    }
    if (strcmp(how, "undefined instruction") == 0) {
#if defined(__x86_64__)
        __asm__ volatile("ud2");
#elif defined(__aarch64__)
        __asm__ volatile("udf #0");
#else
        __builtin_trap();
#endif
    }
    if (strcmp(how, "abort") == 0) {
        abort();
    }
    if (strcmp(how, "wild pointer") == 0) {
        *(volatile int *) 8 = 1;
    }
    if (strcmp(how, "hang") == 0) {
        for (;;) {
            pause();
        }
    }
    if (strcmp(how, "spin") == 0) {
        for (volatile int i = 0;; i++) {
        }
    }
    if (strcmp(how, "exit") == 0) {
        _exit(3);
    }
}

/* The function that stands behind ours.  ctypes loads the libraries for itself alone. */
static void * real_function(const char * name) {
    void * library = dlopen("libggml-base.so.0", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        library = dlopen("libggml-base.so", RTLD_LAZY | RTLD_NOLOAD);
    }
    return dlsym(library != NULL ? library : RTLD_NEXT, name);
}

static int breaks(const char * place) {
    const char * chosen = getenv("BREAKS");
    return chosen != NULL && strcmp(chosen, place) == 0;
}

/* Set as soon as the buffers of special kernels are asked for: the model that follows uses them. */
static int uses_extra_buffers = 0;

__attribute__((constructor)) static void when_loaded(void) {
    if (breaks("load")) {
        go_wrong();
    }
}

void * ggml_backend_reg_get_proc_address(void * reg, const char * name) {
    void * (*real)(void *, const char *) = real_function("ggml_backend_reg_get_proc_address");
    if (strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) {
        uses_extra_buffers = 1;
    }
    return real(reg, name);
}

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    int (*real)(void *, void *) = real_function("ggml_backend_sched_graph_compute_async");
    if (breaks("compute") || (breaks("extra buffers") && uses_extra_buffers)) {
        go_wrong();
    }
    return real(sched, graph);
}

/* How logits are read. */
void ggml_backend_tensor_get_async(void * backend, void * tensor, void * data, size_t offset, size_t size) {
    void (*real)(void *, void *, void *, size_t, size_t) = real_function("ggml_backend_tensor_get_async");
    real(backend, tensor, data, offset, size);
    if (breaks("numbers") && uses_extra_buffers) {
        float * numbers = data;
        for (size_t i = 0; i < size / sizeof(float); i += 2) {
            numbers[i] = -3 * numbers[i];
        }
    }
}
