// Collectives that read the other ranks' buffers where they lie, with the system call
// process_vm_readv: one copy, where slots need two.
//
//     all-reduce       rank j reads part j of all ranks and adds; then each rank reads the others'
//                      sums
//     reduce-scatter   the first half of it
//     all-gather       each rank reads the others' parts
//     broadcast        each rank reads the root's buffer
//
// Barriers: before, so that all buffers are there; after, so that nobody changes his while another
// still reads.
#include "error.h"
#include "shared.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

enum { STAGE_BYTES = 1 << 17 }; // what is read before it is added; stays in the cache

static bool read_rank(const struct shared *s, int rank, void *to, const char *from, size_t bytes) {
    pid_t pid = s->ranks[rank].pid;
    while (bytes > 0) {
        size_t most = bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30;
        struct iovec here = {.iov_base = to, .iov_len = most};
        struct iovec there = {.iov_base = (void *)from, .iov_len = most};
        ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got <= 0) {
            return false;
        }
        to = (char *)to + got;
        from += got;
        bytes -= (size_t)got;
    }
    return true;
}

// Bytes `offset` … of rank's buffer.
static void fetch(const struct shared *s, int rank, void *to, size_t offset, size_t bytes) {
    if (!read_rank(s, rank, to, s->ranks[rank].buffer + offset, bytes)) {
        int reason = errno;
        if (reason == ESRCH) {
            leave_it_to_others(); // the rank is gone, and mpirun ends the job
        }
        error_fatal(__FILE__, __LINE__, "cannot read the memory of rank %d: %s",
                    s->group->job_ranks[rank], strerror(reason));
    }
}

bool direct_possible(struct shared *s) {
    uint64_t secret = 0x5eed0000u + (unsigned)s->group->rank;
    s->ranks[s->group->rank].pid = getpid();
    s->ranks[s->group->rank].buffer = (const char *)&secret;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); // where the Yama module guards processes
    MPI_Barrier(s->group->mpi);
    int possible = 1;
    for (int r = 0; r < s->group->size && possible; r++) {
        uint64_t found = 0;
        possible = read_rank(s, r, &found, s->ranks[r].buffer, sizeof found) &&
                   found == 0x5eed0000u + (unsigned)r;
    }
    int all = 0;
    MPI_Allreduce(&possible, &all, 1, MPI_INT, MPI_MIN, s->group->mpi);
    return all;
}

// sum = the reduction of `count` elements that begin at element `begin` of each rank's whole.
static void fetch_and_reduce(struct shared *s, const struct call *call, char *sum, size_t begin,
                             size_t count) {
    int n = s->group->size;
    int rank = s->group->rank;
    size_t element = dtype_size(call->dtype);
    size_t most = STAGE_BYTES / element / (size_t)n;
    char *stage = malloc(STAGE_BYTES);
    const void *sources[n];
    CHECK(stage != NULL);
    for (size_t at = 0; at < count; at += most) {
        size_t length = count - at < most ? count - at : most;
        for (int r = 0; r < n; r++) {
            char *piece = stage + (size_t)r * most * element;
            sources[r] = r == rank ? call->whole + (begin + at) * element : piece;
            if (r != rank) {
                fetch(s, r, piece, (begin + at) * element, length * element);
            }
        }
        reduce_in_order(sum + at * element, sources, n, length, call->dtype, call->op);
    }
    free(stage);
}

static void all_reduce(struct shared *s, const struct call *call) {
    int n = s->group->size;
    size_t element = dtype_size(call->dtype);
    size_t begin = part_begin(call->count, s->group->rank, n);
    size_t end = part_begin(call->count, s->group->rank + 1, n);
    fetch_and_reduce(s, call, call->whole + begin * element, begin, end - begin);
    shared_barrier(s, call);
    for (int i = 1; i < n; i++) {
        int r = (s->group->rank + i) % n;
        size_t from = part_begin(call->count, r, n) * element;
        size_t to = part_begin(call->count, r + 1, n) * element;
        fetch(s, r, call->whole + from, from, to - from);
    }
}

static void all_gather(struct shared *s, const struct call *call) {
    int n = s->group->size;
    size_t bytes = call->count * dtype_size(call->dtype);
    char *mine = call->whole + (size_t)s->group->rank * bytes;
    if (mine != call->part) {
        memcpy(mine, call->part, bytes);
    }
    for (int i = 1; i < n; i++) {
        int r = (s->group->rank + i) % n;
        fetch(s, r, call->whole + (size_t)r * bytes, 0, bytes);
    }
}

void direct_run(struct shared *s, const struct call *call) {
    size_t rank = (size_t)s->group->rank;
    s->ranks[rank].buffer = call->kind == COMM_ALL_GATHER ? call->part : call->whole;
    shared_barrier(s, call);
    switch (call->kind) {
    case COMM_ALL_REDUCE:
        all_reduce(s, call);
        break;
    case COMM_REDUCE_SCATTER:
        fetch_and_reduce(s, call, call->part, rank * call->count, call->count);
        break;
    case COMM_ALL_GATHER:
        all_gather(s, call);
        break;
    case COMM_BROADCAST:
        if (s->group->rank != call->peer) {
            fetch(s, call->peer, call->whole, 0, call->count * dtype_size(call->dtype));
        }
        break;
    default:
        error_fatal(__FILE__, __LINE__, "%s is no collective", comm_kind_name(call->kind));
    }
    shared_barrier(s, call);
}
