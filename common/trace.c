#include "trace.h"
#include "error.h"
#include "files.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CLOCK_TRIES = 5,
    PIECE_BYTES = 1 << 20, // of JSON that a rank hands over at once, and one event more
    TRACK_COMPUTE = 0,
    TRACK_COMMUNICATION = 1,
};

struct span {
    const char *name;
    int number; // -1: none
    ptrdiff_t parent; // the span around it; -1: none
    double begin_us;
    double end_us;
};

// Spans are kept in the order in which they began, so that a span comes after the one around it.
// They belong to one thread; calls may come from any.
static struct {
    atomic_bool on;
    char *path;
    pthread_once_t clock_once;
    int64_t epoch_ns; // to be added to CLOCK_MONOTONIC
    struct span *spans; // (span_room), the first span_count are used
    size_t span_count;
    size_t span_room;
    ptrdiff_t open; // the span that was begun last of those that have not ended; -1: none
    pthread_mutex_t lock; // of the calls
    struct trace_call *calls; // (call_room), the first call_count are used
    size_t call_count;
    size_t call_room;
} trace = {
    .clock_once = PTHREAD_ONCE_INIT,
    .open = -1,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

// ---- the clock ---------------------------------------------------------------------------------

static int64_t clock_ns(clockid_t clock) {
    struct timespec now;
    CHECK(clock_gettime(clock, &now) == 0);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// CLOCK_REALTIME may be set back while the program runs, so it is read at the start only. Of some
// readings between two of CLOCK_MONOTONIC the fastest is the one that nothing interrupted.
static void clock_measure(void) {
    int64_t fastest = INT64_MAX;
    for (int i = 0; i < CLOCK_TRIES; i++) {
        int64_t before = clock_ns(CLOCK_MONOTONIC);
        int64_t real = clock_ns(CLOCK_REALTIME);
        int64_t took = clock_ns(CLOCK_MONOTONIC) - before;
        if (took < fastest) {
            fastest = took;
            trace.epoch_ns = real - (before + took / 2);
        }
    }
}

double trace_now_us(void) {
    pthread_once(&trace.clock_once, clock_measure);
    int64_t ns = clock_ns(CLOCK_MONOTONIC) + trace.epoch_ns;
    return (double)(ns / 1000) + (double)(ns % 1000) * 1e-3;
}

// ---- recording ---------------------------------------------------------------------------------

bool trace_on(void) {
    return atomic_load_explicit(&trace.on, memory_order_acquire);
}

void trace_start(const char *path) {
    CHECK(!trace_on());
    pthread_once(&trace.clock_once, clock_measure);
    if (path == NULL) {
        return;
    }
    trace.path = strdup(path);
    CHECK(trace.path != NULL);
    atomic_store_explicit(&trace.on, true, memory_order_release);
}

// Makes room for one element more.
static void *array_grow(void *array, size_t count, size_t *room, size_t element_bytes) {
    if (count == *room) {
        *room = count == 0 ? 1024 : 2 * count;
        array = realloc(array, *room * element_bytes);
        CHECK(array != NULL);
    }
    return array;
}

void trace_begin(const char *name, int number) {
    if (!trace_on()) {
        return;
    }
    trace.spans = array_grow(trace.spans, trace.span_count, &trace.span_room, sizeof *trace.spans);
    trace.spans[trace.span_count] = (struct span){
        .name = name,
        .number = number,
        .parent = trace.open,
        .begin_us = trace_now_us(),
    };
    trace.open = (ptrdiff_t)trace.span_count++;
}

void trace_end(void) {
    if (!trace_on()) {
        return;
    }
    CHECK(trace.open >= 0);
    struct span *span = &trace.spans[trace.open];
    span->end_us = trace_now_us();
    trace.open = span->parent;
}

void trace_record_call(const struct trace_call *call) {
    if (!trace_on()) {
        return;
    }
    CHECK(call->group != NULL && call->group_size > 0);
    pthread_mutex_lock(&trace.lock);
    if (trace_on()) { // still, with the lock
        trace.calls =
            array_grow(trace.calls, trace.call_count, &trace.call_room, sizeof *trace.calls);
        trace.calls[trace.call_count++] = *call;
    }
    pthread_mutex_unlock(&trace.lock);
}

// After this the arrays are the caller's alone: the calls that collect the events are no events.
static void recording_stop(void) {
    while (trace.open >= 0) { // a span that nobody ended ends here
        trace_end();
    }
    pthread_mutex_lock(&trace.lock);
    atomic_store_explicit(&trace.on, false, memory_order_release);
    pthread_mutex_unlock(&trace.lock);
}

static void recording_free(void) {
    free(trace.spans);
    free(trace.calls);
    free(trace.path);
    trace.spans = NULL;
    trace.span_count = trace.span_room = 0;
    trace.calls = NULL;
    trace.call_count = trace.call_room = 0;
    trace.path = NULL;
}

// ---- JSON --------------------------------------------------------------------------------------

// The names in `args` are those of PyTorch's profiler, and so are the values of "Collective name"
// and "dtype": tools for its traces compute bandwidths from them. Source: pytorch,
// torch/csrc/distributed/c10d/ParamCommsUtils.hpp and ProcessGroupNCCL.cpp; pytorch/kineto,
// libkineto/src/output_json.cpp.

static const char *collective_name(enum comm_kind kind) {
    static const char *const names[COMM_KINDS] = {
        [COMM_ALL_REDUCE] = "allreduce",
        [COMM_REDUCE_SCATTER] = "_reduce_scatter_base",
        [COMM_ALL_GATHER] = "_allgather_base",
        [COMM_BROADCAST] = "broadcast",
        [COMM_SEND] = "send",
        [COMM_RECV] = "recv",
        [COMM_HOST] = "host", // ours
    };
    return names[kind];
}

static const char *scalar_type(enum dtype dtype) {
    static const char *const names[] = {
        [DTYPE_F32] = "Float",  [DTYPE_BF16] = "BFloat16", [DTYPE_F16] = "Half",
        [DTYPE_F64] = "Double", [DTYPE_I32] = "Int",       [DTYPE_U8] = "Byte",
    };
    return names[dtype];
}

// The text as it stands between the quotes of a JSON string; UTF-8 stays.
static void text_print(FILE *out, const char *text) {
    for (const char *c = text; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\') {
            fprintf(out, "\\%c", *c);
        } else if ((unsigned char)*c < 0x20) {
            fprintf(out, "\\u%04x", (unsigned)*c);
        } else {
            fputc(*c, out);
        }
    }
}

// Begins a complete event ("X"), up to its name and times_print().
static void event_print(FILE *out, const char *category) {
    fprintf(out, ",\n{\"ph\": \"X\", \"cat\": \"%s\", \"name\": \"", category);
}

static void times_print(FILE *out, int rank, int track, double begin_us, double end_us) {
    fprintf(out, "\", \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f", rank, track, begin_us,
            end_us - begin_us);
}

static void span_print(FILE *out, int rank, const struct span *span) {
    event_print(out, "user_annotation");
    text_print(out, span->name);
    if (span->number >= 0) {
        fprintf(out, " %d", span->number);
    }
    times_print(out, rank, TRACK_COMPUTE, span->begin_us, span->end_us);
    fputs("}", out);
}

static void call_print(FILE *out, int rank, const struct trace_call *call) {
    size_t part = call->count / (size_t)call->group_size;
    size_t in = call->kind == COMM_ALL_GATHER ? part : call->count;
    size_t output = call->kind == COMM_REDUCE_SCATTER ? part : call->count;
    event_print(out, "kernel");
    text_print(out, comm_kind_name(call->kind));
    times_print(out, rank, TRACK_COMMUNICATION, call->begin_us, call->end_us);
    fprintf(out, ", \"args\": {\"Collective name\": \"%s\"", collective_name(call->kind));
    fprintf(out, ", \"In msg nelems\": %zu, \"Out msg nelems\": %zu", in, output);
    fprintf(out, ", \"Group size\": %d", call->group_size);
    fprintf(out, ", \"dtype\": \"%s\"", scalar_type(call->dtype));
    fputs(", \"Process Group Name\": \"", out);
    text_print(out, call->group);
    fprintf(out, "\", \"bytes\": %zu, \"call\": %" PRIu64, call->bytes, call->number);
    fprintf(out, ", \"queued us\": %.3f}}", call->begin_us - call->enqueued_us);
}

// Says how something is called, or its place among others.
static void metadata_print(FILE *out, int rank, int track, const char *what, const char *value) {
    fprintf(out, "{\"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"name\": \"%s\", \"args\": {%s}}",
            rank, track, what, value);
}

// A viewer sorts tracks by their names unless it is told; the computation comes first.
static void track_print(FILE *out, int rank, int track, const char *name) {
    char value[64];
    snprintf(value, sizeof value, "\"name\": \"%s\"", name);
    fputs(",\n", out);
    metadata_print(out, rank, track, "thread_name", value);
    snprintf(value, sizeof value, "\"sort_index\": %d", track);
    fputs(",\n", out);
    metadata_print(out, rank, track, "thread_sort_index", value);
}

// All up to the first event. Times count from the epoch: their base is 0.
static void head_print(FILE *out, int size) {
    char value[64];
    fprintf(out,
            "{\n\"schemaVersion\": 1,\n\"displayTimeUnit\": \"ms\",\n\"baseTimeNanoseconds\": 0,\n"
            "\"distributedInfo\": {\"backend\": \"%s\", \"rank\": 0, \"world_size\": %d},\n"
            "\"traceEvents\": [\n",
            comm_transport(), size);
    for (int rank = 0; rank < size; rank++) {
        snprintf(value, sizeof value, "\"name\": \"rank %d\"", rank);
        fputs(rank == 0 ? "" : ",\n", out);
        metadata_print(out, rank, TRACK_COMPUTE, "process_name", value);
        snprintf(value, sizeof value, "\"sort_index\": %d", rank);
        fputs(",\n", out);
        metadata_print(out, rank, TRACK_COMPUTE, "process_sort_index", value);
        track_print(out, rank, TRACK_COMPUTE, "compute");
        track_print(out, rank, TRACK_COMMUNICATION, "communication");
    }
}

// ---- the file ----------------------------------------------------------------------------------

// A piece of this rank's events, beginning with number *next, which is moved on; empty after the
// last. The caller frees it.
static char *piece_print(int rank, size_t *next, size_t *length) {
    char *text = NULL;
    FILE *out = open_memstream(&text, length);
    CHECK(out != NULL);
    while (*next < trace.span_count + trace.call_count && ftell(out) < PIECE_BYTES) {
        if (*next < trace.span_count) {
            span_print(out, rank, &trace.spans[*next]);
        } else {
            call_print(out, rank, &trace.calls[*next - trace.span_count]);
        }
        (*next)++;
    }
    bool failed = ferror(out) != 0;
    CHECK(fclose(out) == 0 && !failed);
    CHECK(*length <= UINT32_MAX);
    return text;
}

// Gathers a piece of every rank, each filled up with zeros to the longest, and writes them if this
// rank has the file. Collective over c. Returns false when no rank had anything left.
static bool pieces_collect(struct comm c, size_t *next, FILE *file) {
    size_t length;
    char *text = piece_print(c.rank, next, &length);
    uint32_t longest = (uint32_t)length;
    comm_max_u32(c, &longest);
    if (longest > 0) {
        char *piece = calloc(longest, 1);
        char *pieces = calloc((size_t)c.size, longest);
        CHECK(piece != NULL && pieces != NULL);
        memcpy(piece, text, length);
        comm_gather_host(c, pieces, piece, longest);
        for (int rank = 0; rank < c.size && file != NULL; rank++) {
            const char *events = pieces + (size_t)rank * longest;
            fwrite(events, 1, strnlen(events, longest), file);
        }
        free(pieces);
        free(piece);
    }
    free(text);
    return longest > 0;
}

// Pieces bound the memory that this takes, however long the training was. A file that cannot be
// written stops no rank: all go on collecting.
bool trace_finish(struct comm c) {
    char error[ERROR_TEXT_SIZE];
    struct files_write *w = NULL;
    FILE *file = NULL;
    bool good = true;
    if (!trace_on()) {
        return true;
    }
    recording_stop();
    if (c.rank == 0) {
        w = files_write_begin(trace.path, error, sizeof error);
        good = w != NULL;
    }
    if (w != NULL) {
        file = files_write_stream(w);
        head_print(file, c.size);
    }
    size_t next = 0;
    while (pieces_collect(c, &next, file)) {
    }
    if (w != NULL) {
        fputs("\n]\n}\n", file);
        good = files_write_commit(w, error, sizeof error);
    }
    if (!good) {
        error_warning("no trace written: %s", error);
    }
    recording_free();
    return good;
}
