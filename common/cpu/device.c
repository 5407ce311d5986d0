// The CPU as a device: all threads of this process, and the C library's heap.
#include "device.h"
#include "cpu.h"
#include <malloc.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef SHARD_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif
#include <cblas.h>

static char name[160];

// A training step allocates and frees the same blocks again and again. Large blocks would each go
// to the system and come back as fresh pages, at a page fault for every 4 KiB, so keep all of them
// in one heap that never shrinks.
static void heap_init(void) {
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_TOP_PAD, 1 << 20);
    mallopt(M_ARENA_MAX, 1);
}

static const char *vector_unit(void) {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "no vector unit";
#endif
}

void device_init(int threads, int sharers) {
    heap_init();
    int count = threads > 0 ? threads : omp_get_max_threads() / sharers;
    count = count > 0 ? count : 1;
    openblas_set_num_threads(1); // every library call runs on one thread: see cpu_gemm()
    omp_set_dynamic(0);
    omp_set_num_threads(count);
    int length = snprintf(name, sizeof name, "CPU: %d thread%s, %s", device_threads(),
                          device_threads() == 1 ? "" : "s", vector_unit());
#ifdef SHARD_HAVE_ONEDNN
    const dnnl_version_t *v = dnnl_version();
    length += snprintf(name + length, sizeof name - (size_t)length, ", oneDNN %d.%d.%d", v->major,
                       v->minor, v->patch);
#endif
    char config[128] = "";
    sscanf(openblas_get_config(), "OpenBLAS %120s", config);
    snprintf(name + length, sizeof name - (size_t)length, ", OpenBLAS %s", config);
}

int device_threads(void) {
    return omp_get_max_threads();
}

const char *device_name(void) {
    return name;
}

void *device_alloc(size_t bytes) {
    size_t rounded = (bytes + 63) / 64 * 64;
    return aligned_alloc(64, rounded > 0 ? rounded : 64);
}

void device_free(void *data) {
    free(data);
}

void device_poison(void *data, size_t bytes) {
    memset(data, 0xff, bytes);
}

void *device_host_view(struct tensor t) {
    return t.data;
}

void device_upload(struct tensor t, const void *host) {
    if (tensor_count(t) > 0) {
        memcpy(t.data, host, tensor_count(t) * dtype_size(t.dtype));
    }
}

void device_download(void *host, struct tensor t) {
    if (tensor_count(t) > 0) {
        memcpy(host, t.data, tensor_count(t) * dtype_size(t.dtype));
    }
}

void device_sync(void) {
}
