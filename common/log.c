#include "log.h"
#include "comm.h"
#include "error.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BAR_WIDTH = 30 };

struct log {
    struct log_config config;
    FILE *json; // or NULL
    bool terminal;
    bool bar_shown;
    int64_t steps; // reported
    double step_ms; // their total, without the first
    double items; // their total, without the first
    struct timespec start;
};

// Where a standard stream was closed, the next file to be opened would get its number, and with it
// what is meant for the stream.
static void streams_reserve(void) {
    int file = open("/dev/null", O_RDWR);
    while (file >= 0 && file <= STDERR_FILENO) {
        file = open("/dev/null", O_RDWR);
    }
    if (file > STDERR_FILENO) {
        close(file);
    }
}

// mpirun gives every rank a terminal of its own and passes on what is written there, wherever its
// own output goes. So behind mpirun only ./run can tell.
static bool on_terminal(void) {
    const char *told = getenv("SHARD_TERMINAL");
    bool alone = strcmp(comm_transport(), "self") == 0;
    return alone ? isatty(STDOUT_FILENO) == 1 : told != NULL && strcmp(told, "1") == 0;
}

struct log *log_open(struct log_config config) {
    streams_reserve();
    struct log *log = calloc(1, sizeof *log);
    CHECK(log != NULL);
    log->config = config;
    log->terminal = !config.quiet && on_terminal();
    clock_gettime(CLOCK_MONOTONIC, &log->start);
    if (config.json != NULL && !config.quiet) {
        log->json = fopen(config.json, "w");
        if (log->json == NULL) {
            error_user("--log %s: %s; name a file that can be written", config.json,
                       strerror(errno));
        }
    }
    if (config.memory != NULL && !config.quiet && !mem_timeline_start(config.memory)) {
        error_user("--memory %s: %s; name a file that can be written", config.memory,
                   strerror(errno));
    }
    return log;
}

static void incomplete(const char *flag, const char *path) {
    fprintf(stderr, "warning: %s %s is not complete: writing failed\n", flag, path);
}

void log_close(struct log *log) {
    if (log->json != NULL) {
        bool failed = ferror(log->json) != 0;
        if (fclose(log->json) != 0 || failed) {
            incomplete("--log", log->config.json);
        }
    }
    if (!mem_timeline_stop()) {
        incomplete("--memory", log->config.memory);
    }
    free(log);
}

static void bar_hide(struct log *log) {
    if (log->bar_shown) {
        fputs("\r\033[K", stdout);
        log->bar_shown = false;
    }
}

void log_line(struct log *log, const char *key, const char *format, ...) {
    if (log->config.quiet) {
        return;
    }
    bar_hide(log);
    printf("%-11s ", key);
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

static void bar_show(struct log *log, const struct log_step *s, double per_second) {
    double done = (double)s->step / (double)(log->config.steps > 0 ? log->config.steps : 1);
    int full = (int)(done * BAR_WIDTH);
    char bar[BAR_WIDTH + 1];
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', full > BAR_WIDTH ? BAR_WIDTH : (size_t)full);
    bar[BAR_WIDTH] = '\0';
    bar_hide(log);
    printf("[%s] %3.0f%%  loss %.4f  %.0f %s/s", bar, 100 * done, s->loss, per_second,
           log->config.item);
    fflush(stdout);
    log->bar_shown = true;
}

// JSON has no infinity and no NaN.
static void json_number(FILE *file, const char *key, double value) {
    if (isfinite(value)) {
        fprintf(file, ", \"%s\": %.9g", key, value);
    } else {
        fprintf(file, ", \"%s\": null", key);
    }
}

static void json_step(struct log *log, const struct log_step *s, double per_second) {
    if (log->json == NULL) {
        return;
    }
    char key[32];
    snprintf(key, sizeof key, "%s_per_s", log->config.item);
    fprintf(log->json, "{\"step\": %lld", (long long)s->step);
    json_number(log->json, "loss", s->loss);
    json_number(log->json, "grad_norm", s->grad_norm);
    json_number(log->json, "lr", s->lr);
    json_number(log->json, "ms", s->ms);
    json_number(log->json, key, per_second);
    fprintf(log->json, ", \"samples\": %zu", s->samples);
    if (s->evaluated) {
        json_number(log->json, "val_loss", s->val_loss);
        json_number(log->json, "accuracy", s->accuracy);
    }
    fputs("}\n", log->json);
    fflush(log->json);
}

static void evaluation_line(struct log *log, const struct log_step *s) {
    log_line(log, "validation", "after step %lld: loss %.4f, accuracy %.2f %%", (long long)s->step,
             s->val_loss, 100 * s->accuracy);
}

void log_evaluation(struct log *log, const struct log_step *s) {
    if (!s->evaluated) {
        return;
    }
    evaluation_line(log, s);
    if (log->json != NULL) {
        fprintf(log->json, "{\"step\": %lld", (long long)s->step);
        json_number(log->json, "val_loss", s->val_loss);
        json_number(log->json, "accuracy", s->accuracy);
        fputs("}\n", log->json);
    }
}

static void json_text(struct log *log, const int32_t *text, size_t count) {
    if (log->json == NULL) {
        return;
    }
    fputs("{\"sample\": \"", log->json);
    for (size_t i = 0; i < count; i++) {
        if (text[i] == '\n') {
            fputs("\\n", log->json);
        } else if (text[i] == '"' || text[i] == '\\') {
            fprintf(log->json, "\\%c", text[i]);
        } else {
            fputc(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?', log->json);
        }
    }
    fputs("\"}\n", log->json);
}

void log_text(struct log *log, const int32_t *text, size_t count) {
    json_text(log, text, count);
    if (log->config.quiet) {
        return;
    }
    bar_hide(log);
    printf("%-11s", "sample");
    for (size_t i = 0; i < count; i++) {
        bool plain = text[i] == '\n' || (text[i] >= ' ' && text[i] <= '~');
        putchar(plain ? text[i] : '?');
    }
    putchar('\n');
    fflush(stdout);
}

static void step_line(struct log *log, const struct log_step *s, double per_second) {
    bar_hide(log);
    printf("step %6lld  loss %7.4f  norm %7.3f  lr %.2e %7.1f ms %7.0f %s/s\n", (long long)s->step,
           s->loss, s->grad_norm, s->lr, s->ms, per_second, log->config.item);
    if (s->evaluated) {
        evaluation_line(log, s);
    }
    fflush(stdout);
}

void log_report(struct log *log, const struct log_step *s) {
    double per_second = s->ms > 0 ? (double)s->items / (s->ms * 1e-3) : 0;
    if (log->steps > 0) {
        log->step_ms += s->ms;
        log->items += (double)s->items;
    }
    log->steps++;
    json_step(log, s, per_second);
    if (log->config.quiet) {
        return;
    }
    bool due = s->step % log->config.print_every == 0 || s->step == log->config.steps;
    if (due || log->steps == 1 || s->evaluated) {
        step_line(log, s, per_second);
    }
    if (log->terminal && s->step < log->config.steps) {
        bar_show(log, s, per_second);
    }
}

static void memory_lines(struct log *log, const struct mem_stats *mem) {
    log_line(log, "peak memory", "%.1f MB by the account, %.1f MB the whole process (VmHWM)",
             (double)mem->peak_bytes / 1e6, (double)mem_process_peak_bytes() / 1e6);
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        if (mem->peak_by_category[c] > 0) {
            log_line(log, "", "%9.1f MB %s", (double)mem->peak_by_category[c] / 1e6,
                     mem_category_name((enum mem_category)c));
        }
    }
}

// Bytes that this rank sent in a step, on average; without what evaluation and reports exchange.
static uint64_t sent(const struct comm_stats *comm, const struct log *log) {
    uint64_t bytes = 0;
    for (int k = 0; k < COMM_HOST; k++) {
        bytes += comm->bytes[k];
    }
    return log->steps > 0 ? bytes / (uint64_t)log->steps : bytes;
}

static void comm_lines(struct log *log, const struct comm_stats *comm) {
    if (comm->calls[COMM_HOST] == 0 || log->steps == 0) {
        return;
    }
    log_line(log, "sent", "%.3f MB a step by each rank, as a ring sends it",
             (double)sent(comm, log) / 1e6);
    for (int k = 0; k < COMM_KINDS; k++) {
        if (comm->calls[k] > 0 && k != COMM_HOST) {
            log_line(log, "", "%9.3f MB in %.1f calls of %s",
                     (double)comm->bytes[k] / (double)log->steps / 1e6,
                     (double)comm->calls[k] / (double)log->steps,
                     comm_kind_name((enum comm_kind)k));
        }
    }
}

static void json_summary(struct log *log, const struct mem_stats *mem, double seconds,
                         double per_second) {
    if (log->json == NULL) {
        return;
    }
    fprintf(log->json, "{\"summary\": true, \"parameters\": %zu, \"steps\": %lld",
            log->config.parameters, (long long)log->steps);
    json_number(log->json, "seconds", seconds);
    json_number(log->json, "per_second", per_second);
    fprintf(log->json, ", \"peak_bytes\": %zu, \"process_peak_bytes\": %zu", mem->peak_bytes,
            mem_process_peak_bytes());
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        const char *name = mem_category_name((enum mem_category)c);
        fprintf(log->json, ", \"peak_%s_bytes\": %zu, \"highest_%s_bytes\": %zu", name,
                mem->peak_by_category[c], name, mem->highest_by_category[c]);
    }
    struct comm_stats comm = comm_stats();
    fprintf(log->json, ", \"sent_bytes_per_step\": %llu", (unsigned long long)sent(&comm, log));
    fputs("}\n", log->json);
}

void log_summary(struct log *log, const struct mem_stats *mem) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)(now.tv_sec - log->start.tv_sec) +
                     (double)(now.tv_nsec - log->start.tv_nsec) * 1e-9;
    double per_second = log->step_ms > 0 ? log->items / (log->step_ms * 1e-3) : 0;
    log_line(log, "time", "%.1f s", seconds);
    if (log->steps > 1) {
        log_line(log, "speed", "%.1f ms a step, %.0f %s/s, without the first step",
                 log->step_ms / (double)(log->steps - 1), per_second, log->config.item);
    }
    memory_lines(log, mem);
    struct comm_stats comm = comm_stats();
    comm_lines(log, &comm);
    json_summary(log, mem, seconds, per_second);
}
