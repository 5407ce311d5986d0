// Ranks that share memory; what shared.c, slots.c and direct.c share.
#ifndef SHARD_MPI_SHARED_H
#define SHARD_MPI_SHARED_H

#include "transport.h"
#include <stdatomic.h>
#include <sys/types.h>

enum {
    SLOT_BYTES = 1 << 18, // a multiple of every element's size
    CACHE_LINE_BYTES = 64,
};

struct shared_rank {
    _Alignas(CACHE_LINE_BYTES) atomic_uint_fast64_t arrivals; // barriers that it has entered
    struct signature signature; // of its call, for --check-comm
    pid_t pid;
    const char *buffer; // of its call, in its own memory
};

// The memory: this, then a struct shared_rank for each rank, two slots for each rank, two for sums.
struct shared_header {
    atomic_uint arrivals; // of all ranks in all barriers: what sleepers wait for
    atomic_int sleepers;
};

struct shared {
    const struct comm_group *group;
    void *memory;
    size_t bytes;
    struct shared_header *header;
    struct shared_rank *ranks; // (size)
    char *slots; // (size, 2, SLOT_BYTES)
    char *sums; // (2, SLOT_BYTES)
    uint64_t barriers; // that this rank has entered
    uint64_t chunks; // that the group has moved through slots
    bool cores_suffice; // there is one for each rank
    bool direct; // ranks may read each other's memory
};

/** @brief Returns when all ranks have entered it. */
void shared_barrier(struct shared *s, const struct call *call);

/** @brief Where part j begins when @p count elements are cut into n. */
static inline size_t part_begin(size_t count, int j, int n) {
    return count / (size_t)n * (size_t)j + count % (size_t)n * (size_t)j / (size_t)n;
}

/** @brief Runs a collective through the slots. */
void slots_run(struct shared *s, const struct call *call);

/** @brief Whether all ranks can read each other's memory. Collective over the group. */
bool direct_possible(struct shared *s);

/** @brief Runs a collective by reading the other ranks' memory. */
void direct_run(struct shared *s, const struct call *call);

#endif
