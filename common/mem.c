#include "mem.h"
#include "clock.h"
#include "device.h"
#include "error.h"
#include "files.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    pthread_mutex_t lock;
    struct mem_stats stats;
    FILE *timeline; // or NULL
    double timeline_start_s;
} account = {.lock = PTHREAD_MUTEX_INITIALIZER};

const char *mem_category_name(enum mem_category category) {
    static const char *const names[MEM_CATEGORIES] = {
        [MEM_PARAMS] = "params",           [MEM_GRADS] = "grads", [MEM_OPTIMIZER] = "optimizer",
        [MEM_ACTIVATIONS] = "activations", [MEM_COMM] = "comm",   [MEM_WORKSPACE] = "workspace",
    };
    return names[category];
}

// The caller holds the lock.
static void timeline_line(void) {
    if (account.timeline == NULL) {
        return;
    }
    fprintf(account.timeline, "%.1f", (clock_s() - account.timeline_start_s) * 1e6);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        fprintf(account.timeline, "\t%zu", account.stats.now_by_category[c]);
    }
    fputc('\n', account.timeline);
}

static void charge(size_t bytes, enum mem_category category) {
    pthread_mutex_lock(&account.lock);
    struct mem_stats *s = &account.stats;
    s->now_bytes += bytes;
    s->now_by_category[category] += bytes;
    if (s->now_by_category[category] > s->highest_by_category[category]) {
        s->highest_by_category[category] = s->now_by_category[category];
    }
    if (s->now_bytes > s->peak_bytes) {
        s->peak_bytes = s->now_bytes;
        memcpy(s->peak_by_category, s->now_by_category, sizeof s->peak_by_category);
    }
    timeline_line();
    pthread_mutex_unlock(&account.lock);
}

static void discharge(size_t bytes, enum mem_category category) {
    pthread_mutex_lock(&account.lock);
    CHECK(account.stats.now_by_category[category] >= bytes);
    account.stats.now_bytes -= bytes;
    account.stats.now_by_category[category] -= bytes;
    timeline_line();
    pthread_mutex_unlock(&account.lock);
}

// Sizes that do not fit are the user's.
_Noreturn static void out_of_memory(size_t bytes, enum mem_category category) {
    struct mem_stats s = mem_stats();
    char text[512];
    int length = 0;
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        length +=
            snprintf(text + length, sizeof text - (size_t)length, " %s %.1f",
                     mem_category_name((enum mem_category)c), (double)s.now_by_category[c] / 1e6);
    }
    error_user("no memory for %.1f MB of %s: there are %.1f MB in all, and in use are, in MB,%s; "
               "choose a smaller model (--help lists its sizes), a smaller --batch or "
               "--eval-batch, or more --micro-batches",
               (double)bytes / 1e6, mem_category_name(category),
               (double)device_memory_bytes() / 1e6, text);
}

// Systems promise more memory than they have, and kill who takes it.
static bool fits(size_t bytes) {
    size_t used = mem_stats().now_bytes, all = device_memory_bytes();
    return all == 0 || (used <= all && bytes <= all - used);
}

void *mem_alloc(size_t bytes, enum mem_category category) {
    void *data = fits(bytes) ? device_alloc(bytes) : NULL;
    if (data == NULL) {
        out_of_memory(bytes, category);
    }
    charge(bytes, category);
#ifdef SHARD_DEBUG
    device_poison(data, bytes);
#endif
    return data;
}

void mem_free(void *data, size_t bytes, enum mem_category category) {
    if (data == NULL) {
        return;
    }
#ifdef SHARD_DEBUG
    device_poison(data, bytes);
#endif
    discharge(bytes, category);
    device_free(data);
}

void *mem_table(size_t count, size_t size) {
    void *table = calloc(count > 0 ? count : 1, size);
    if (table == NULL) {
        error_user(
            "no memory for a table of %zu elements; choose a smaller model (--help lists its "
            "sizes) or fewer --micro-batches",
            count);
    }
    return table;
}

struct mem_stats mem_stats(void) {
    pthread_mutex_lock(&account.lock);
    struct mem_stats stats = account.stats;
    pthread_mutex_unlock(&account.lock);
    return stats;
}

void mem_reset_peak(void) {
    pthread_mutex_lock(&account.lock);
    struct mem_stats *s = &account.stats;
    s->peak_bytes = s->now_bytes;
    memcpy(s->peak_by_category, s->now_by_category, sizeof s->peak_by_category);
    memcpy(s->highest_by_category, s->now_by_category, sizeof s->highest_by_category);
    pthread_mutex_unlock(&account.lock);
}

size_t mem_process_peak_bytes(void) {
    FILE *file = fopen("/proc/self/status", "r");
    if (file == NULL) {
        return 0;
    }
    char line[256];
    size_t kib = 0;
    while (fgets(line, sizeof line, file) != NULL && sscanf(line, "VmHWM: %zu", &kib) != 1) {
    }
    fclose(file);
    return kib * 1024;
}

bool mem_timeline_start(const char *path) {
    FILE *file = files_create(path);
    if (file == NULL) {
        return false;
    }
    fputs("us", file);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        fprintf(file, "\t%s", mem_category_name((enum mem_category)c));
    }
    fputc('\n', file);
    pthread_mutex_lock(&account.lock);
    account.timeline = file;
    account.timeline_start_s = clock_s();
    timeline_line();
    pthread_mutex_unlock(&account.lock);
    return true;
}

bool mem_timeline_stop(void) {
    pthread_mutex_lock(&account.lock);
    FILE *file = account.timeline;
    account.timeline = NULL;
    pthread_mutex_unlock(&account.lock);
    if (file == NULL) {
        return true;
    }
    bool failed = ferror(file) != 0;
    return fclose(file) == 0 && !failed;
}
