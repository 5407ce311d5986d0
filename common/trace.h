// A timeline of what a program does, for a trace viewer (Perfetto, chrome://tracing).
#ifndef SHARD_TRACE_H
#define SHARD_TRACE_H

#include "comm.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief Starts recording, if @p path is not NULL; else the other functions do nothing. Local;
 * call it once, before threads record. */
void trace_start(const char *path);

/** @brief Whether spans are recorded. Local. */
bool trace_on(void);

/** @brief Microseconds on the clock of all spans (since the epoch, but never set back). Local. */
double trace_now_us(void);

/**
 * @brief Begins a span on the track of the computation; spans nest.
 *
 * Local; only the thread that called trace_start().
 * @param name   such as "forward", "optimizer"; must live as long as the program
 * @param number shown behind the name, such as the unit's; -1: none
 */
void trace_begin(const char *name, int number);

/** @brief Ends the span that was begun last. Local; as trace_begin(). */
void trace_end(void);

/** @brief A call of the communication stream, for its track. */
struct trace_call {
    enum comm_kind kind;
    const char *group; // name of its group
    int group_size;
    size_t count; // elements of the larger buffer
    enum dtype dtype;
    size_t bytes; // of the larger buffer
    uint64_t number; // of the call in its group
    double enqueued_us;
    double begin_us; // when the stream began with it
    double end_us;
};

/** @brief Records a call. Local; thread-safe. */
void trace_record_call(const struct trace_call *call);

/**
 * @brief Ends recording and writes the file: rank 0 collects all ranks' spans.
 *
 * Collective over c (also where nothing is recorded, then without communication; recording is the
 * same on all ranks). The file is JSON as PyTorch's profiler writes it (the "Trace Event Format"):
 * one process per rank, named "rank N", with a track "compute" and a track "communication". Calls
 * carry PyTorch's names in `args`: "Collective name", "In msg nelems", "Out msg nelems", "Group
 * size", "dtype", "Process Group Name"; and "bytes", "call", "queued us".
 * @return false on rank 0, after a warning, if the file could not be written
 */
bool trace_finish(struct comm c);

#ifdef __cplusplus
}
#endif
#endif
