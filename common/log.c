#include "log.h"
#include "clock.h"
#include "comm.h"
#include "error.h"
#include "files.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum {
    BAR_WIDTH = 30,
    BAR_WIDTH_MIN = 10, // where less is left there is only the text
    BAR_TEXT = 40, // what is left for the text behind the bar
    COLUMNS_MIN = 20, // a narrower terminal gets nothing
    COLUMNS_MAX = 100,
    COLUMN = 7, // width of a number in the line of a step
    LINES = 20, // of steps in a run, about
};

struct log {
    struct log_config config;
    FILE *json; // or NULL
    bool terminal;
    bool bar_shown;
    int64_t steps; // reported
    double step_ms; // their total, without the first
    struct comm_stats sent; // in all of them
    double items; // their total, without the first
    double start_s;
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

// sum += sign * more
static void stats_add(struct comm_stats *sum, const struct comm_stats *more, int sign) {
    for (int k = 0; k < COMM_KINDS; k++) {
        sum->calls[k] += (uint64_t)sign * more->calls[k];
        sum->bytes[k] += (uint64_t)sign * more->bytes[k];
    }
}

void log_step_begin(struct log_step *s) {
    s->ms = clock_s() * 1e3;
    s->sent = comm_stats();
}

void log_step_end(struct log_step *s) {
    struct comm_stats before = s->sent;
    s->ms = clock_s() * 1e3 - s->ms;
    s->sent = comm_stats();
    stats_add(&s->sent, &before, -1);
}

// mpirun gives every rank a terminal of its own and passes on what is written there, wherever its
// own output goes. So behind mpirun only ./run can tell.
static bool on_terminal(void) {
    const char *told = getenv("SHARD_TERMINAL");
    bool alone = strcmp(comm_transport(), "self") == 0;
    return alone ? isatty(STDOUT_FILENO) == 1 : told != NULL && strcmp(told, "1") == 0;
}

// errno says why the file could not be opened.
static void refuse(const char *flag, const char *path) {
    if (errno == EINTR) {
        error_user("%s %s: is a pipe that nobody read until the program was stopped", flag, path);
    }
    error_user("%s %s: %s; name a file that can be written", flag, path, strerror(errno));
}

struct log *log_open(struct log_config config) {
    streams_reserve();
    struct log *log = calloc(1, sizeof *log);
    CHECK(log != NULL);
    log->config = config;
    if (config.print_every == 0) {
        log->config.print_every = (config.end - config.begin) / LINES + 1;
    }
    log->terminal = !config.quiet && on_terminal();
    log->start_s = clock_s();
    if (config.json != NULL && !config.quiet) {
        log->json = files_create(config.json);
        if (log->json == NULL) {
            refuse("--log", config.json);
        }
    }
    if (config.memory != NULL && !config.quiet && !mem_timeline_start(config.memory)) {
        refuse("--memory", config.memory);
    }
    return log;
}

static bool incomplete(const char *what, const char *path) {
    error_warning("%s%s%s is not complete: writing failed", what, path[0] != '\0' ? " " : "", path);
    return false;
}

bool log_close(struct log *log) {
    bool good = true;
    if (log->json != NULL) {
        bool failed = ferror(log->json) != 0;
        if (fclose(log->json) != 0 || failed) {
            good = incomplete("--log", log->config.json);
        }
    }
    if (!mem_timeline_stop()) {
        good = incomplete("--memory", log->config.memory);
    }
    if (fflush(stdout) != 0 || ferror(stdout) != 0) {
        good = incomplete("the standard output", "");
    }
    free(log);
    return good;
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

static int terminal_columns(void) {
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
        return 80;
    }
    return size.ws_col < COLUMNS_MAX ? size.ws_col : COLUMNS_MAX;
}

// Shows how much is done, from 0 to 1, as a bar with a text behind it. In the last column a
// terminal may begin a new line, so that stays free. The cursor goes back to the start: whatever
// else is printed covers the bar.
static void bar_show(struct log *log, double done, const char *text) {
    int columns = terminal_columns() - 1;
    if (!log->terminal || columns < COLUMNS_MIN) {
        return;
    }
    bar_hide(log);
    char line[COLUMNS_MAX + 1] = "";
    int width = columns - BAR_TEXT < BAR_WIDTH ? columns - BAR_TEXT : BAR_WIDTH;
    int full = (int)(done * width);
    if (width >= BAR_WIDTH_MIN) {
        snprintf(line, sizeof line, "[%.*s%.*s] ", full, "##############################",
                 width - full, "..............................");
    }
    size_t length = strlen(line);
    snprintf(line + length, (size_t)columns + 1 - length, "%3.0f%%  %s", 100 * done, text);
    printf("%s\r", line);
    fflush(stdout);
    log->bar_shown = true;
}

void log_progress(struct log *log, const char *what, size_t done, size_t count) {
    char text[COLUMNS_MAX];
    snprintf(text, sizeof text, "%s, %zu of %zu", what, done, count);
    bar_show(log, (double)done / (double)count, text);
}

struct number {
    char text[32];
};

// A number in a column: with fewer decimals, or an exponent, where it is too large.
static struct number number(double value, int decimals) {
    struct number n = {"nan"}; // C prints some with a sign
    if (isnan(value)) {
        return n;
    }
    int length = COLUMN + 1;
    while (length > COLUMN && decimals >= 0) {
        length = snprintf(n.text, sizeof n.text, "%.*f", decimals, value);
        decimals--;
    }
    if (length > COLUMN) {
        snprintf(n.text, sizeof n.text, "%.1e", value);
    }
    return n;
}

static void bar_show_step(struct log *log, const struct log_step *s, double per_second) {
    char text[COLUMNS_MAX];
    snprintf(text, sizeof text, "loss %s  %.0f %s/s", number(s->loss, 4).text, per_second,
             log->config.item);
    double done =
        (double)(s->step - log->config.begin) / (double)(log->config.end - log->config.begin);
    bar_show(log, done, text);
}

// printf shows the sign of a NaN, which means nothing.
static void number_plain(double *x) {
    *x = isnan(*x) ? (double)NAN : *x;
}

static struct log_step step_plain(const struct log_step *s) {
    struct log_step plain = *s;
    number_plain(&plain.loss);
    number_plain(&plain.grad_norm);
    number_plain(&plain.val_loss);
    return plain;
}

// Whether a step leaves something to go on with. If not, says so.
static bool step_check(struct log *log, const struct log_step *s) {
    const char *name = "loss";
    double value = s->loss;
    if (isfinite(value)) {
        name = "gradient norm";
        value = s->grad_norm;
    }
    if (isfinite(value) && s->evaluated) {
        name = "validation loss";
        value = s->val_loss;
    }
    if (!isfinite(value) && !log->config.quiet) {
        bar_hide(log);
        fflush(stdout);
        error_warning("step %lld: the %s is %g, so the training ends here and its weights are not "
                      "saved; a smaller --lr or --clip 1 may help",
                      (long long)s->step, name, value);
    }
    return isfinite(value);
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
    log_line(log, "validation", "after step %lld: loss %s, accuracy %.2f %%", (long long)s->step,
             number(s->val_loss, 4).text, 100 * s->accuracy);
}

bool log_evaluation(struct log *log, const struct log_step *step) {
    const struct log_step plain = step_plain(step), *s = &plain;
    if (!s->evaluated) {
        return true;
    }
    evaluation_line(log, s);
    if (log->json != NULL) {
        fprintf(log->json, "{\"step\": %lld", (long long)s->step);
        json_number(log->json, "val_loss", s->val_loss);
        json_number(log->json, "accuracy", s->accuracy);
        fputs("}\n", log->json);
    }
    return step_check(log, s);
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
    printf("step %6lld  loss %7s  norm %7s  lr %.2e %7s ms %7s %s/s\n", (long long)s->step,
           number(s->loss, 4).text, number(s->grad_norm, 3).text, s->lr, number(s->ms, 1).text,
           number(per_second, 0).text, log->config.item);
    if (s->evaluated) {
        evaluation_line(log, s);
    }
    fflush(stdout);
}

bool log_report(struct log *log, const struct log_step *step) {
    const struct log_step plain = step_plain(step), *s = &plain;
    double per_second = s->ms > 0 ? (double)s->items / (s->ms * 1e-3) : 0;
    if (log->steps > 0) {
        log->step_ms += s->ms;
        log->items += (double)s->items;
    }
    stats_add(&log->sent, &s->sent, 1);
    log->steps++;
    json_step(log, s, per_second);
    bool good = isfinite(s->loss) && isfinite(s->grad_norm);
    bool due = s->step % log->config.print_every == 0 || s->step == log->config.end;
    if (!log->config.quiet && (due || !good || log->steps == 1 || s->evaluated)) {
        step_line(log, s, per_second);
    }
    if (s->step < log->config.end) {
        bar_show_step(log, s, per_second);
    }
    return step_check(log, s);
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

// Bytes that this rank sent in the steps.
static uint64_t sent_bytes(const struct comm_stats *sent) {
    uint64_t bytes = 0;
    for (int k = 0; k < COMM_KINDS; k++) {
        bytes += sent->bytes[k];
    }
    return bytes;
}

static void comm_lines(struct log *log) {
    double steps = (double)log->steps;
    if (strcmp(comm_transport(), "self") == 0 || log->steps == 0) {
        return;
    }
    log_line(log, "sent", "%.3f MB a step by each rank",
             (double)sent_bytes(&log->sent) / steps / 1e6);
    for (int k = 0; k < COMM_KINDS; k++) {
        if (log->sent.calls[k] > 0 && k != COMM_HOST) {
            bool whole = log->sent.calls[k] % (uint64_t)log->steps == 0;
            log_line(log, "", "%9.3f MB in %.*f calls of %s",
                     (double)log->sent.bytes[k] / steps / 1e6, whole ? 0 : 1,
                     (double)log->sent.calls[k] / steps, comm_kind_name((enum comm_kind)k));
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
    uint64_t steps = log->steps > 0 ? (uint64_t)log->steps : 1;
    fprintf(log->json, ", \"sent_bytes_per_step\": %llu",
            (unsigned long long)(sent_bytes(&log->sent) / steps));
    fputs("}\n", log->json);
}

void log_summary(struct log *log, const struct mem_stats *mem) {
    double seconds = clock_s() - log->start_s;
    double per_second = log->step_ms > 0 ? log->items / (log->step_ms * 1e-3) : 0;
    log_line(log, "time", "%.1f s", seconds);
    if (log->steps > 1) {
        log_line(log, "speed", "%.1f ms a step, %.0f %s/s, without the first step",
                 log->step_ms / (double)(log->steps - 1), per_second, log->config.item);
    }
    memory_lines(log, mem);
    comm_lines(log);
    json_summary(log, mem, seconds, per_second);
}
