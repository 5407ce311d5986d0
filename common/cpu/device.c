// The CPU as a device: all threads of this process, and the C library's heap.
#include "device.h"
#include "cpu.h"
#include <malloc.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#ifdef SHARD_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif
#include <cblas.h>

enum { THREADS_PER_CORE_MAX = 8 }; // more would spend their time on waiting for each other

static char name[160];
static size_t memory_bytes;

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

// The number in a file of the kernel's, 0 if there is none.
static size_t number_in(const char *path) {
    size_t number = 0;
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        if (fscanf(file, "%zu", &number) != 1) {
            number = 0;
        }
        fclose(file);
    }
    return number;
}

// What the machine has, with its swap space; or what the container may use, if that is less.
static size_t find_memory(void) {
    struct sysinfo info;
    CHECK(sysinfo(&info) == 0);
    size_t bytes = (size_t)(info.totalram + info.totalswap) * info.mem_unit;
    size_t limits[] = {
        number_in("/sys/fs/cgroup/memory.max"),
        number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        bytes = limits[i] > 0 && limits[i] < bytes ? limits[i] : bytes;
    }
    return bytes;
}

// How many threads to use: what is asked for, or a fair part of the cores.
static int thread_count(int threads, int sharers) {
    int cores = omp_get_num_procs(), limit = omp_get_thread_limit();
    if (threads > THREADS_PER_CORE_MAX * cores) {
        error_user("--threads %d on %d core%s would wait more than compute; choose at most %d",
                   threads, cores, cores == 1 ? "" : "s", THREADS_PER_CORE_MAX * cores);
    }
    int count = threads > 0 ? threads : omp_get_max_threads() / sharers;
    count = count < limit ? count : limit; // OMP_THREAD_LIMIT
    return count > 0 ? count : 1;
}

void device_init(int threads, int sharers) {
    heap_init();
    memory_bytes = find_memory();
    int count = thread_count(threads, sharers);
    openblas_set_num_threads(1); // every library call runs on one thread: see cpu_gemm()
    omp_set_dynamic(0);
    omp_set_num_threads(count);
    bool many = count > omp_get_num_procs();
    int length = snprintf(name, sizeof name, "CPU: %d thread%s, %s%s", count, count == 1 ? "" : "s",
                          many ? "more than there are cores, " : "", vector_unit());
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

size_t device_memory_bytes(void) {
    return memory_bytes;
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
