// Data parallelism: every rank has the whole model and a part of the batch.
//
// What it does. The loss of a batch is a sum over its samples, so its gradient is, too: the sum of
// what the ranks compute from their parts. One all-reduce replaces every rank's gradients by that
// sum. After it all ranks hold the same gradients, take the same step, and keep the same weights.
//
//     backward      unit 5   unit 4   unit 3   unit 2   unit 1   unit 0
//     all-reduce             [ bucket 0 ][ bucket 1 ][ bucket 2 ][ bucket 3 ]
//                                                                wait ^     ^ step
//
// Backward finishes the last unit first, and from then on nobody touches its gradients. So they can
// be on their way while backward goes on, if there is more than one all-reduce: one for each
// bucket. In three steps (--ddp):
//
//     after     one all-reduce of everything when backward is over
//     buckets   an all-reduce as soon as a bucket is full; backward waits for it
//     overlap   the same, but nobody waits before the optimizer's step
//
// The gradients of all units lie one behind the other, so a bucket is a range of them, cut from the
// end. It need not respect the borders of units.
//
//     sent by each rank in a step   2 (n-1)/n of the gradients, however they are cut
//     time without overlap          buckets * latency + bytes / bandwidth
//     memory                        none: a bucket is a view
//
// Small buckets start earlier and leave less for the end; large ones pay the latency less often.
//
// What is left out: unused parameters (here every unit takes part in every step), and compression.
//
// Sources: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
// 2020, section 3.2; Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009.
#include "buckets.h"
#include "common/error.h"
#include "common/trace.h"
#include <stdlib.h>
#include <string.h>

struct buckets {
    struct comm world;
    const char *mode;
    struct tensor all; // the gradients of all units
    size_t *unit_begin; // (units) where each begins
    size_t size; // elements of a bucket
    size_t begun; // elements from here on are in buckets that were begun
    struct comm_handle *handles; // (count)
    size_t count; // buckets under way
};

struct buckets *buckets_create(struct comm world, const char *mode, size_t bytes,
                               const struct tensor *grads, int units) {
    struct buckets *b = calloc(1, sizeof *b);
    CHECK(b != NULL);
    b->world = world;
    b->mode = mode;
    b->all = grads[0];
    b->unit_begin = calloc(units, sizeof *b->unit_begin);
    CHECK(b->unit_begin != NULL);
    for (int u = 1; u < units; u++) {
        b->unit_begin[u] = b->all.rows;
        b->all.rows += grads[u].rows;
    }
    b->size = bytes / dtype_size(DTYPE_F32);
    b->begun = b->all.rows;
    b->handles = calloc(b->all.rows / b->size + 1, sizeof *b->handles);
    CHECK(b->handles != NULL);
    return b;
}

void buckets_free(struct buckets *b) {
    free(b->handles);
    free(b->unit_begin);
    free(b);
}

// Sums the last `count` elements that are not yet in a bucket.
static void bucket_begin(struct buckets *b, size_t count) {
    b->begun -= count;
    struct tensor bucket = tensor_view(b->all, b->begun, count, 1);
    b->handles[b->count++] = comm_all_reduce(b->world, bucket, COMM_SUM);
}

static void handles_wait(struct buckets *b) {
    trace_begin("wait for gradients", -1);
    for (size_t i = 0; i < b->count; i++) {
        comm_wait(b->handles[i]);
    }
    b->count = 0;
    trace_end();
}

void buckets_ready(struct buckets *b, int u) {
    if (strcmp(b->mode, "after") == 0) {
        return;
    }
    while (b->begun - b->unit_begin[u] >= b->size) {
        bucket_begin(b, b->size);
    }
    if (u == 0 && b->begun > 0) {
        bucket_begin(b, b->begun);
    }
    if (strcmp(b->mode, "buckets") == 0) {
        handles_wait(b);
    }
}

void buckets_wait(struct buckets *b) {
    if (strcmp(b->mode, "after") == 0) {
        bucket_begin(b, b->all.rows);
    }
    handles_wait(b);
    b->begun = b->all.rows;
}
