// Collectives through slots in the shared memory: for small buffers, and where ranks may not read
// each other's memory.
//
// Every rank has two slots. A call moves its data in chunks of a slot's size: a rank copies what
// the others need into its slot, waits until all have, and reads theirs; meanwhile the next chunk
// goes into the other slot. Chunks are small enough to stay in the caches.
//
//     all-reduce       the chunk is cut into a part for each rank; rank j adds part j of all ranks
//                      in rank order and puts the sum where all can read it
//     reduce-scatter   the same, and the sum stays with its rank
//     all-gather       the chunk is a piece of each rank's part
//     broadcast        the chunk is a piece of the root's buffer
//
// Why two slots are enough: chunk k + 1 goes into the slot of chunk k - 1. It is written after the
// barrier of chunk k, which no rank enters before it has read chunk k - 1. Chunks are numbered
// through all calls of a group, so this holds between calls, too.
#include "error.h"
#include "shared.h"
#include <string.h>

static char *slot(const struct shared *s, int rank, uint64_t chunk) {
    return s->slots + ((size_t)rank * 2 + (chunk & 1)) * SLOT_BYTES;
}

static char *sums(const struct shared *s, uint64_t chunk) {
    return s->sums + (chunk & 1) * SLOT_BYTES;
}

static size_t chunk_count(size_t count, size_t begin, size_t chunk) {
    return count - begin < chunk ? count - begin : chunk;
}

// Copies the chunk at x, but not this rank's own part of it, into this rank's slot.
static void all_reduce_offer(struct shared *s, const char *x, size_t count, size_t element) {
    int n = s->group->size;
    int rank = s->group->rank;
    size_t begin = part_begin(count, rank, n) * element;
    size_t end = part_begin(count, rank + 1, n) * element;
    char *mine = slot(s, rank, s->chunks);
    memcpy(mine, x, begin);
    memcpy(mine + end, x + end, count * element - end);
}

// Adds this rank's part of the chunk.
static void all_reduce_add(struct shared *s, char *x, size_t count, const struct call *call) {
    int n = s->group->size;
    int rank = s->group->rank;
    size_t element = dtype_size(call->dtype);
    size_t begin = part_begin(count, rank, n);
    size_t length = part_begin(count, rank + 1, n) - begin;
    const void *sources[n];
    for (int r = 0; r < n; r++) {
        sources[r] = (r == rank ? x : slot(s, r, s->chunks)) + begin * element;
    }
    char *sum = sums(s, s->chunks) + begin * element;
    reduce_in_order(sum, sources, n, length, call->dtype, call->op);
}

static void all_reduce(struct shared *s, const struct call *call) {
    size_t element = dtype_size(call->dtype);
    size_t chunk = SLOT_BYTES / element;
    char *x = call->whole;
    all_reduce_offer(s, x, chunk_count(call->count, 0, chunk), element);
    shared_barrier(s, call);
    for (size_t begin = 0; begin < call->count; begin += chunk) {
        size_t count = chunk_count(call->count, begin, chunk);
        size_t next = begin + count;
        all_reduce_add(s, x + begin * element, count, call);
        const char *sum = sums(s, s->chunks);
        s->chunks++;
        if (next < call->count) {
            all_reduce_offer(s, x + next * element, chunk_count(call->count, next, chunk), element);
        }
        shared_barrier(s, call);
        memcpy(x + begin * element, sum, count * element);
    }
}

// Copies a piece of every part but this rank's own.
static void reduce_scatter_offer(struct shared *s, const struct call *call, size_t begin,
                                 size_t chunk) {
    size_t element = dtype_size(call->dtype);
    size_t count = chunk_count(call->count, begin, chunk);
    char *mine = slot(s, s->group->rank, s->chunks);
    for (int r = 0; r < s->group->size; r++) {
        if (r != s->group->rank) {
            memcpy(mine + (size_t)r * chunk * element,
                   call->whole + ((size_t)r * call->count + begin) * element, count * element);
        }
    }
}

static void reduce_scatter(struct shared *s, const struct call *call) {
    int n = s->group->size;
    size_t rank = (size_t)s->group->rank;
    size_t element = dtype_size(call->dtype);
    size_t chunk = SLOT_BYTES / element / (size_t)n;
    reduce_scatter_offer(s, call, 0, chunk);
    for (size_t begin = 0; begin < call->count; begin += chunk) {
        size_t count = chunk_count(call->count, begin, chunk);
        const void *sources[n];
        shared_barrier(s, call);
        for (int r = 0; r < n; r++) {
            sources[r] = slot(s, r, s->chunks) + rank * chunk * element;
        }
        sources[rank] = call->whole + (rank * call->count + begin) * element;
        reduce_in_order(call->part + begin * element, sources, n, count, call->dtype, call->op);
        s->chunks++;
        if (begin + count < call->count) {
            reduce_scatter_offer(s, call, begin + count, chunk);
        }
    }
}

static void all_gather(struct shared *s, const struct call *call) {
    int rank = s->group->rank;
    size_t element = dtype_size(call->dtype);
    size_t chunk = SLOT_BYTES / element;
    size_t count = chunk_count(call->count, 0, chunk);
    memcpy(slot(s, rank, s->chunks), call->part, count * element);
    for (size_t begin = 0; begin < call->count; begin += chunk) {
        count = chunk_count(call->count, begin, chunk);
        size_t next = begin + count;
        shared_barrier(s, call);
        for (int r = 0; r < s->group->size; r++) {
            char *to = call->whole + ((size_t)r * call->count + begin) * element;
            if (r != rank) {
                memcpy(to, slot(s, r, s->chunks), count * element);
            } else if (to != call->part + begin * element) {
                memcpy(to, call->part + begin * element, count * element);
            }
        }
        s->chunks++;
        if (next < call->count) {
            memcpy(slot(s, rank, s->chunks), call->part + next * element,
                   chunk_count(call->count, next, chunk) * element);
        }
    }
}

static void broadcast(struct shared *s, const struct call *call) {
    bool root = s->group->rank == call->peer;
    size_t bytes = call->count * dtype_size(call->dtype);
    for (size_t begin = 0; begin < bytes; begin += SLOT_BYTES) {
        size_t count = chunk_count(bytes, begin, SLOT_BYTES);
        if (root) {
            memcpy(slot(s, call->peer, s->chunks), call->whole + begin, count);
        }
        shared_barrier(s, call);
        if (!root) {
            memcpy(call->whole + begin, slot(s, call->peer, s->chunks), count);
        }
        s->chunks++;
    }
}

void slots_run(struct shared *s, const struct call *call) {
    switch (call->kind) {
    case COMM_ALL_REDUCE:
        all_reduce(s, call);
        break;
    case COMM_REDUCE_SCATTER:
        reduce_scatter(s, call);
        break;
    case COMM_ALL_GATHER:
        all_gather(s, call);
        break;
    case COMM_BROADCAST:
        broadcast(s, call);
        break;
    default:
        error_fatal(__FILE__, __LINE__, "%s is no collective", comm_kind_name(call->kind));
    }
}
